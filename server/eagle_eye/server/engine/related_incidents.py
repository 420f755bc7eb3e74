"""Merges incidents of one trouble: signs and victims into the incident that names their cause. Pure.

After a merge, an uncertain claim of the same family belongs to that incident while it is open. A certain claim that
nothing explains any more is a separate trouble: it is split off, and these two are never merged again.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from eagle_eye.detectors.types import Verdict
from eagle_eye.server.engine.fusion import SHARED_SLOWNESS, Fused, is_sure
from eagle_eye.server.model.records import Incident, is_of_a_stop

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
