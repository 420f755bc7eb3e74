"""Converts one judgement into one change: records, events for subscribers, audit entries. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from typing import NamedTuple

from msgspec.structs import replace

from eagle_eye.server.delivery import events as outbound
from eagle_eye.server.engine.incident_changes import IncidentChange, is_due, news_of
from eagle_eye.server.engine.respond import Book, Response
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import Action, AuditEntry, EvidenceRequest, Incident, OutboundEvent
from eagle_eye.server.store.store import Change

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
