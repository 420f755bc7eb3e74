"""Trouble that comes and goes: one incident that is reopened, and that stays open once it does so too often. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import Incident


def returned(
    known: Iterable[Incident], family: str, node: str | None, attempt: int, policy: PolicySettings, now_s: float
) -> Incident | None:
    """Return the incident that has come back: recovered not long ago, of the same family, node and attempt; or None.

    A culprit that is not known yet, or was not known then, is nobody else; nor is one that it named before another.
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
    """Return the incident with one more return counted."""
    times = [*incident.flap_times, now_s][-policy.reopens_max :]
    return settle(replace(incident, flaps=incident.flaps + 1, flap_times=times), policy, now_s)


def settle(incident: Incident, policy: PolicySettings, now_s: float) -> Incident:
    """Return the incident with ``flapping`` as its returns of late have it; the same object where nothing changes."""
    lately = sum(0 <= now_s - time_s <= policy.reopens_window_s for time_s in incident.flap_times)
    flapping = lately >= policy.reopens_max
    return incident if flapping == incident.flapping else replace(incident, flapping=flapping)


def noticed(incident: Incident, policy: PolicySettings, now_s: float) -> Incident:
    """Return an open incident as it is when its verdict is there: after a lull it has come back once more."""
    if is_lull(incident, policy, now_s):
        return come_back(incident, policy, now_s)
    return settle(incident, policy, now_s)


def patience_s(incident: Incident, policy: PolicySettings) -> float:
    """Return how long its verdict must be gone before the incident counts as recovered."""
    return max(policy.reopen_s, policy.verdict_gone_s) if incident.flapping else policy.verdict_gone_s


def is_lull(incident: Incident, policy: PolicySettings, now_s: float) -> bool:
    """Return whether a flapping incident is not seen at the moment, and open only because it may come back."""
    return incident.flapping and now_s - incident.seen_s > policy.verdict_gone_s
