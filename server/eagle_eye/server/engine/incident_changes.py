"""Decides which changes of an incident are sent to subscribers, and which are written to the audit trail. Pure.

Changes of state and escalations are always sent, unless the incident asks for nothing (a slow node that costs the job
nothing): that is recorded, and sent as opened once it asks for something. If the description changes again and again
(``UPDATES_MAX`` times within ``reopens_window_s``) it is sent once it has settled, with the delay doubling each time;
suppressed changes are counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace

from eagle_eye.server.engine.incidents import OPEN_STATES
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import Action, Incident

UPDATES_MAX = 10  # changes of one incident's description that are sent within the window
SETTLED_S = 60.0  # without a change, before suppressed changes are sent; doubles each time

Event = Literal["opened", "updated", "resolved"]


class AuditNote(NamedTuple):
    """One line of the audit trail."""

    verb: str
    detail: str = ""


class IncidentChange(NamedTuple):
    """The incident with its notification state, the event to send (None: none), suppressed changes, audit notes."""

    incident: Incident
    event: Event | None = None
    kept_back: int = 0
    notes: tuple[AuditNote, ...] = ()


def news_of(
    old: Incident | None, new: Incident, actions: Sequence[Action], policy: PolicySettings, now_s: float
) -> IncidentChange:
    """Return what to send about a change; ``old`` is the record before it, None for a new incident.

    ``actions`` are those requested in this change.
    """
    if old is None:
        detail = f"{new.state}, {_claim(new)}: {new.summary}"
        split = (AuditNote("split", f"from {new.split_from}"),) if new.split_from else ()
        acts = _acts(new, actions) if new.state == "acting" else ()
        event: Event | None = None if _is_silent(new) else "opened"
        return IncidentChange(_held(new, ()), event, 0, (AuditNote("open", detail), *split, *acts, *_holds(None, new)))
    notes = tuple(_notes(old, new, actions))
    written = _held(new, old.held_by)
    if _is_silent(old):
        return IncidentChange(written, None if _is_silent(new) else "opened", 0, notes)
    if new.state != old.state:
        return IncidentChange(replace(written, untold=False), _event(old, new), 0, notes)
    if new.escalation and not old.escalation:
        return IncidentChange(replace(written, untold=False), "updated", 0, notes)
    if new.state not in OPEN_STATES:
        return IncidentChange(written, None, 0, notes)
    lulls = 2 if new.flaps > old.flaps else 0  # one for its absence, one for its return
    if _story(old) == _story(new):
        if not is_due(new, policy, now_s):
            return IncidentChange(written, None, lulls, notes)
        reported = replace(written, told_times=[*_lately(new, policy, now_s), now_s], untold=False)
        return IncidentChange(reported, "updated", lulls, notes)
    written = replace(written, updated_s=now_s)
    lately = _lately(old, policy, now_s)
    if len(lately) >= UPDATES_MAX:
        untold = tuple(note for note in notes if note.verb != "change")
        return IncidentChange(replace(written, untold=True), None, 1 + lulls, untold)
    reported = replace(written, told_times=[*lately, now_s], untold=False)
    return IncidentChange(reported, "updated", lulls, notes)


def _is_silent(incident: Incident) -> bool:
    """Whether the incident asks for nothing and has not been sent to anyone."""
    return incident.asks == "none" and not incident.told_times


def is_due(incident: Incident, policy: PolicySettings, now_s: float) -> bool:
    """Return whether a suppressed change is due to be sent."""
    if not incident.untold or incident.state not in OPEN_STATES:
        return False
    more = max(len(_lately(incident, policy, now_s)) - UPDATES_MAX, 0)
    return now_s - incident.updated_s >= math.ldexp(SETTLED_S, more)


def _lately(incident: Incident, policy: PolicySettings, now_s: float) -> list[float]:
    return [time_s for time_s in incident.told_times if 0 <= now_s - time_s <= policy.reopens_window_s]


def _event(old: Incident, new: Incident) -> Event | None:
    if new.state in OPEN_STATES:
        return "updated" if old.state in OPEN_STATES else "opened"
    return "resolved" if old.state in OPEN_STATES else None  # a recovered one that is closed was already sent


def _story(incident: Incident) -> tuple[object, ...]:
    """Return the fields whose change is sent to subscribers."""
    return incident.fault, incident.nodes, incident.kinds, incident.action


def _claim(incident: Incident) -> str:
    whom = incident.node or ", ".join(incident.nodes) or "nobody"
    return f"{incident.fault} of {whom}, confidence {incident.confidence:.2f}"


def _held(incident: Incident, before: Iterable[str]) -> Incident:
    rules = list(dict.fromkeys((*before, *((incident.hold_rule,) if incident.hold_rule else ()))))
    return incident if rules == incident.held_by else replace(incident, held_by=rules)


def _holds(old: Incident | None, new: Incident) -> Iterator[AuditNote]:
    """Yield a note the first time that a rule holds the incident: holds come and go, and each is explained once."""
    if new.hold_rule and (old is None or new.hold_rule not in old.held_by):
        yield AuditNote("hold", f"{new.hold_rule}: {new.hold}")


def _notes(old: Incident, new: Incident, actions: Sequence[Action]) -> Iterator[AuditNote]:
    if old.state == "recovered" and new.state in OPEN_STATES:
        yield AuditNote("reopen", f"{new.state}, {_claim(new)}, return {new.flaps}: {new.summary}")
    elif new.state != old.state:
        yield from _transition(old, new, actions)
    if (old.fault, old.nodes) != (new.fault, new.nodes) and old.state in OPEN_STATES:
        yield AuditNote("change", f"{old.fault} of {', '.join(old.nodes) or 'nobody'} -> {_claim(new)}")
    for gone in new.merged:
        if gone not in old.merged:
            yield AuditNote("merge", f"{gone} is this incident")
    if new.flapping and not old.flapping:
        yield AuditNote("flapping", f"came back {new.flaps} times: further openings and closings are not reported")
    yield from _holds(old, new)
    if new.escalation and new.escalation != old.escalation:
        yield AuditNote("escalate", new.escalation)


def _acts(new: Incident, actions: Sequence[Action]) -> Iterator[AuditNote]:
    yield AuditNote("act", ", ".join(f"{action.kind} as {action.id}" for action in actions) or new.action)


def _transition(old: Incident, new: Incident, actions: Sequence[Action]) -> Iterator[AuditNote]:
    if old.state == "suspected" and new.state in ("confirmed", "acting"):
        yield AuditNote("confirm", f"{_claim(new)}, {', '.join(new.kinds) or 'no kind of evidence'}")
    if new.state == "acting":
        yield from _acts(new, actions)
    elif old.state == "acting" and new.state == "confirmed":
        yield AuditNote("wait", new.hold)
    elif new.state == "recovered":
        yield AuditNote("recover")
    elif new.state == "closed":
        yield AuditNote("close", f"it is incident {new.merged_into}" if new.merged_into else "it has not come back")
