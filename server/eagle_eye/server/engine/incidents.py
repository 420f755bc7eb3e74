"""Folds findings into incidents: one incident per cause, from the first verdict to the recovery. Pure.

A finding is matched to its incident by (job, attempt, family). Everything that stops a job is one family, since a job
stops for one reason (GPUs that fail on two nodes are two); what corrupts its numbers is another; slowness and silence
are one family per node. An incident that another finding explains is merged into that one's incident; one that recurs
is reopened, and stays open once it recurs too often.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from eagle_eye.detectors.faults import BY_NAME, CAUSE_ORDER
from eagle_eye.detectors.signs.slow_share import without_cost
from eagle_eye.detectors.types import Evidence, Verdict
from eagle_eye.schema.action import EvidenceItem
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.engine.rules import floors_for, is_supported
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import Incident, OpenedIncident, is_of_a_stop

# Fuses detectors' verdicts into one finding per trouble: the cause named, its symptoms as evidence.
#
# Verdicts of one family (what stops a job; what corrupts its numbers; slowness of one node; pace of the whole job;
# early signs of one node) are about one trouble. GPUs that fail on two nodes are two: one of them is what stops the
# job, each other is a family of its own, ``stop:`` and its node. The verdict nearest to the cause names the trouble
# (``faults.FAULTS`` is in causal order), the others that agree with it on the node add their kinds of evidence.
# Independent kinds raise the probability that the claim is true: 1 - (1 - p)(1 - q), never beyond ``CONFIDENCE_MAX``;
# verdicts that share a kind have seen the same thing and raise nothing.

CONFIDENCE_MAX = 0.99  # the maximum for inferences; only a fact is more certain
EVIDENCE_MAX = 12
SHARED_SLOWNESS = "slow:*"  # the family of slowness shared by several nodes, whichever they are at the moment
SURE = 0.9  # the default threshold of policy
WAITING_KINDS = frozenset({"data_wait", "collective_arrival"})  # shown by nodes that wait for storage
EXPLAINED_RATIO = 0.5  # of a drop in the job's pace, that one slow node must account for to explain it
NO_STOPS: Mapping[str, str] = MappingProxyType({})
QUORUM_KIND = "quorum"  # of evidence: all others of the node's quorum of replica groups wait for it
OF_ONE_GPU = frozenset({"gpu_lost", "gpu_memory_error"})  # as a fact, never an echo of another node's fault


@dataclass(frozen=True, slots=True)
class Finding:
    """One trouble: the verdict that names its cause, enriched with agreeing ones, and all verdicts of the family."""

    verdict: Verdict
    detectors: tuple[str, ...]


class Fused(NamedTuple):
    """One finding per family of trouble; ``explained`` maps a dropped family to what explains it."""

    findings: dict[str, Finding]
    explained: dict[str, str]


def family_of(verdict: Verdict) -> str:
    """Return the family of trouble that a verdict belongs to."""
    trouble = BY_NAME[verdict.fault].trouble
    if trouble == "stop" and is_of_a_replica(verdict.kinds) and verdict.node is not None:
        return f"stop:{verdict.node}"
    if verdict.fault == "host_errors" and verdict.asks == "notify":
        return f"told:{_who(verdict)}"  # a kernel message without effect: it neither stops nor predicts anything
    if verdict.asks in ("drain_node", "checkpoint_now") or trouble == "early":
        return f"early:{_who(verdict)}"
    if verdict.fault == "node_unreachable" and "standstill" not in verdict.kinds:
        return f"silence:{verdict.node}"
    if trouble == "slow":
        return SHARED_SLOWNESS if len(verdict.nodes) > 1 else f"slow:{_who(verdict)}"
    return trouble


def is_of_a_replica(kinds: Collection[str]) -> bool:
    """Return whether the claim is about one replica group: they stop, leave and return one by one in one attempt."""
    return QUORUM_KIND in kinds


def is_own_cause(claim: Verdict | Incident) -> bool:
    """Return whether a node's driver reports that its GPU has failed: it must go, whatever else stops the job."""
    return claim.fact and claim.fault in OF_ONE_GPU and claim.node is not None and not claim.asks


def fuse(verdicts: Iterable[Verdict], stops: Mapping[str, str] = NO_STOPS) -> Fused:
    """Return one finding for each family of trouble, except those that another one explains.

    ``stops`` holds the families of nodes known to stop the job: which of several came first does not change.
    """
    nearest_first = sorted(verdicts, key=_nearness)
    known, rest = _stops(nearest_first, stops)
    families: dict[str, list[Verdict]] = {}
    for verdict in nearest_first:
        family = family_of(verdict)
        if family == "stop":
            family = known[verdict.node] if verdict.node is not None and is_own_cause(verdict) else rest
        families.setdefault(family, []).append(verdict)
    fused = Fused({family: _united(members) for family, members in families.items()}, {})
    _explain(fused)
    return fused


def _stops(nearest_first: Iterable[Verdict], stops: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return the families of the nodes that each stop the job by themselves, and the family of all other stops."""
    causes = list(dict.fromkeys(v.node for v in nearest_first if v.node and is_own_cause(v)))
    known = dict(stops)
    for node in causes:
        known.setdefault(node, f"stop:{node}" if "stop" in known.values() else "stop")
    # Once the first is over, a later one is why the job still stands.
    return known, "stop" if "stop" in known.values() or not causes else known[causes[0]]


def _who(verdict: Verdict) -> str:
    return verdict.node if verdict.node is not None else ",".join(sorted(verdict.nodes))


def _nearness(verdict: Verdict) -> tuple[bool, int, bool, float, str]:
    """Return the key that sorts causes before symptoms; an unknown culprit explains nothing."""
    nobody = verdict.node is None and not verdict.nodes and BY_NAME[verdict.fault].trouble == "stop"
    return nobody, CAUSE_ORDER[verdict.fault], verdict.node is None, -verdict.confidence, verdict.node or ""


def _united(members: list[Verdict]) -> Finding:
    """Return the finding whose cause is the first of a family's verdicts, which are sorted by nearness."""
    cause = members[0]
    kinds, confidence, slowdown = set(cause.kinds), cause.confidence, cause.slowdown_ratio
    evidence, reported, onset_s = list(cause.evidence), [cause], cause.onset_s
    detectors = [cause.detector]
    for other in members[1:]:
        if other.nodes and cause.nodes and not set(other.nodes) & set(cause.nodes):
            continue  # about another node: a symptom without evidence in common with this cause
        if other.detector not in detectors:
            detectors.append(other.detector)
        if other.node is None or other.node != cause.node:
            continue
        if not kinds & other.kinds and not cause.fact:
            confidence = 1 - (1 - confidence) * (1 - other.confidence)
        kinds |= other.kinds
        # Measured slowness takes precedence over slowness estimated from counters.
        slowdown = other.slowdown_ratio if "compute_time" in other.kinds else max(slowdown, other.slowdown_ratio)
        evidence += [item for item in other.evidence if item not in evidence]
        onset_s = min(onset_s, other.onset_s)
        if other.fault != cause.fault and other.summary not in [known.summary for known in reported]:
            reported.append(other)
    return Finding(
        verdict=dataclasses.replace(
            cause,
            confidence=cause.confidence if cause.fact else max(cause.confidence, min(confidence, CONFIDENCE_MAX)),
            kinds=frozenset(kinds),
            slowdown_ratio=slowdown,
            evidence=tuple(evidence[:EVIDENCE_MAX]),
            onset_s=onset_s,
            summary=_sentence(reported[:2], slowdown),
        ),
        detectors=tuple(detectors),
    )


def _sentence(reported: Sequence[Verdict], slowdown_ratio: float) -> str:
    """Return the verdicts' summaries, with the cost stated once, in the words of the verdict that knows it."""
    knows = next((verdict for verdict in reported if verdict.slowdown_ratio == slowdown_ratio), reported[0])
    if without_cost(knows.summary) == knows.summary:
        return "; ".join(verdict.summary for verdict in reported)
    return "; ".join(v.summary if v is knows else without_cost(v.summary) for v in reported)


def _explain(fused: Fused) -> None:
    """Drop the findings that another one explains, and let a learned score support a rule's finding."""
    _explained_by_the_stop(fused)
    _explained_by_the_room(fused)
    _supported_by_the_model(fused)
    _explained_by_the_storage(fused)
    _explained_by_a_surer_node(fused)
    _explained_by_one_node(fused)


def _drop(fused: Fused, family: str, cause: str) -> None:
    if fused.findings.pop(family, None) is not None:
        fused.explained[family] = cause


def _explained_by_the_stop(fused: Fused) -> None:
    stops = {family: finding for family, finding in fused.findings.items() if is_of_a_stop(family)}
    for stop, finding in stops.items():
        for node in finding.verdict.nodes:
            for family in (f"silence:{node}", f"slow:{node}", f"early:{node}", f"told:{node}"):
                _drop(fused, family, stop)
    pace = fused.findings.get("pace")
    if pace is None or not stops:
        return
    stalled = pace.verdict.fault == "storage_stall" and "standstill" in pace.verdict.kinds
    if stalled and not any(finding.verdict.nodes for finding in stops.values()):
        _drop(fused, "stop", "pace")  # no hang: all ranks wait for the storage
    else:
        _drop(fused, "pace", next(iter(stops)))  # a job that stands still is also slow


def _explained_by_the_room(fused: Fused) -> None:
    """Drop findings about single nodes that a rack's or a room's trouble has hit together."""
    shared = fused.findings.get(SHARED_SLOWNESS)
    for node in shared.verdict.nodes if shared is not None else ():
        _drop(fused, f"slow:{node}", SHARED_SLOWNESS)
        _drop(fused, f"early:{node}", SHARED_SLOWNESS)


def _supported_by_the_model(fused: Fused) -> None:
    findings = fused.findings
    for family, finding in list(findings.items()):
        learned = findings.get(f"early:{finding.verdict.node}")
        if family.startswith("slow:") and learned is not None and learned.verdict.fault == "node_anomaly":
            _drop(fused, f"early:{finding.verdict.node}", family)
            seen = {item.metric for item in finding.verdict.evidence}
            if any(item.metric not in seen for item in learned.verdict.evidence):  # otherwise the same counter again
                united = _united([finding.verdict, learned.verdict])
                findings[family] = Finding(united.verdict, tuple(sorted({*finding.detectors, *learned.detectors})))


def _explained_by_the_storage(fused: Fused) -> None:
    """Drop nodes that only wait for their data while the storage stalls for many."""
    pace = fused.findings.get("pace")
    if pace is None or pace.verdict.fault != "storage_stall" or pace.verdict.node is not None:
        return
    for family, finding in list(fused.findings.items()):
        if family.startswith("slow:") and finding.verdict.kinds <= WAITING_KINDS:
            _drop(fused, family, "pace")


def is_sure(verdict: Verdict) -> bool:
    """Return whether the claim stands by itself, regardless of other claims."""
    return verdict.fact or verdict.confidence >= SURE


def _explained_by_a_surer_node(fused: Fused) -> None:
    """Drop uncertain slowness of others while one node is certainly slow: its victims look odd in many ways."""
    slow = {name: f.verdict for name, f in fused.findings.items() if name.startswith("slow:")}
    sure = [name for name, verdict in slow.items() if is_sure(verdict)]
    if sure:
        surest = max(sure, key=lambda name: (slow[name].fact, slow[name].confidence, name))
        for family in slow.keys() - set(sure):
            _drop(fused, family, surest)


def _explained_by_one_node(fused: Fused) -> None:
    findings = fused.findings
    pace = findings.get("pace")
    slow = {name: f.verdict.slowdown_ratio for name, f in findings.items() if name.startswith("slow:")}
    if pace is None or not slow:
        return
    # A rack's trouble slows the same nodes in each step, uneven work different ones.
    uneven = pace.verdict.fault == "workload_imbalance" and slow.keys() != {SHARED_SLOWNESS}
    slowest = max(slow, key=lambda name: (slow[name], name))
    most = slow[slowest]
    drop = pace.verdict.fault == "throughput_drop" and most > 0
    if uneven or (drop and most >= EXPLAINED_RATIO * pace.verdict.slowdown_ratio):
        _drop(fused, "pace", slowest)


# Merges incidents of one trouble: signs and victims into the incident that names their cause.
#
# After a merge, an uncertain claim of the same family belongs to that incident while it is open. A certain claim that
# nothing explains any more is a separate trouble: it is split off, and these two are never merged again.

OWN_FACTOR, SHARED_SLOWDOWN_MIN = 2.0, 0.02  # times a rack's cost, above which a node has its own trouble
MERGED_MAX = 100  # ids and families that an incident remembers of those merged into it
SORTS = ("slow", "early", "silence", "told")  # families about a single node, which a stop that it causes explains
NOT_OF_THE_RACK = ((SHARED_SLOWNESS, "silence"), (SHARED_SLOWNESS, "told"))
MERGEABLE_STATES = ("suspected", "confirmed")  # an incident being acted on keeps its identity until it is over


def cause_of(incident: Incident, fused: Fused) -> str:
    """Return the family of the finding that explains an open incident, "" if none does."""
    if incident.state not in MERGEABLE_STATES or incident.family in fused.findings:
        return ""
    cause = incident.family
    while cause in fused.explained:  # the explanation may itself be explained
        cause = fused.explained[cause]
    if cause == incident.family:
        cause = _by_its_node(incident, fused)
    shared = fused.findings.get(SHARED_SLOWNESS) if cause == SHARED_SLOWNESS else None
    if shared is not None and not costs_as_much(incident.slowdown_ratio, shared.verdict.slowdown_ratio):
        return ""
    return cause if cause in fused.findings else ""


def _by_its_node(incident: Incident, fused: Fused) -> str:
    """Return the finding that accuses the node of a sign that is currently not seen."""
    sort, _, node = incident.family.partition(":")
    for family in (*filter(is_of_a_stop, fused.findings), SHARED_SLOWNESS):
        found = fused.findings.get(family)
        named = found.verdict.nodes if found is not None else ()
        if node in named and sort in SORTS and (family, sort) not in NOT_OF_THE_RACK:
            return family
    return ""


def costs_as_much(slowdown_ratio: float, shared_ratio: float) -> bool:
    """Return whether a node's slowness is part of that shared with others, and not far above its cost to the job."""
    return slowdown_ratio <= OWN_FACTOR * max(shared_ratio, SHARED_SLOWDOWN_MIN)


def is_of_the_rack(verdict: Verdict, shared: Incident) -> bool:
    """Return whether a node's slowness belongs to an open incident of several nodes."""
    return verdict.node in shared.nodes and costs_as_much(verdict.slowdown_ratio, shared.slowdown_ratio)


def rack_of(verdict: Verdict, family: str, shared: Incident | None) -> Incident | None:
    """Return the open incident of several nodes from which a node's own slowness is split off, or None."""
    named = shared is not None and family.startswith("slow:") and verdict.node in shared.nodes
    return shared if named else None


def took_over(family: str, opened: Iterable[Incident]) -> Incident | None:
    """Return the open incident into which one of this family was merged, or None."""
    return next((incident for incident in opened if family in incident.families), None)


def belongs(verdict: Verdict, family: str) -> bool:
    """Return whether a claim stays with the incident that took its family over, rather than being split off."""
    return not is_of_a_stop(family) and not is_sure(verdict)


def merge(incident: Incident, cause: Incident, now_s: float) -> tuple[Incident, Incident]:
    """Return the incident, closed, and the cause's incident, which records the merge."""
    gone = replace(
        incident, state="closed", merged_into=cause.id, updated_s=now_s, ended_s=now_s, hold="", hold_rule=""
    )
    kept = replace(
        cause,
        merged=[*cause.merged, incident.id][-MERGED_MAX:],
        families=list(dict.fromkeys((*cause.families, incident.family)))[-MERGED_MAX:],
        acknowledged_by=cause.acknowledged_by or incident.acknowledged_by,
    )
    return gone, kept


def may_merge(incident: Incident, cause: Incident) -> bool:
    """Return whether the two may be merged: they were not split before."""
    return incident.id != cause.id and cause.id != incident.split_from and incident.id != cause.split_from


def returned(
    known: Iterable[Incident], family: str, node: str | None, attempt: int, policy: PolicySettings, now_s: float
) -> Incident | None:
    """Return the incident that has recurred: recently recovered, of the same family, node and attempt; or None.

    An unknown culprit, now or then, matches any node, as does one that the incident named before another.
    """
    found = [
        incident
        for incident in known
        if (incident.state, incident.family, incident.attempt) == ("recovered", family, attempt)
        and (incident.node is None or node is None or node in (incident.node, *incident.accused))
        and incident.ended_s is not None
        and now_s - incident.ended_s <= policy.reopen_s
    ]
    return max(found, key=lambda one: (one.node == node, one.ended_s or 0.0, one.id), default=None)


def come_back(incident: Incident, policy: PolicySettings, now_s: float) -> Incident:
    """Return the incident with one more recurrence counted."""
    times = [*incident.flap_times, now_s][-policy.reopens_max :]
    return settle(replace(incident, flaps=incident.flaps + 1, flap_times=times), policy, now_s)


def settle(incident: Incident, policy: PolicySettings, now_s: float) -> Incident:
    """Return the incident with ``flapping`` updated from its recent recurrences; the same object if nothing changes."""
    lately = sum(0 <= now_s - time_s <= policy.reopens_window_s for time_s in incident.flap_times)
    flapping = lately >= policy.reopens_max
    return incident if flapping == incident.flapping else replace(incident, flapping=flapping)


def noticed(incident: Incident, policy: PolicySettings, now_s: float) -> Incident:
    """Return an open incident after its verdict was seen: after a lull it has recurred once more."""
    if is_lull(incident, policy, now_s):
        return come_back(incident, policy, now_s)
    return settle(incident, policy, now_s)


def patience_s(incident: Incident, policy: PolicySettings) -> float:
    """Return how long its verdict must be gone before the incident counts as recovered."""
    return max(policy.reopen_s, policy.verdict_gone_s) if incident.flapping else policy.verdict_gone_s


def is_lull(incident: Incident, policy: PolicySettings, now_s: float) -> bool:
    """Return whether a flapping incident is currently not seen, and open only because it may recur."""
    return incident.flapping and now_s - incident.seen_s > policy.verdict_gone_s


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
    fused = fuse(judgement.verdicts, _known_stops(mine.values(), judgement.attempt))
    seen: set[str] = set()
    for family, finding in fused.findings.items():
        verdict = finding.verdict
        opened = {i.family: i for i in book.values() if i.attempt == judgement.attempt and i.state in OPEN_STATES}
        old = opened.get(family)
        ours = verdict.onset_s <= ours_until_s and not is_of_a_replica(verdict.kinds)
        if old is None and (ours or _dismissed(verdict, judgement, mine.values())):
            continue
        shared = opened.get(SHARED_SLOWNESS)
        if shared is not None and family == f"slow:{verdict.node}" and is_of_the_rack(verdict, shared):
            seen.add(SHARED_SLOWNESS)  # the last node of a rack to recover is not separately slow
            continue
        origin = took_over(family, opened.values())
        if old is None and origin is not None and belongs(verdict, family):
            continue
        seen.add(family)
        if old is not None:
            new = _updated(noticed(old, policy, now_s), finding, now_s)
        elif back := returned(book.values(), family, verdict.node, judgement.attempt, policy, now_s):
            new = _reopened(back, finding, judgement, policy)
        else:
            origin = origin or rack_of(verdict, family, shared)
            name = new_id(OpenedIncident(judgement.job, judgement.attempt, family))
            new = _opened(finding, judgement, family, name, origin.id if origin is not None else "")
        book[new.id] = _staged(new, judgement, policy)
    if not being_restarted:
        _merge(book, fused, judgement)
    unseen = [i for i in book.values() if i.state in OPEN_STATES and i.family not in seen]
    book |= {i.id: _ended(i, judgement, policy, being_restarted) or i for i in unseen}
    return [incident for incident in book.values() if incident != mine.get(incident.id)]


def _known_stops(incidents: Iterable[Incident], attempt: int) -> dict[str, str]:
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
        cause = book.get(by_family.get(cause_of(incident, fused), ""))
        if cause is not None and may_merge(incident, cause):
            book[incident.id], book[cause.id] = merge(incident, cause, judgement.now_s)


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
    return come_back(kept, policy, judgement.now_s)


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
        gone = judgement.now_s - seen_s > patience_s(incident, policy)
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
