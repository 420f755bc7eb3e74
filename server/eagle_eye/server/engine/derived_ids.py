"""The ids of incidents and actions: who decides the same anew, because a commit was lost, uses the same ids. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from eagle_eye.schema.action import ActionKind

DIGITS = 16
AT_ONCE = 32  # ids that are looked up together at most


class WantedAction(NamedTuple):
    """What an action asks for: those of the same attempt, kind and nodes are told apart by their number alone."""

    job: str
    attempt: int
    kind: ActionKind
    nodes: Sequence[str]


class OpenedIncident(NamedTuple):
    """What an incident is about: those of the same attempt and family are told apart by their number alone."""

    job: str
    attempt: int
    family: str


Derived = WantedAction | OpenedIncident


def derived_id(salt: str, what: Derived, number: int) -> str:
    """Return the id of what comes after so many of the same. ``salt`` is the records' own."""
    if isinstance(what, WantedAction):
        prefix, said = "act", [what.job, what.attempt, what.kind, sorted(what.nodes)]
    else:
        prefix, said = "inc", [what.job, what.attempt, what.family]
    digest = hashlib.sha256(json.dumps([salt, *said, number]).encode()).hexdigest()
    return f"{prefix}_{digest[:DIGITS]}"


def new_id(salt: str, what: Derived, missing: Callable[[Sequence[str]], Sequence[str]]) -> str:
    """Return the id of what is to be made now; ``missing`` returns those of the ids that no record has.

    Each earlier one of the same, whatever became of it, has a number. A record that was lost had the same number.
    """
    first, together = 0, 1  # nearly always there was none before
    while True:
        found = missing([derived_id(salt, what, first + number) for number in range(together)])
        if found:
            return found[0]
        first, together = first + together, min(2 * together, AT_ONCE)
