"""Turns findings on a node without a job into claims for policy, and keeps them until resolved. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from eagle_eye.detectors.types import Evidence, Verdict
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.model.records import CheckOutcome, Figure, Incident, Node

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
