"""What a check has found on a node without a job, as a claim for policy, and for how long it stands. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from eagle_eye.detectors.types import Evidence, Verdict
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.records import CheckOutcome, Figure, Incident, Node

NO_JOB = ""  # of the incidents and actions that concern no job
DETECTOR = "node_check"
FAULT = "silent_data_corruption"
CHECKS = frozenset({"sdc_gemm", "sdc_all_reduce"})
OWN_RESULTS = "sdc_gemm"  # each device's own; a sum that is wrong may be any GPU's fault
WRONG, OPERATIONS, SECONDS = "wrong_numbers", "operations", "compared_seconds"


def found(
    node: str, outcomes: Iterable[CheckOutcome], devices: Mapping[str, int], check_id: str, onset_s: float
) -> Verdict | None:
    """Return the claim that follows from a check of a node, None where no number was wrong.

    ``devices`` are the node's GPUs by UUID. Wrong numbers are proof; what hung or was lost is another trouble.
    """
    wrong = [(outcome, figure) for outcome in outcomes for figure in figures(outcome, WRONG) if figure.value]
    if not wrong:
        return None
    whose = {figure.device for outcome, figure in wrong if outcome.name == OWN_RESULTS}
    seats = {devices[uuid] for uuid in whose if uuid in devices}
    reasons = dict.fromkeys(f"{outcome.name}: {outcome.reason}" for outcome, _ in wrong)
    return _claim(
        node,
        device=seats.pop() if len(whose) == len(seats) == 1 else None,
        onset_s=onset_s,
        summary=f"{node} computed wrong numbers while it had no job (check {check_id}): {'; '.join(reasons)}",
        evidence=tuple(
            Evidence(f"{outcome.name}.{WRONG}", node, devices.get(figure.device), figure.value, None, 0.0, "1")
            for outcome, figure in wrong
        ),
    )


def figures(outcome: CheckOutcome, name: str) -> list[Figure]:
    """Return the figures of this name of a check for silent corruption; none of another's."""
    return [figure for figure in outcome.values if figure.name == name] if outcome.name in CHECKS else []


def standing(incidents: Sequence[Incident], nodes: Mapping[str, Node], now_s: float) -> Judgement:
    """Return what is still to be said of nodes without a job; ``incidents`` are the open ones of no job.

    What was found stands until somebody has put the node back into service since, or ends the incident: no check that
    passes takes it back.
    """
    claims = (_again(i) for i in incidents if i.state != "recovered" and _stands(i, nodes.get(i.node or "")))
    return Judgement(job=NO_JOB, attempt=0, now_s=now_s, verdicts=tuple(claims))


def _stands(incident: Incident, node: Node | None) -> bool:
    return node is not None and (node.state != "in_service" or node.updated_s < incident.since_s)


def _again(incident: Incident) -> Verdict:
    """Return the claim that the incident keeps."""
    return _claim(incident.node or "", incident.device, incident.onset_s, incident.summary, ())


def _claim(node: str, device: int | None, onset_s: float, summary: str, evidence: tuple[Evidence, ...]) -> Verdict:
    return Verdict(
        detector=DETECTOR,
        fault=FAULT,
        job=NO_JOB,
        nodes=(node,),
        node=node,
        device=device,
        confidence=1.0,
        onset_s=onset_s,
        summary=summary,
        evidence=evidence,
        kinds=frozenset({DETECTOR}),
        fact=True,
        asks="drain_node",  # there is no job to restart
    )
