"""Escalates to people when an action failed for good, or was begun and never reported on again. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from eagle_eye.server.engine.situation import Situation, outcome_words, own_actions
from eagle_eye.server.model.records import Action, Incident

FAILED_STATES = frozenset({"failed", "refused", "expired"})  # without a person having decided so


def exhausted(incident: Incident, situation: Situation) -> str:
    """Return a message if the last try allowed by policy failed, "" otherwise."""
    tried = [action for action in own_actions(incident, situation) if action.state in FAILED_STATES]
    last = tried[-1] if tried else None
    if last is None or len(tried) < situation.settings.tries_max or own_actions(incident, situation)[-1] != last:
        return ""
    return f"{outcome_words(last)} (attempt {len(tried)} of {situation.settings.tries_max})"


def unspoken(own: Action, situation: Situation) -> str:
    """Return a message if an action was begun and not reported on in time, "" otherwise."""
    report_s = situation.settings.report_s
    if own.state not in ("accepted", "running") or situation.now_s - own.updated_s <= report_s:
        return ""
    return (
        f"action {own.id} is {own.state} and nobody reported on it for {report_s:.0f} s (policy.report_s):"
        " look at the subscriber, and report on the action by hand"
    )


def escalated(incident: Incident, why: str, now_s: float) -> Incident:
    """Return the incident as escalated to people; the same object if it already is."""
    if not why or incident.escalation:
        return incident
    return replace(incident, escalation=why, escalated_s=now_s, updated_s=now_s)


def taken_up(incident: Incident) -> Incident:
    """Return the incident as being handled again."""
    return replace(incident, escalation="", escalated_s=None) if incident.escalation else incident
