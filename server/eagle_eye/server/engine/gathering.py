"""Requests evidence before an action destroys it: which nodes to ask, and how long to wait. Pure.

Agents gather within seconds. An action that stops a job is held back until they have, or for ``wait_s`` at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.engine.policy import Decision
from eagle_eye.server.model.records import EvidenceRequest, Incident

DESTRUCTIVE = frozenset({"exclude_node", "restart_job"})  # a drain waits for the job's end, other actions touch nothing
ASKED_BY = "server"  # the requester if no person is
LATE_S = 600.0  # how long a request may be handed out and answered after its deadline


@dataclass(frozen=True, slots=True)
class Gathering:
    """The evidence state that ``respond`` uses; the default asks no agent.

    ``gatherers`` are the nodes whose agents can gather, each with when it was last heard. ``asked`` are the requests on
    record for the job's open incidents. ``within_s`` is the time given to agents, ``wait_s`` 0: act at once.
    """

    gatherers: Mapping[str, float] = field(default_factory=dict)
    asked: Sequence[EvidenceRequest] = ()
    wait_s: float = 0.0
    within_s: float = 3.0
    nodes_max: int = 32


def wanted(
    incident: Incident, decision: Decision, judgement: Judgement, gathering: Gathering, new_id: Callable[[], str]
) -> tuple[EvidenceRequest, ...]:
    """Return the requests made by the incident's first decision to act; none if they were made before.

    The suspects are asked, and the nodes that leave with them.
    """
    if decision.kind not in DESTRUCTIVE or any(e.incident_id == incident.id for e in _ours(gathering.asked)):
        return ()
    leaving = dict.fromkeys((*suspects(incident, judgement), *decision.exclude))
    nodes = [node for node in leaving if node in gathering.gatherers]
    return tuple(
        EvidenceRequest(
            id=new_id(),
            incident_id=incident.id,
            node=node,
            job=incident.job,
            attempt=incident.attempt,
            kind="evidence",
            state="asked",
            within_seconds=gathering.within_s,
            asked_by=ASKED_BY,
            created_s=judgement.now_s,
            updated_s=judgement.now_s,
            expires_s=judgement.now_s + gathering.within_s + LATE_S,
        )
        for node in nodes[: gathering.nodes_max]
    )


def suspects(incident: Incident, judgement: Judgement) -> list[str]:
    """Return the nodes that an incident concerns, the accused first; if it names none, all of the job's by rank."""
    if incident.nodes:
        return sorted(incident.nodes, key=lambda node: node != incident.node)
    return list(dict.fromkeys(member.node for member in sorted(judgement.ranks, key=attrgetter("rank"))))


def reason_to_wait(incident: Incident, asked: Sequence[EvidenceRequest], gathering: Gathering, now_s: float) -> str:
    """Return why an action has to wait, or "".

    No wait for a fact (its proof is in the kernel log, which no restart erases, or the process is dead), for an agent
    not heard for as long as the wait, or beyond ``wait_s``; nor for a node that is silent by the incident's own claim.
    """
    if incident.fact:
        return ""
    mute = incident.nodes if incident.fault == "node_unreachable" else []
    awaited = [
        evidence.node
        for evidence in _ours((*gathering.asked, *asked))
        if evidence.incident_id == incident.id
        and evidence.state == "asked"
        and evidence.node not in mute
        and 0 <= now_s - evidence.created_s < gathering.wait_s  # a clock that was set back must not hold anything
        and now_s - gathering.gatherers.get(evidence.node, float("-inf")) <= gathering.wait_s
    ]
    if not awaited:
        return ""
    more = f" and {len(awaited) - 1} more" if len(awaited) > 1 else ""
    return f"evidence is gathered on {awaited[0]}{more}, for at most {gathering.wait_s:g} s (evidence.wait_s)"


def _ours(asked: Sequence[EvidenceRequest]) -> list[EvidenceRequest]:
    return [evidence for evidence in asked if evidence.asked_by == ASKED_BY and evidence.kind == "evidence"]
