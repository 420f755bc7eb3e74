"""Fuses detectors' verdicts into one finding per trouble: the cause named, its symptoms as evidence. Pure.

Verdicts of one family (what stops a job; what corrupts its numbers; slowness of one node; pace of the whole job; early
signs of one node) are about one trouble. GPUs that fail on two nodes are two: one of them is what stops the job, each
other is a family of its own, ``stop:`` and its node. The verdict nearest to the cause names the trouble
(``faults.FAULTS`` is in causal order), the others that agree with it on the node add their kinds of evidence.
Independent kinds raise the probability that the claim is true: 1 - (1 - p)(1 - q), never beyond ``CONFIDENCE_MAX``;
verdicts that share a kind have seen the same thing and raise nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from eagle_eye.detectors.faults import BY_NAME, CAUSE_ORDER
from eagle_eye.detectors.signs.slow_share import without_cost
from eagle_eye.detectors.types import Verdict
from eagle_eye.server.model.records import Incident, is_of_a_stop

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
