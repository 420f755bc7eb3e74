"""Suggests an operator's next commands for an incident, with how to undo them. Pure.

Node names come from other machines: they are quoted for the shell, and names that cannot be typed get no command.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from eagle_eye.server.model.records import Action, Incident, Job, Node

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
