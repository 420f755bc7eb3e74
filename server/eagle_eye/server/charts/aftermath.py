"""Was it right? What is on record since a node was taken out, for and against, in sentences. Pure.

Nobody sees what would have happened without the action, so nothing here is a verdict; a node check comes closest.
"""

from __future__ import annotations

from collections.abc import Sequence

from eagle_eye.server.accounts.hindsight import would_stop
from eagle_eye.server.engine.incidents import OPEN_STATES
from eagle_eye.server.model.account_records import Ticket
from eagle_eye.server.model.records import Action, Incident, NodeCheck

CHECKED = {"healthy": "found it healthy", "sick": "found it sick", "cannot_tell": "could not tell"}


def aftermath(
    incident: Incident, actions: Sequence[Action], checks: Sequence[NodeCheck], tickets: Sequence[Ticket]
) -> list[str]:
    """Return the sentences, the weightiest first; [] while no action on the incident has been carried out.

    ``checks`` and ``tickets`` are those of the nodes that the last such action took out.
    """
    action = next((one for one in reversed(actions) if one.state == "done" and would_stop(one)), None)
    if action is None:
        return []
    said = ["A person called it a false alarm."] if incident.state == "false" else []
    said += [_checked(node, checks, action) for node in action.exclude]
    said += [f"A ticket was opened for {one.node}: {one.text}" for one in tickets if one.opened_s >= incident.onset_s]
    if incident.ended_s is not None and incident.state != "false":
        said.append(f"The trouble was over {max(0.0, incident.ended_s - action.updated_s):.0f} s after the action.")
    elif incident.state in OPEN_STATES:
        said.append("The trouble goes on although it was done: if that lasts, its cause is elsewhere.")
    kinds = [kind.replace("_", " ") for kind in incident.kinds]
    if kinds:
        agreed = f"{len(kinds)} kinds of evidence agreed" if len(kinds) > 1 else "It rests on one kind of evidence"
        said.append(f"{agreed}: {', '.join(kinds)}.")
    return said


def _checked(node: str, checks: Sequence[NodeCheck], action: Action) -> str:
    since = [one for one in checks if one.node == node and one.created_s >= action.created_s and one.state in CHECKED]
    if not since:
        return f"Not known yet: whether {node} itself is sick. It has not been checked since."
    last = max(since, key=lambda one: one.updated_s)
    detail = f": {last.detail}" if last.detail else "."
    return f"A check of {node} {CHECKED[last.state]}{detail}"
