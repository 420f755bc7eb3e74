"""An incident's story so far, and the commands that an operator may type next. Pure.

Node names come from other machines: they are quoted for the shell, and names that cannot be typed get no command.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from eagle_eye.server.model.records import Action, AuditEntry, Delivery, EvidenceRequest, Incident, Job, Node

# From detection to resolution, oldest first.

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


# An operator's next commands, with how to undo them.

NODES_MAX = 8
LIVE = ("requested", "accepted", "running")
FRUITLESS = ("failed", "refused", "expired", "withdrawn", "rejected")


class OperatorCommand(NamedTuple):
    """A command to type: ``why`` gives the reason, ``undo`` the reverse command ("": none exists or none is needed)."""

    why: str
    command: str
    undo: str = ""


def commands(
    incident: Incident, actions: Sequence[Action], nodes: Mapping[str, Node], job: Job | None, mode: str = "approve"
) -> list[OperatorCommand]:
    """Return the commands that suit the incident's state, the most urgent first; ``mode`` is policy's for it."""
    last = next((action for action in reversed(actions) if not action.preliminary), None)
    found: list[OperatorCommand] = []
    open_ = incident.state in ("suspected", "confirmed", "acting")
    if last is not None:
        found += _of_action(last, mode if open_ else "observe")
    blamed = [incident.node] if incident.node is not None else incident.nodes
    blamed = list(dict.fromkeys([*blamed, *(last.exclude if last is not None else [])]))[:NODES_MAX]
    untouched = last is None or last.state in ("would_act", *FRUITLESS)
    reason = f"{incident.fault} {incident.id}"
    for name in blamed:
        node = nodes.get(name)
        state = "in_service" if node is None else node.state
        if state == "in_service" and open_ and untouched and incident.action in ("exclude_node", "drain_node"):
            found += _take_out(name, reason, job)
        elif state != "in_service":
            found += _bring_back(name, job)
    if not incident.acknowledged_by and open_:
        found.append(OperatorCommand("say that you are looking at it", typed("incidents", "acknowledge", incident.id)))
    if incident.state not in ("false", "closed"):
        found.append(OperatorCommand("it was a false alarm", typed("incidents", "false", incident.id)))
    return [one for one in found if one.command]


def _of_action(action: Action, mode: str) -> Iterable[OperatorCommand]:
    what = action.kind.replace("_", " ")
    if action.state == "awaiting":
        back = " && ".join(filter(None, (typed("nodes", "readmit", name) for name in action.exclude[:NODES_MAX])))
        yield OperatorCommand(f"have it carried out: {what}", typed("actions", "approve", action.id), back)
        yield OperatorCommand("or do not", typed("actions", "reject", action.id))
    elif action.state in LIVE:
        yield OperatorCommand(f"follow what was asked for: {what}", typed("actions", "show", action.id))
        if action.state == "requested" and mode != "act":
            yield OperatorCommand("take the approval back", typed("actions", "withdraw", action.id))
    elif action.state == "expired" and mode != "observe":
        yield OperatorCommand(f"ask for it again: {what}", typed("actions", "renew", action.id))


def _take_out(name: str, reason: str, job: Job | None) -> Iterable[OperatorCommand]:
    yield OperatorCommand(
        f"count {name} as out of service; it asks nobody to stop the job",
        typed("nodes", "exclude", name, "--reason", reason),
        typed("nodes", "readmit", name),
    )
    scheduler = "" if job is None else job.scheduled_as.partition(":")[0]
    if scheduler == "slurm" and _plain(name):
        yield OperatorCommand(
            f"have Slurm give {name} no new work",
            shlex.join(["scontrol", "update", f"NodeName={name}", "State=DRAIN", f"Reason=eagle-eye {reason}"]),
            shlex.join(["scontrol", "update", f"NodeName={name}", "State=RESUME"]),
        )
    elif scheduler == "kubernetes" and _plain(name):
        yield OperatorCommand(
            f"have Kubernetes give {name} no new pods",
            shlex.join(["kubectl", "cordon", name]),
            shlex.join(["kubectl", "uncordon", name]),
        )


def _bring_back(name: str, job: Job | None) -> Iterable[OperatorCommand]:
    yield OperatorCommand(f"see whether {name} is well", typed("nodes", "check", name))
    yield OperatorCommand(
        f"return {name} to service",
        typed("nodes", "readmit", name),
        typed("nodes", "exclude", name),
    )
    scheduler = "" if job is None else job.scheduled_as.partition(":")[0]
    if scheduler == "slurm" and _plain(name):
        yield OperatorCommand(f"what Slurm says of {name}", shlex.join(["scontrol", "show", "node", name]))


def typed(noun: str, verb: str, name: str, *more: str) -> str:
    """Return the command line, "" for a name that cannot be typed."""
    if not name or not name.isprintable():
        return ""
    # A name that begins with a hyphen must not be taken as a flag.
    last = ["--", name] if name.startswith("-") else [name]
    return shlex.join(["eagle-eye", noun, verb, *more, *last])


def _plain(name: str) -> bool:
    """Return whether a scheduler's tool takes the name literally."""
    return bool(name) and name.isascii() and name[0].isalnum() and all(c.isalnum() or c in "._-" for c in name)
