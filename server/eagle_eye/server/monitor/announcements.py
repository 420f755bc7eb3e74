"""What a judgement changes on record: incidents, actions, audit entries, and the events that subscribers get. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from typing import Literal, NamedTuple

from msgspec.structs import replace

from eagle_eye.server.delivery import events as outbound
from eagle_eye.server.engine.incidents import OPEN_STATES
from eagle_eye.server.engine.respond import Book, Response
from eagle_eye.server.engine.routing import FORGET_JOB_S
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import Action, AuditEntry, EvidenceRequest, Incident, OutboundEvent
from eagle_eye.server.store.store import Change, Store

# Decides which changes of an incident are sent to subscribers, and which are written to the audit trail. Pure.
#
# Changes of state and escalations are always sent, unless the incident asks for nothing (a slow node that costs the job
# nothing): that is recorded, and sent as opened once it asks for something. If the description changes again and again
# (``UPDATES_MAX`` times within ``reopens_window_s``) it is sent once it has settled, with the delay doubling each time;
# suppressed changes are counted.

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
        acts = _actions_asked(new, actions) if new.state == "acting" else ()
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


def _actions_asked(new: Incident, actions: Sequence[Action]) -> Iterator[AuditNote]:
    yield AuditNote("act", ", ".join(f"{action.kind} as {action.id}" for action in actions) or new.action)


def _transition(old: Incident, new: Incident, actions: Sequence[Action]) -> Iterator[AuditNote]:
    if old.state == "suspected" and new.state in ("confirmed", "acting"):
        yield AuditNote("confirm", f"{_claim(new)}, {', '.join(new.kinds) or 'no kind of evidence'}")
    if new.state == "acting":
        yield from _actions_asked(new, actions)
    elif old.state == "acting" and new.state == "confirmed":
        yield AuditNote("wait", new.hold)
    elif new.state == "recovered":
        yield AuditNote("recover")
    elif new.state == "closed":
        yield AuditNote("close", f"it is incident {new.merged_into}" if new.merged_into else "it has not come back")


_PARTS = tuple(part.name for part in fields(Change))
WHO = "server"  # in the audit trail: acts of detection and policy themselves
SEEN_GRAIN_RATIO = 0.25  # of the time after which an incident is gone: how stale its seen_s on record may get
_VERBS = {"would_act": "would ask", "awaiting": "ask for approval", "requested": "request", "expired": "expire"}
# Fields that may differ from the record without being worth a write: the same verdict again, a little surer.
_FLEETING = ("seen_s", "confidence", "slowdown_ratio", "summary", "evidence", "updated_s")


class Announcement(NamedTuple):
    """The change, how many events it held back because of their rate, and how many escalations it contains."""

    change: Change
    kept_back: int = 0
    escalations: int = 0


def announcement(response: Response, book: Book, policy: PolicySettings, public_url: str, now_s: float) -> Announcement:
    """Return the change to write for a response to a judgement, with the events to send."""
    known = {incident.id: incident for incident in book.incidents}
    changed = {incident.id: incident for incident in response.incidents}
    changed |= {i.id: i for i in book.incidents if i.id not in changed and is_due(i, policy, now_s)}
    news = {}
    for incident in changed.values():
        asked = [action for action in response.actions if action.incident_id == incident.id]
        news[incident.id] = news_of(known.get(incident.id), incident, asked, policy, now_s)
    reported = [one for one in news.values() if _worth_writing(known.get(one.incident.id), one, policy)]
    before = {action.id: action for action in book.actions}
    events = [event for one in reported if (event := _incident_event(one, known, now_s)) is not None]
    events += [event for action in response.actions if (event := _action_event(action, before, public_url, now_s))]
    change = Change(
        incidents=tuple(one.incident for one in reported),
        actions=response.actions,
        events=tuple(events),
        evidence=response.evidence,
        audit=(*_entries(reported, now_s), *_acts(response.actions, now_s), *_asked(response.evidence, now_s)),
    )
    escalations = sum(note.verb == "escalate" for one in reported for note in one.notes)
    return Announcement(change, sum(one.kept_back for one in reported), escalations)


def together(changes: Sequence[Change]) -> Change:
    """Return several changes as one, in their order."""
    if len(changes) == 1:
        return changes[0]
    return Change(**{name: tuple(chain.from_iterable(getattr(c, name) for c in changes)) for name in _PARTS})


def _worth_writing(old: Incident | None, news: IncidentChange, policy: PolicySettings) -> bool:
    new = news.incident
    if old is None or news.event is not None or news.notes:
        return True
    if replace(new, **{name: getattr(old, name) for name in _FLEETING}) != old:
        return True
    return new.seen_s - old.seen_s > SEEN_GRAIN_RATIO * policy.verdict_gone_s


def _incident_event(news: IncidentChange, known: Mapping[str, Incident], now_s: float) -> OutboundEvent | None:
    incident = news.incident
    old = known.get(incident.id)
    if news.event == "opened" or (news.event and old is None):
        return outbound.incident_opened(incident, now_s)
    if news.event == "resolved":
        return outbound.incident_resolved(incident, now_s)
    return outbound.incident_updated(incident, old, now_s) if news.event and old is not None else None


def _action_event(action: Action, before: Mapping[str, Action], public_url: str, now_s: float) -> OutboundEvent | None:
    if action.state == "requested":
        return outbound.action_requested(action, public_url, now_s)
    old = before.get(action.id)
    if old is not None and old.state == "awaiting":
        return None  # what waited for approval was never announced
    if action.state == "expired":
        return outbound.action_expired(action, public_url, now_s)
    if action.state == "withdrawn":
        return outbound.action_withdrawn(action, public_url, now_s)
    return None


def _entries(reported: list[IncidentChange], now_s: float) -> Iterator[AuditEntry]:
    for news in reported:
        for note in news.notes:
            yield AuditEntry(time_s=now_s, who=WHO, verb=note.verb, subject=news.incident.id, detail=note.detail[:4096])


def _acts(actions: tuple[Action, ...], now_s: float) -> Iterator[AuditEntry]:
    for action in actions:
        whom = f" of {', '.join(action.exclude)}" if action.exclude else ""
        detail = f"{action.kind}{whom} for {action.incident_id}" + (f": {action.reason}" if action.reason else "")
        verb = _VERBS.get(action.state, "withdraw")
        yield AuditEntry(time_s=now_s, who=WHO, verb=verb, subject=action.id, detail=detail[:4096])


def _asked(evidence: tuple[EvidenceRequest, ...], now_s: float) -> Iterator[AuditEntry]:
    for one in evidence:
        yield AuditEntry(
            time_s=now_s, who=WHO, verb="evidence", subject=one.incident_id, detail=f"{one.kind} of {one.node}"
        )


BATCH = 500  # incidents closed in one transaction


def closed(
    store: Store,
    policy: PolicySettings,
    judged: Collection[str],
    now_s: float,
    concerns: Callable[[str], bool] = lambda _: True,
) -> Change:
    """Return the change that closes them, the oldest first, at most ``BATCH``; ``judged`` are the jobs still evaluated.

    Incidents of jobs that this server does not judge (``concerns``) are another's.

    An incident whose job has not been heard of for as long as the engine remembers jobs is not known to have recovered:
    it is closed anyway, and announced, since nothing else will ever end it.
    """
    mine = [one for one in store.open_incidents() if concerns(one.job)]
    found = list(_over(mine, policy, judged, now_s))[:BATCH]
    after = {incident.id: _ended(incident, now_s) for incident, _ in found}
    return Change(
        incidents=tuple(after.values()),
        events=tuple(outbound.incident_resolved(after[i.id], now_s) for i, _ in found if i.ended_s is None),
        audit=tuple(AuditEntry(time_s=now_s, who=WHO, verb="close", subject=i.id, detail=why) for i, why in found),
    )


def _over(
    incidents: list[Incident], policy: PolicySettings, judged: Collection[str], now_s: float
) -> Iterator[tuple[Incident, str]]:
    for incident in incidents:
        if incident.state == "recovered":
            if incident.ended_s is None or now_s - incident.ended_s > policy.reopen_s:
                yield incident, f"it did not come back within {policy.reopen_s:.0f} s (policy.reopen_s)"
        elif incident.job not in judged and now_s - max(incident.seen_s, incident.updated_s) > FORGET_JOB_S:
            yield incident, f"nothing was heard of job {incident.job} for {FORGET_JOB_S / 3600:.0f} hours"


def _ended(incident: Incident, now_s: float) -> Incident:
    ended_s = now_s if incident.ended_s is None else incident.ended_s
    return replace(incident, state="closed", updated_s=now_s, ended_s=ended_s, flapping=False)
