"""What a rule of policy is: a function from incident, situation and plan to a ruling. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from eagle_eye.schema.action import ActionKind
from eagle_eye.server.engine.situation import Situation
from eagle_eye.server.model.records import Incident, Outcome

Values = Mapping[str, float | str | None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be asked for, as the rules so far have left it.

    ``first`` is an action to ask for before it, None for none. ``notes`` are for whoever carries it out.
    """

    kind: ActionKind
    exclude: tuple[str, ...] = ()
    restart: bool = False
    first: ActionKind | None = None
    notes: tuple[str, ...] = ()

    @property
    def asks(self) -> bool:
        """Whether anything is to be asked of a subscriber."""
        return self.kind not in ("notify", "none")


@dataclass(frozen=True, slots=True)
class Ruling:
    """What a rule says: its outcome, why (a sentence with value, limit and remedy), and the plan if it changes it.

    A "hold" without a plan keeps the action back; one with a plan makes it less than it was.
    """

    outcome: Outcome
    reason: str = ""
    values: Values = field(default_factory=dict)
    plan: Plan | None = None


class Rule(NamedTuple):
    """A rule with its stable name: it is in records, in the API, in written cases and in docs/reference/policy.md."""

    name: str
    judge: Callable[[Incident, Situation, Plan], Ruling]


NOT_APPLICABLE = Ruling("not_applicable")


def passed(values: Values, reason: str = "") -> Ruling:
    """Return that the rule has nothing against the plan."""
    return Ruling("pass", reason, values)


def held(reason: str, values: Values) -> Ruling:
    """Return that the action is kept back."""
    return Ruling("hold", reason, values)


def lowered(plan: Plan, reason: str, values: Values) -> Ruling:
    """Return that less is asked for than planned."""
    return Ruling("hold", reason, values, plan)


def changed(plan: Plan, reason: str, values: Values) -> Ruling:
    """Return that something else is asked for than planned."""
    return Ruling("changes", reason, values, plan)
