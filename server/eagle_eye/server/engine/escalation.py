"""When people have to look: an action that failed for good, or was begun and not spoken of any more. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from eagle_eye.server.engine.situation import Situation, own_actions
from eagle_eye.server.model.records import Action, Incident

FAILED_STATES = frozenset({"failed", "refused", "expired"})  # without anybody having decided so


def exhausted(incident: Incident, situation: Situation) -> str:
    """Return that the last try that policy allows came to nothing, "" while it did not."""
    tried = [action for action in own_actions(incident, situation) if action.state in FAILED_STATES]
    last = tried[-1] if tried else None
    if last is None or len(tried) < situation.settings.tries_max or own_actions(incident, situation)[-1] != last:
        return ""
    return f"action {last.id} ended as {last.state}, try {len(tried)} of {situation.settings.tries_max}"


def unspoken(own: Action, situation: Situation) -> str:
    """Return that an action was begun and not reported on in time, "" while it was not."""
    report_s = situation.settings.report_s
    if own.state not in ("accepted", "running") or situation.now_s - own.updated_s <= report_s:
        return ""
    return (
        f"action {own.id} is {own.state} and nobody reported on it for {report_s:.0f} s (policy.report_s):"
        " look at the subscriber, and report on the action by hand"
    )


def escalated(incident: Incident, why: str, now_s: float) -> Incident:
    """Return the incident as one that people have to look at; the same object where they have been told so."""
    if not why or incident.escalation:
        return incident
    return replace(incident, escalation=why, escalated_s=now_s, updated_s=now_s)


def taken_up(incident: Incident) -> Incident:
    """Return the incident as one that is being dealt with again."""
    return replace(incident, escalation="", escalated_s=None) if incident.escalation else incident
