"""Timeline of an incident: detection, decisions, requests, deliveries, reports and resolution, oldest first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from eagle_eye.server.model.records import Action, AuditEntry, Delivery, EvidenceRequest, Incident

Kind = Literal["fault", "incident", "action", "report", "delivery", "evidence", "person"]
ENTRIES_MAX = 500
TEXT_CHARS_MAX = 1_000
SERVER = "server"
# What the server noted about an incident, as people say it.
_NOTED = MappingProxyType(
    {
        "open": "opened",
        "confirm": "confirmed",
        "hold": "held back by",
        "evidence": "gathers",
        "act": "asks for",
        "wait": "waits",
        "recover": "recovered: the trouble is gone",
        "reopen": "reopened",
        "change": "changed",
        "merge": "merged",
        "escalate": "escalated",
        "close": "closed",
    }
)


class StoryEntry(NamedTuple):
    """One event; ``id`` is that of the record it concerns, ``who`` is a token, a subscription or ""."""

    time_s: float
    kind: Kind
    text: str
    id: str
    who: str = ""


class IncidentStory(NamedTuple):
    """Oldest first; ``left_out`` counts the oldest entries that did not fit."""

    entries: list[StoryEntry]
    left_out: int


def story(
    incident: Incident,
    actions: Sequence[Action],
    deliveries: Iterable[Delivery],
    evidence: Iterable[EvidenceRequest],
    audit: Iterable[AuditEntry],
) -> IncidentStory:
    """Return all events on record, oldest first, limited to the newest ENTRIES_MAX."""
    where = incident.node or ", ".join(incident.nodes[:4]) or "the job"
    found = [StoryEntry(incident.onset_s, "fault", f"{incident.fault.replace('_', ' ')} began on {where}", incident.id)]
    kinds = {action.id: action.kind.replace("_", " ") for action in actions}
    found += [_audited(entry, incident.id, kinds) for entry in audit if not entry.verb.startswith("report ")]
    for action in actions:
        for report in action.reports:
            detail = f": {report['detail']}" if report.get("detail") else ""
            said = f"{kinds[action.id]}: {report.get('state', '')}{detail}"
            who = str(report.get("who", ""))
            found.append(StoryEntry(float(report.get("time_s", action.updated_s)), "report", said, action.id, who))
    found += [_delivered(delivery) for delivery in deliveries]
    for one in evidence:
        if one.state != "asked":
            detail = f": {one.detail}" if one.detail else ""
            size = f", {one.bytes:,} bytes" if one.bytes else ""
            said = f"{one.kind.replace('_', ' ')} of {one.node}: {one.state}{size}{detail}"
            found.append(StoryEntry(one.updated_s, "evidence", said, one.id))
    if incident.ended_s is not None and not any(e.kind == "incident" and "recover" in e.text for e in found):
        found.append(StoryEntry(incident.ended_s, "incident", f"it is {incident.state}", incident.id))
    found.sort(key=lambda e: e.time_s)
    kept = [e._replace(text=e.text[:TEXT_CHARS_MAX]) for e in found[-ENTRIES_MAX:]]
    return IncidentStory(kept, len(found) - len(kept))


def _audited(entry: AuditEntry, incident_id: str, kinds: dict[str, str]) -> StoryEntry:
    of_incident = entry.subject == incident_id
    detail = f": {entry.detail}" if entry.detail else ""
    if entry.verb == "claim":
        said = f"{kinds.get(entry.subject, 'the action')}: claimed by {entry.detail or entry.who}"
        return StoryEntry(entry.time_s, "report", said, entry.subject, entry.who)
    if entry.who != SERVER:
        what = "it" if of_incident else kinds.get(entry.subject, "the action")
        return StoryEntry(entry.time_s, "person", f"{entry.verb} {what}{detail}", entry.subject, entry.who)
    if of_incident:
        return StoryEntry(
            entry.time_s, "incident", f"{_NOTED.get(entry.verb, entry.verb)}{detail}", entry.subject, SERVER
        )
    said = f"{entry.verb} {kinds.get(entry.subject, '')}".strip()
    return StoryEntry(entry.time_s, "action", f"{said}{detail}", entry.subject, SERVER)


def _delivered(delivery: Delivery) -> StoryEntry:
    what = delivery.type.removeprefix("eagle_eye.")
    tries = f" after {delivery.attempts} tries" if delivery.attempts > 1 else ""
    why = f": {delivery.last_error}" if delivery.last_error and delivery.state != "delivered" else ""
    said = f"{what} to {delivery.subscription_id}: {delivery.state}{tries}{why}"
    return StoryEntry(delivery.updated_s or delivery.created_s, "delivery", said, delivery.id, delivery.subscription_id)
