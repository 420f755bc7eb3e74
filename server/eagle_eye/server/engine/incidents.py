"""Folds findings into incidents: one incident per cause, from the first verdict to the recovery. Pure.

A finding is matched to its incident by (job, attempt, family). Everything that stops a job is one family, since a job
stops for one reason (GPUs that fail on two nodes are two); what corrupts its numbers is another; slowness and silence
are one family per node (``fusion``). An incident that another finding explains is merged into that one's incident
(``related_incidents``); one that recurs is reopened (``flapping``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from eagle_eye.detectors.faults import BY_NAME, CAUSE_ORDER
from eagle_eye.detectors.signs.slow_share import without_cost
from eagle_eye.detectors.types import Evidence, Verdict
from eagle_eye.schema.action import EvidenceItem
from eagle_eye.server.engine import flapping, related_incidents
from eagle_eye.server.engine.choice_rules import floors_for, is_supported
from eagle_eye.server.engine.derived_ids import OpenedIncident
from eagle_eye.server.engine.fusion import SHARED_SLOWNESS, SURE, Finding, Fused, fuse, is_of_a_replica, is_own_cause
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import Incident, is_of_a_stop

OPEN_STATES = ("suspected", "confirmed", "acting")
ACCUSED_MAX = 8  # nodes that an incident remembers having named
UNKNOWN_CAUSE = "straggler"  # the fault of a slow node while no counter shows the reason
_SEEN_ANEW = (
    *("fault", "nodes", "node", "device", "confidence", "updated_s", "summary", "evidence"),
    *("kinds", "fact", "slowdown_ratio", "asks", "application", "seen_s", "since_s"),
)


def fold(
    known: Iterable[Incident],
    judgement: Judgement,
    acting: Mapping[tuple[str, int], float],
    policy: PolicySettings,
    new_id: Callable[[OpenedIncident], str],
) -> list[Incident]:
    """Return the incidents of the judgement's job that are new or have changed.

    ``known`` are the job's open incidents, recovered ones that may recur, and those that a person marked false: the
    same claim is not made again in their attempt. ``acting`` maps (job, attempt) to the time until which new trouble is
    caused by our own restart: infinity while a subscriber is restarting it. An incident without a verdict for
    ``verdict_gone_s`` has recovered (later if it flaps), one of an earlier attempt as soon as the job makes steps
    again.
    """
    now_s = judgement.now_s
    mine = {i.id: i for i in known if i.job == judgement.job}
    book = dict(mine)
    ours_until_s = acting.get((judgement.job, judgement.attempt), -math.inf)
    being_restarted = ours_until_s == math.inf
    fused = fuse(judgement.verdicts, _stops(mine.values(), judgement.attempt))
    seen: set[str] = set()
    for family, finding in fused.findings.items():
        verdict = finding.verdict
        opened = {i.family: i for i in book.values() if i.attempt == judgement.attempt and i.state in OPEN_STATES}
        old = opened.get(family)
        ours = verdict.onset_s <= ours_until_s and not is_of_a_replica(verdict.kinds)
        if old is None and (ours or _dismissed(verdict, judgement, mine.values())):
            continue
        shared = opened.get(SHARED_SLOWNESS)
        if (
            shared is not None
            and family == f"slow:{verdict.node}"
            and related_incidents.is_of_the_rack(verdict, shared)
        ):
            seen.add(SHARED_SLOWNESS)  # the last node of a rack to recover is not separately slow
            continue
        origin = related_incidents.took_over(family, opened.values())
        if old is None and origin is not None and related_incidents.belongs(verdict, family):
            continue
        seen.add(family)
        if old is not None:
            new = _updated(flapping.noticed(old, policy, now_s), finding, now_s)
        elif back := flapping.returned(book.values(), family, verdict.node, judgement.attempt, policy, now_s):
            new = _reopened(back, finding, judgement, policy)
        else:
            origin = origin or related_incidents.rack_of(verdict, family, shared)
            name = new_id(OpenedIncident(judgement.job, judgement.attempt, family))
            new = _opened(finding, judgement, family, name, origin.id if origin is not None else "")
        book[new.id] = _staged(new, judgement, policy)
    if not being_restarted:
        _merge(book, fused, judgement)
    unseen = [i for i in book.values() if i.state in OPEN_STATES and i.family not in seen]
    book |= {i.id: _ended(i, judgement, policy, being_restarted) or i for i in unseen}
    return [incident for incident in book.values() if incident != mine.get(incident.id)]


def _stops(incidents: Iterable[Incident], attempt: int) -> dict[str, str]:
    """Return the nodes known to stop the attempt, with their families.

    A guessed culprit gives way to the first GPU known to have failed, until it is acted on.
    """
    opened = [i for i in incidents if i.attempt == attempt and i.state in OPEN_STATES and is_of_a_stop(i.family)]
    return {i.node: i.family for i in opened if i.node is not None and (is_own_cause(i) or i.state == "acting")}


def _merge(book: dict[str, Incident], fused: Fused, judgement: Judgement) -> None:
    """Close open incidents that a finding explains, in favour of that finding's incident."""
    opened = [i for i in book.values() if i.attempt == judgement.attempt and i.state in OPEN_STATES]
    by_family = {incident.family: incident.id for incident in opened}
    for incident in opened:
        cause = book.get(by_family.get(related_incidents.cause_of(incident, fused), ""))
        if cause is not None and related_incidents.may_merge(incident, cause):
            book[incident.id], book[cause.id] = related_incidents.merge(incident, cause, judgement.now_s)


def _staged(incident: Incident, judgement: Judgement, policy: PolicySettings) -> Incident:
    """Return the incident as confirmed once the evidence suffices to act; this is never reverted."""
    floors = floors_for(incident, policy, judgement.gpu_models)
    if incident.state != "suspected" or not is_supported(incident, floors):
        return incident
    return msgspec.structs.replace(incident, state="confirmed", updated_s=judgement.now_s)


def _dismissed(verdict: Verdict, judgement: Judgement, incidents: Iterable[Incident]) -> bool:
    """Whether a person marked this same claim as a false alarm."""
    return any(
        incident.state == "false"
        and incident.attempt == judgement.attempt
        and (incident.fault, incident.nodes) == (verdict.fault, list(verdict.nodes))
        for incident in incidents
    )


def _opened(finding: Finding, judgement: Judgement, family: str, incident_id: str, split_from: str = "") -> Incident:
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
        state="suspected",
        onset_s=verdict.onset_s,
        detected_s=judgement.now_s,
        updated_s=judgement.now_s,
        since_s=judgement.now_s,
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
        split_from=split_from,
        accused=_accused((), verdict.node),
    )


def _reopened(old: Incident, finding: Finding, judgement: Judgement, policy: PolicySettings) -> Incident:
    """Return a recurred incident as it is seen now: earlier beliefs prove nothing."""
    now = _opened(finding, judgement, old.family, old.id)
    kept = msgspec.structs.replace(
        old,
        **{name: getattr(now, name) for name in _SEEN_ANEW},
        state="suspected",
        ended_s=None,
        onset_s=min(old.onset_s, now.onset_s),
        detectors=sorted({*old.detectors, *finding.detectors}),
        accused=_accused(old.accused, now.node),
    )
    return flapping.come_back(kept, policy, judgement.now_s)


def _updated(old: Incident, finding: Finding, now_s: float) -> Incident:
    """Return the incident updated by the verdict. Its description changes only while no action is under way."""
    if old.state == "acting":
        return msgspec.structs.replace(old, seen_s=now_s)
    verdict = finding.verdict
    reported = (old.fault, tuple(old.nodes), tuple(old.kinds), old.asks)
    if reported == (verdict.fault, verdict.nodes, tuple(sorted(verdict.kinds)), verdict.asks or ""):
        # The same claim again: keep the wording until it is more certain, so that subscribers do not hear of every
        # tick.
        costs = old.slowdown_ratio <= 0 < verdict.slowdown_ratio  # the cost is part of the description
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
    if tuple(old.nodes) == verdict.nodes and _knows_the_cause(old, verdict):
        priced = old.slowdown_ratio <= 0 < verdict.slowdown_ratio
        return msgspec.structs.replace(
            old,
            seen_s=now_s,
            summary=f"{without_cost(old.summary)}; {verdict.summary}" if priced else old.summary,
            confidence=max(old.confidence, verdict.confidence),
            slowdown_ratio=_cost(old, verdict),
        )
    if old.node is not None and verdict.node is None:
        return msgspec.structs.replace(old, seen_s=now_s)  # keep a known culprit
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
        accused=_accused(old.accused, verdict.node),
    )


def _knows_the_cause(old: Incident, verdict: Verdict) -> bool:
    """Whether the incident names the cause and the verdict a symptom: counters are quiet in parts of long steps."""
    if verdict.fault == UNKNOWN_CAUSE != old.fault:
        return True
    slow = BY_NAME[verdict.fault].trouble == BY_NAME[old.fault].trouble == "slow"
    return slow and CAUSE_ORDER[old.fault] < CAUSE_ORDER[verdict.fault] and old.confidence >= SURE


def _accused(before: Sequence[str], node: str | None) -> list[str]:
    return list(before) if node is None else [*(one for one in before if one != node), node][-ACCUSED_MAX:]


def _cost(old: Incident, verdict: Verdict) -> float:
    """Return the current cost of the trouble.

    A measured cost of zero stays zero after the time before the onset has left the window.
    """
    unseen = verdict.fault == "straggler" and "step_time" not in verdict.kinds
    return 0.0 if unseen and old.slowdown_ratio == 0 else verdict.slowdown_ratio


def _ended(incident: Incident, judgement: Judgement, policy: PolicySettings, being_restarted: bool) -> Incident | None:
    """Return the incident as recovered, or None while it lasts."""
    if incident.attempt < judgement.attempt:
        over = judgement.stepping
    elif judgement.state == "completing":
        over = False  # it is not yet known how the job ends
    elif judgement.state != "running" and not judgement.crashed:
        over = True
    else:
        blind = any(detector in judgement.blind for detector in incident.detectors)
        # A time without observation does not show whether the fault was still there.
        seen_s = max(incident.seen_s, judgement.watching_since_s)
        gone = judgement.now_s - seen_s > flapping.patience_s(incident, policy)
        over = gone and not being_restarted and not blind
        if is_of_a_stop(incident.family) and judgement.stepping:
            over = over and judgement.advanced_s > incident.detected_s  # a stopped job recovers by making a step
    if not over:
        return None
    now_s = judgement.now_s
    return msgspec.structs.replace(incident, state="recovered", updated_s=now_s, ended_s=now_s, flapping=False)


def evidence_item(evidence: Evidence) -> EvidenceItem:
    """Return a piece of evidence in its public form, with numbers that JSON can represent."""
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
