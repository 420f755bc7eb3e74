"""Finds nodes that fail repeatedly across restarts and jobs (Meta's "lemon nodes"). Pure.

A few nodes account for most of a fleet's failures (3 of 63 nodes for more than half of all exclusions; 40 lemons of
thousands, whose removal cut failures of large jobs from 14% to 4%; Kokolis et al., HPCA 2025). A node counts as
recurrent if it was the culprit more often than chance explains for any node of the fleet.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from eagle_eye.detectors.faults import BY_NAME
from eagle_eye.detectors.types import Evidence, Verdict
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.model.records import Incident

HISTORY_S = 28 * 86_400.0  # the period over which Meta counts its lemons' signals
CULPRIT_MIN = 3  # incidents with the node as culprit; two may be one badly repaired fault
CHANCE_MAX = 0.01  # that any healthy node of the fleet would have as many
DISRUPTIVE = ("exclude_node", "restart_job")


def recurrences(judgement: Judgement, history: Iterable[Incident], fleet_size: int) -> list[Verdict]:
    """Return a verdict for each of the job's nodes that was the culprit too often.

    ``history`` are all jobs' incidents. Only those count that stopped or slowed a job so that an action was requested,
    in which the node was accused rather than the program, and which were not marked a false alarm; one per attempt.
    Nodes' time in use is not known here, so all nodes of the fleet are assumed to be used equally.
    """
    counted = [i for i in history if _counts(i, judgement.now_s)]
    if not counted:
        return []
    times = Counter(node for node, _, _ in {(i.node, i.job, i.attempt) for i in counted})
    members = {rank.node for rank in judgement.ranks}
    found = []
    for node in sorted(members & times.keys()):
        if times[node] >= CULPRIT_MIN:
            chance = _chance(times[node], sum(times.values()) - times[node], fleet_size)
            if chance <= CHANCE_MAX:
                mine = [i for i in counted if i.node == node]
                found.append(_verdict(judgement, node, times[node], mine, chance))
    return found


def often_accused(history: Iterable[Incident]) -> frozenset[str]:
    """Return the nodes that ``recurrences`` can report at all: the culprits of at least ``CULPRIT_MIN``."""
    times = Counter(node for node, _, _ in {(i.node, i.job, i.attempt) for i in history} if node is not None)
    return frozenset(node for node, count in times.items() if count >= CULPRIT_MIN)


def _counts(incident: Incident, now_s: float) -> bool:
    return (
        incident.node is not None
        and incident.state != "false"
        and not incident.application
        and incident.action in DISRUPTIVE
        and BY_NAME[incident.fault].trouble != "early"
        and now_s - incident.detected_s <= HISTORY_S
    )


def _chance(count: int, elsewhere: int, fleet_size: int) -> float:
    """Return the probability that some node of the fleet has ``count`` by chance, at the other nodes' rate (Poisson).

    Half an incident is added to the others' count, so that one failure is not significant in an otherwise healthy
    fleet.
    """
    nodes = max(fleet_size, 2)
    rate = (elsewhere + 0.5) / (nodes - 1)
    below = sum(math.exp(-rate + k * math.log(rate) - math.lgamma(k + 1)) for k in range(count))
    return min(nodes * max(1 - below, 0.0), 1.0)


def _verdict(judgement: Judgement, node: str, count: int, incidents: Sequence[Incident], chance: float) -> Verdict:
    faults = ", ".join(f"{fault} x{times}" for fault, times in Counter(i.fault for i in incidents).most_common(3))
    return Verdict(
        detector="recurrence",
        fault="recurrent_node",
        job=judgement.job,
        nodes=(node,),
        node=node,
        device=None,
        confidence=min(1 - chance, 0.99),
        onset_s=min(i.onset_s for i in incidents),
        summary=(
            f"{node} was the culprit in {count} attempts within {HISTORY_S / 86_400:.0f} days ({faults});"
            f" by chance that happens to a node of this fleet with probability {chance:.2g}"
        ),
        evidence=(Evidence("culprit_incidents", node, None, float(count), None, float(CULPRIT_MIN), "incidents"),),
        kinds=frozenset({"history"}),
    )
