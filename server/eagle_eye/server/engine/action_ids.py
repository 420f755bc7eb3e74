"""The ids of actions: who asks for the same once more, because a commit was lost, asks under the same id. Pure."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from eagle_eye.schema.action import ActionKind

DIGITS = 16
AT_ONCE = 32  # ids that are looked up together


class WantedAction(NamedTuple):
    """What an action asks for: those of the same attempt, kind and nodes are told apart by their number alone."""

    job: str
    attempt: int
    kind: ActionKind
    nodes: Sequence[str]


def action_id(salt: str, request: WantedAction, number: int) -> str:
    """Return the id of the request that comes after so many of the same. ``salt`` is the records' own."""
    job, attempt, kind, nodes = request
    said = json.dumps([salt, job, attempt, kind, sorted(nodes), number])
    return f"act_{hashlib.sha256(said.encode()).hexdigest()[:DIGITS]}"


def new_action_id(salt: str, request: WantedAction, missing: Callable[[Sequence[str]], Sequence[str]]) -> str:
    """Return the id of a request that is to be made now; ``missing`` returns those of the ids that no record has.

    Each earlier one of the same, whatever became of it, has a number. A record that was lost had the same number.
    """
    for first in itertools.count(0, AT_ONCE):
        found = missing([action_id(salt, request, first + number) for number in range(AT_ONCE)])
        if found:
            return found[0]
    raise AssertionError  # numbers do not end
