"""Policy rules: functions from incident, situation and plan to a ruling. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from eagle_eye.schema.action import ActionKind
from eagle_eye.server.engine.situation import Situation
from eagle_eye.server.model.records import Incident, Outcome

Values = Mapping[str, float | str | None]


@dataclass(frozen=True, slots=True)
class PlannedAction:
    """The planned action, as left by the rules so far.

    ``first`` is an action to request before it, None for none. ``notes`` are for whoever carries it out.
    """

    kind: ActionKind
    exclude: tuple[str, ...] = ()
    restart: bool = False
    first: ActionKind | None = None
    notes: tuple[str, ...] = ()

    @property
    def asks(self) -> bool:
        """Whether a subscriber is to be asked for anything."""
        return self.kind not in ("notify", "none")


@dataclass(frozen=True, slots=True)
class Ruling:
    """A rule's result: its outcome, the reason (a sentence with value, limit and remedy), and the plan if changed.

    A "hold" without a plan holds the action back; one with a plan reduces it.
    """

    outcome: Outcome
    reason: str = ""
    values: Values = field(default_factory=dict)
    plan: PlannedAction | None = None


class PolicyRule(NamedTuple):
    """A rule with its stable name, used in records, in the API, in policy cases and in docs/reference/policy.md."""

    name: str
    judge: Callable[[Incident, Situation, PlannedAction], Ruling]


NOT_APPLICABLE = Ruling("not_applicable")


def passed(values: Values, reason: str = "") -> Ruling:
    """Return that the rule does not object to the plan."""
    return Ruling("pass", reason, values)


def held(reason: str, values: Values) -> Ruling:
    """Return that the action is held back."""
    return Ruling("hold", reason, values)


def lowered(plan: PlannedAction, reason: str, values: Values) -> Ruling:
    """Return that the plan is reduced."""
    return Ruling("hold", reason, values, plan)


def changed(plan: PlannedAction, reason: str, values: Values) -> Ruling:
    """Return that the plan is changed."""
    return Ruling("changes", reason, values, plan)
