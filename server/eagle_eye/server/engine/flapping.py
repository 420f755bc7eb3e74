"""Handles recurring trouble: one incident that is reopened, and stays open once it recurs too often. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import Incident


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
