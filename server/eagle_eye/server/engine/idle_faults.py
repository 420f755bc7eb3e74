"""Turns findings on a node without a job into claims for policy, and keeps them until resolved. Pure.

Findings are of GPU inventories, and of the checks that idle nodes run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from eagle_eye.detectors.types import Evidence, Verdict
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.model.records import CheckOutcome, Figure, Incident, Node

WEEK_S = 7 * 86_400.0


class IdleCheckSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How nodes without a job are checked for silent corruption, if their agents make checks. 0 s a week: never."""

    weekly_budget_s: Annotated[float, Meta(ge=0, le=WEEK_S)] = 0.0  # of each node, under load
    check_s: Annotated[float, Meta(ge=10, le=600)] = 60.0  # of one check; what it is asked for counts, not what it took
    every_s: Annotated[float, Meta(ge=300, le=WEEK_S)] = 3_600.0  # from one check of a node to its next at least
    idle_s: Annotated[float, Meta(ge=0, le=86_400)] = 600.0  # without a job, before a node is asked
    nodes_at_once: Annotated[int, Meta(ge=1)] = 4  # of the whole fleet: each takes the power of a job

    def __post_init__(self) -> None:
        """Refuse a budget that no check fits into. Raises ValueError, which the configuration reader reports."""
        if 0 < self.weekly_budget_s < self.check_s:
            raise ValueError(
                f"weekly_budget_s: expected 0 or at least check_s ({self.check_s:g}), got {self.weekly_budget_s:g}"
            )


class RequestedCheck(NamedTuple):
    """A requested check of a node; ``begun``: it has started, or still may."""

    node: str
    time_s: float
    begun: bool = True


def due(
    idle_since_s: Mapping[str, float],
    asked: Iterable[RequestedCheck],
    under_way: int,
    settings: IdleCheckSettings,
    now_s: float,
) -> list[str]:
    """Return the nodes to check now, those checked longest ago first.

    ``idle_since_s`` has the nodes that may be checked, ``asked`` their checks of at least the last week, ``under_way``
    is the number of open checks. Within any ``WEEK_S`` no node starts more checks than its budget allows; setting a
    clock back does not make a check come earlier.
    """
    spent_s: dict[str, float] = {}
    last_s: dict[str, float] = {}
    for one in asked:
        last_s[one.node] = max(one.time_s, last_s.get(one.node, one.time_s))
        if one.begun and now_s - one.time_s < WEEK_S:
            spent_s[one.node] = spent_s.get(one.node, 0.0) + settings.check_s
    may = [
        node
        for node, since_s in idle_since_s.items()
        if now_s - since_s >= settings.idle_s
        and spent_s.get(node, 0.0) + settings.check_s <= settings.weekly_budget_s
        and (node not in last_s or now_s - last_s[node] >= settings.every_s)
    ]
    may.sort(key=lambda node: (last_s.get(node, float("-inf")), node))
    return may[: max(0, settings.nodes_at_once - under_way)]


NO_JOB = ""  # of the incidents and actions without a job
DETECTOR = "node_check"
FAULT = "silent_data_corruption"
# GPU inventory findings: fewer than before, and fewer than similar nodes.
INVENTORY, MISSING, FEWER, UNLINKED = "inventory", "gpu_lost", "host_errors", "nvlink_degraded"
CONFIDENCE_FEWER = 0.6  # nodes of one model may have been bought with fewer
NAMED_MAX = 4  # GPUs, in a sentence
CHECKS = frozenset({"sdc_gemm", "sdc_all_reduce"})
OWN_RESULTS = "sdc_gemm"  # each device's own; a wrong sum may be any GPU's fault
WRONG, OPERATIONS, SECONDS = "wrong_numbers", "operations", "compared_seconds"


def found(
    node: str, outcomes: Iterable[CheckOutcome], devices: Mapping[str, int], check_id: str, onset_s: float
) -> Verdict | None:
    """Return the claim that follows from a check of a node, None if no number was wrong.

    ``devices`` are the node's GPUs by UUID. Wrong numbers are proof; hung or lost devices are another fault.
    """
    wrong = [(outcome, figure) for outcome in outcomes for figure in figures(outcome, WRONG) if figure.value]
    if not wrong:
        return None
    whose = {figure.device for outcome, figure in wrong if outcome.name == OWN_RESULTS}
    seats = {devices[uuid] for uuid in whose if uuid in devices}
    reasons = dict.fromkeys(f"{outcome.name}: {outcome.reason}" for outcome, _ in wrong)
    return _claim(
        DETECTOR,
        FAULT,
        node,
        device=seats.pop() if len(whose) == len(seats) == 1 else None,
        onset_s=onset_s,
        summary=f"{node} computed wrong numbers while it had no job (check {check_id}): {'; '.join(reasons)}",
        evidence=tuple(
            Evidence(f"{outcome.name}.{WRONG}", node, devices.get(figure.device), figure.value, None, 0.0, "1")
            for outcome, figure in wrong
        ),
        proven=True,
    )


def figures(outcome: CheckOutcome, name: str) -> list[Figure]:
    """Return the figures with this name from a check for silent corruption; none from other checks."""
    return [figure for figure in outcome.values if figure.name == name] if outcome.name in CHECKS else []


def standing(incidents: Sequence[Incident], nodes: Mapping[str, Node], now_s: float) -> Judgement:
    """Return the claims still open for nodes without a job; ``incidents`` are the open ones without a job.

    A claim holds until the node has been put back into service since, or a person ends the incident: a passed check
    does not withdraw it.
    """
    claims = (_again(i) for i in incidents if i.state != "recovered" and _stands(i, nodes.get(i.node or "")))
    return Judgement(job=NO_JOB, attempt=0, now_s=now_s, verdicts=tuple(claims))


def _stands(incident: Incident, node: Node | None) -> bool:
    return node is not None and (node.state != "in_service" or node.updated_s < incident.since_s)


def gpus_missing(node: str, missing: Mapping[str, int], reported: int, onset_s: float) -> Verdict:
    """Return the claim that a node has lost GPUs: ``missing`` are their devices by UUID, ``reported`` its count."""
    named = ", ".join(f"{uuid} (device {device})" for uuid, device in list(missing.items())[:NAMED_MAX])
    return _claim(
        INVENTORY,
        MISSING,
        node,
        device=None,
        onset_s=onset_s,
        summary=f"{node} shows {reported} of its {reported + len(missing)} GPUs; missing: {named}",
        evidence=tuple(Evidence(INVENTORY, node, device, uuid) for uuid, device in missing.items()),
        proven=True,
    )


def fewer_gpus(node: str, model: str, reported: int, usual: int, onset_s: float) -> Verdict:
    """Return the claim that a node has fewer GPUs than nearly all others with the same model, and always had."""
    return _claim(
        INVENTORY,
        FEWER,
        node,
        device=None,
        onset_s=onset_s,
        summary=f"{node} shows {reported} GPUs, nearly all other nodes with {model} show {usual}",
        evidence=(Evidence(INVENTORY, node, None, float(reported), float(usual), float(usual), "GPUs"),),
        proven=False,
    )


def nvlinks_down(node: str, up: Mapping[int, int], due: int, alike: bool, onset_s: float) -> Verdict:
    """Return the claim that GPUs of a node lack NVLinks: ``up`` by device, where others there have ``due``, or had.

    Only reported if all of the node's GPUs are ``alike``: they may be configured that way.
    """
    named = ", ".join(f"gpu{device} {links}" for device, links in list(up.items())[:NAMED_MAX])
    more = f" and {len(up) - NAMED_MAX} more" if len(up) > NAMED_MAX else ""
    return _claim(
        INVENTORY,
        UNLINKED,
        node,
        device=next(iter(up)) if len(up) == 1 else None,
        onset_s=onset_s,
        summary=f"{node} has fewer than {due} NVLinks up: {named}{more}",
        evidence=tuple(
            Evidence("gpu_nvlinks_active", node, device, float(links), float(due), float(due), "links")
            for device, links in up.items()
        ),
        proven=not alike,
    )


def _again(incident: Incident) -> Verdict:
    """Return the claim held by the incident."""
    return Verdict(
        detector=incident.detectors[0],
        fault=incident.fault,
        job=NO_JOB,
        nodes=tuple(incident.nodes),
        node=incident.node,
        device=incident.device,
        confidence=incident.confidence,
        onset_s=incident.onset_s,
        summary=incident.summary,
        evidence=(),
        kinds=frozenset(incident.kinds),
        fact=incident.fact,
        asks="notify" if incident.asks == "notify" else "drain_node",
    )


def _claim(
    detector: str,
    fault: str,
    node: str,
    device: int | None,
    onset_s: float,
    summary: str,
    evidence: tuple[Evidence, ...],
    *,
    proven: bool,
) -> Verdict:
    """Return a claim: a proven one drains the node, any other is only reported."""
    return Verdict(
        detector=detector,
        fault=fault,
        job=NO_JOB,
        nodes=(node,),
        node=node,
        device=device,
        confidence=1.0 if proven else CONFIDENCE_FEWER,
        onset_s=onset_s,
        summary=summary,
        evidence=evidence,
        kinds=frozenset({detector}),
        fact=proven,
        asks="drain_node" if proven else "notify",  # there is no job to restart
    )
