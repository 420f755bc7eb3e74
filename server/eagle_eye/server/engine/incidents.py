"""From findings to incidents: one incident per cause, from the first verdict to the recovery. Pure.

A finding finds its incident by (job, attempt, family): everything that stops a job is one family, since a job
stops for one reason; what breaks its numbers another; slowness and silence are one family per node (``fusion``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import msgspec

from eagle_eye.detectors.types import Evidence, Verdict
from eagle_eye.schema.action import EvidenceItem
from eagle_eye.server.engine.engine import Judgement
from eagle_eye.server.engine.fusion import SHARED_SLOWNESS, Finding, fuse
from eagle_eye.server.records import Incident

OPEN_STATES = ("open", "acting")
UNKNOWN_CAUSE = "straggler"  # what a slow node is called while no counter says why
OWN_FACTOR, SHARED_SLOWDOWN_MIN = 2.0, 0.02  # times what a rack's trouble costs, beyond which a node has its own


def fold(
    known: Iterable[Incident],
    judgement: Judgement,
    acting: Collection[tuple[str, int]],
    gone_s: float,
    new_id: Callable[[], str],
) -> list[Incident]:
    """Return the incidents of the judgement's job that are new or have changed.

    ``known`` are the job's incidents that have not ended, and those that a person marked false: the same claim is not
    made again in their attempt. ``acting`` holds the (job, attempt) pairs that a
    subscriber is restarting right now: what stops in them is our own doing. An incident without a verdict for
    ``gone_s`` has recovered, one of an earlier attempt as soon as the job makes steps again.
    """
    now_s = judgement.now_s
    mine = [i for i in known if i.job == judgement.job]
    current = {i.family: i for i in mine if i.attempt == judgement.attempt and i.state in OPEN_STATES}
    changed: list[Incident] = []
    being_restarted = (judgement.job, judgement.attempt) in acting
    seen: set[str] = set()
    for family, finding in fuse(judgement.verdicts).items():
        verdict = finding.verdict
        old = current.get(family)
        if old is None and (being_restarted or _dismissed(verdict, judgement, mine)):
            continue
        shared = current.get(SHARED_SLOWNESS)
        if shared is not None and family == f"slow:{verdict.node}" and _of_the_rack(verdict, shared):
            seen.add(SHARED_SLOWNESS)  # the last of a rack to recover is no slow node of its own
            continue
        seen.add(family)
        new = _opened(finding, judgement, family, new_id()) if old is None else _updated(old, finding, now_s)
        if new != old:
            changed.append(new)
    for incident in mine:
        if incident.state in OPEN_STATES and incident.family not in seen:
            ended = _ended(incident, judgement, gone_s, being_restarted)
            if ended is not None:
                changed.append(ended)
    return changed


def _of_the_rack(verdict: Verdict, shared: Incident) -> bool:
    """Whether a node's slowness is what it shares with others, and not far more than that cost the job."""
    most = OWN_FACTOR * max(shared.slowdown_ratio, SHARED_SLOWDOWN_MIN)
    return verdict.node in shared.nodes and verdict.slowdown_ratio <= most


def _dismissed(verdict: Verdict, judgement: Judgement, incidents: Iterable[Incident]) -> bool:
    """Whether a person called this very claim a false alarm."""
    return any(
        incident.state == "false"
        and incident.attempt == judgement.attempt
        and (incident.fault, incident.nodes) == (verdict.fault, list(verdict.nodes))
        for incident in incidents
    )


def _opened(finding: Finding, judgement: Judgement, family: str, incident_id: str) -> Incident:
    verdict = finding.verdict
    return Incident(
        id=incident_id,
        job=judgement.job,
        attempt=judgement.attempt,
        fault=verdict.fault,
        nodes=list(verdict.nodes),
        node=verdict.node,
        device=verdict.device,
        confidence=verdict.confidence,
        state="open",
        onset_s=verdict.onset_s,
        detected_s=judgement.now_s,
        updated_s=judgement.now_s,
        ended_s=None,
        detectors=sorted(finding.detectors),
        summary=verdict.summary,
        evidence=[evidence_item(e) for e in verdict.evidence],
        action="none",
        family=family,
        kinds=sorted(verdict.kinds),
        fact=verdict.fact,
        slowdown_ratio=verdict.slowdown_ratio,
        asks=verdict.asks or "",
        application=verdict.application,
        seen_s=judgement.now_s,
    )


def _updated(old: Incident, finding: Finding, now_s: float) -> Incident:
    """Return the incident as the verdict has it. Its story changes only while nothing is being done about it."""
    if old.state == "acting":
        return msgspec.structs.replace(old, seen_s=now_s)
    verdict = finding.verdict
    told = (old.fault, tuple(old.nodes), tuple(old.kinds), old.asks)
    if told == (verdict.fault, verdict.nodes, tuple(sorted(verdict.kinds)), verdict.asks or ""):
        # The same claim again: keep the wording, so that subscribers are not told of every tick, until it is surer.
        costs = old.slowdown_ratio <= 0 < verdict.slowdown_ratio  # what it costs is part of the story
        surer = verdict.confidence > old.confidence or costs
        return msgspec.structs.replace(
            old,
            summary=verdict.summary if surer else old.summary,
            evidence=[evidence_item(e) for e in verdict.evidence] if surer else old.evidence,
            seen_s=now_s,
            confidence=max(old.confidence, verdict.confidence),
            slowdown_ratio=_cost(old, verdict),
        )
    if old.family == SHARED_SLOWNESS and set(verdict.nodes) <= set(old.nodes):
        return msgspec.structs.replace(old, seen_s=now_s)  # which of them show it changes from row to row
    if verdict.fault == UNKNOWN_CAUSE != old.fault and tuple(old.nodes) == verdict.nodes:
        # A cause once known is not forgotten: counters are quiet at the ends of long steps.
        return msgspec.structs.replace(
            old,
            seen_s=now_s,
            confidence=max(old.confidence, verdict.confidence),
            slowdown_ratio=_cost(old, verdict),
        )
    if old.node is not None and verdict.node is None:
        return msgspec.structs.replace(old, seen_s=now_s)  # a culprit once known is not forgotten
    return msgspec.structs.replace(
        old,
        fault=verdict.fault,
        nodes=list(verdict.nodes),
        node=verdict.node,
        device=verdict.device,
        confidence=verdict.confidence,
        onset_s=min(old.onset_s, verdict.onset_s),
        updated_s=now_s,
        seen_s=now_s,
        detectors=sorted({*old.detectors, *finding.detectors}),
        summary=verdict.summary,
        evidence=[evidence_item(e) for e in verdict.evidence],
        kinds=sorted(verdict.kinds),
        fact=verdict.fact,
        slowdown_ratio=verdict.slowdown_ratio,
        asks=verdict.asks or "",
        application=verdict.application,
    )


def _cost(old: Incident, verdict: Verdict) -> float:
    """Return what the trouble costs by now.

    What was seen to cost nothing goes on costing nothing when the time before it began has passed out of view.
    """
    unseen = verdict.fault == "straggler" and "step_time" not in verdict.kinds
    return 0.0 if unseen and old.slowdown_ratio == 0 else verdict.slowdown_ratio


def _ended(incident: Incident, judgement: Judgement, gone_s: float, being_restarted: bool) -> Incident | None:
    """Return the incident as recovered, or None while it lasts."""
    if incident.attempt < judgement.attempt:
        over = judgement.stepping
    elif judgement.state != "running":
        over = True
    else:
        blind = any(detector in judgement.blind for detector in incident.detectors)
        # A time in which nobody watched says nothing about whether the fault was still there.
        seen_s = max(incident.seen_s, judgement.watching_since_s)
        over = judgement.now_s - seen_s > gone_s and not being_restarted and not blind
        if incident.family == "stop" and judgement.stepping:
            over = over and judgement.advanced_s > incident.detected_s  # a job that stopped goes on by making a step
    if not over:
        return None
    return msgspec.structs.replace(incident, state="recovered", updated_s=judgement.now_s, ended_s=judgement.now_s)


def evidence_item(evidence: Evidence) -> EvidenceItem:
    """Return a piece of evidence in its public form: numbers that JSON can carry."""
    return EvidenceItem(
        metric=evidence.metric,
        node=evidence.node,
        device=evidence.device,
        value=_plain(evidence.value),
        peers_median=_number(evidence.peers_median),
        threshold=_number(evidence.threshold),
        unit=evidence.unit,
    )


def _plain(value: float | str | None) -> float | str | None:
    return _number(value) if isinstance(value, int | float) else value


def _number(value: float | None) -> float | None:
    if value is None or value != value or abs(value) == float("inf"):
        return None
    return round(float(value), 6)
