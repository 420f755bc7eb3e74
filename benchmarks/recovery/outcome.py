"""What became of one item, and what can be read from it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec

from benchmarks.recovery.harm import LASTING, Harm

Result = Literal[
    "recovered",  # an attempt without the harm makes steps
    "undisturbed",  # nothing was to follow, and nothing did
    "disturbed",  # nothing was to follow, and something did
    "stuck",  # nothing like it within the time; somebody had to come
    "job_ended",  # the launcher gave up
    "not_injected",  # the victim ran nothing that could be harmed
]
OPEN_STATES = ("requested", "accepted", "running", "awaiting")


class Asked(msgspec.Struct, frozen=True):
    """An action of the server's; ``node`` is whom its incident accuses."""

    id: str
    incident: str
    kind: str
    fault: str
    node: str | None
    exclude: list[str]
    attempt: int
    state: str
    restart: bool
    expired_when_done: bool


class Outcome(msgspec.Struct, kw_only=True):
    """One item of the plan and what followed.

    ``first_step_s``: from the first harm to the first step of the attempt that no harm troubles any more.

    ``steps_lost`` are those done again or thrown away. ``restarts`` are attempts begun because of it,
    ``restarts_explained`` how many of them something happened for.
    """

    number: int
    shape: str
    harms: list[Harm]
    result: Result
    took_s: float
    first_step_s: float | None = None
    restarts: int = 0
    restarts_explained: int = 0
    steps_lost: int = 0
    scopes: list[str] = []  # of the restarts: what the launcher renewed in the end
    asked: list[Asked] = []
    alarm: str = ""  # what the launcher made of an action by hand
    note: str = ""

    @property
    def since_last_harm_s(self) -> float | None:
        """Return the same time from the last harm."""
        if self.first_step_s is None or not self.harms:
            return self.first_step_s
        return self.first_step_s - (self.harms[-1].at_s - self.harms[0].at_s)

    @property
    def named(self) -> list[Harm]:
        """Return the harms whose node an action of the server's named, by excluding it or as the accused."""
        reported = {node for asked in self.asked for node in (*asked.exclude, *([asked.node] if asked.node else []))}
        return [one for one in self.harms if one.node in reported and one.kind != "flapping"]

    @property
    def overtaken(self) -> list[Harm]:
        """Return the harms that nobody named because the restart for another one ended them first."""
        others = self.named if self.result == "recovered" else []  # else it is what nobody saw
        return [one for one in self.harms if one not in others and others and one.kind not in LASTING]

    @property
    def missed(self) -> list[Harm]:
        """Return the harms that nobody named and no restart has ended."""
        found = (*self.named, *self.overtaken)
        return [one for one in self.harms if one not in found and one.kind != "flapping"]

    @property
    def wrong(self) -> list[str]:
        """Return the nodes that an action excluded though nothing was done to them."""
        harmed = {one.node for one in self.harms}
        return sorted({node for asked in self.asked for node in asked.exclude if node not in harmed})

    @property
    def restarts_double(self) -> int:
        """Return how many attempts were begun for nothing."""
        return max(0, self.restarts - self.restarts_explained)


def asked_of(action: dict[str, Any], incidents: dict[str, dict[str, Any]]) -> Asked:
    """Return what the server's API says of an action, with its incident's accused."""
    incident = incidents.get(action["incident_id"], {})
    late = any(report["state"] == "running" and report["time"] > action["expires"] for report in action["reports"])
    return Asked(
        id=action["id"], incident=action["incident_id"], kind=action["kind"], fault=action["fault"],
        node=incident.get("node"),
        exclude=action["exclude"], attempt=action["attempt"], state=action["state"], restart=action["restart"],
        expired_when_done=late,
    )  # fmt: skip


def steps_lost(steps: Sequence[dict[str, Any]], from_attempt: int, until_attempt: int) -> int:
    """Return the steps that attempts from the one on (but for the last) had made beyond where their next began."""
    last: dict[int, int] = {}
    resumed: dict[int, int] = {}
    for step in steps:
        last[step["attempt"]] = max(step["step"], last.get(step["attempt"], 0))
        resumed.setdefault(step["attempt"], step["resumed_from"])
    attempts = [attempt for attempt in sorted(last) if from_attempt <= attempt <= until_attempt]
    return sum(max(0, last[earlier] - resumed[later]) for earlier, later in pairwise(attempts))


def scopes_of(reported: Sequence[dict[str, Any]], from_attempt: int, until_attempt: int) -> list[str]:
    """Return with which scope each attempt after the first one was begun, by the launcher's words, widened or not."""
    scopes: dict[int, str] = {}
    for line in reported:
        if from_attempt < line["attempt"] <= until_attempt:
            if line["event"] == "stopping":
                scopes[line["attempt"]] = line["scope"]
            elif line["event"] == "widened" and line["attempt"] in scopes:
                scopes[line["attempt"]] = line["to"]
    return [scope for _, scope in sorted(scopes.items())]


def stale_done(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the actions carried out although they were void.

    Sent by hand, expired, or of an attempt that an action before had ended.
    """
    found = [f"by hand in item {one.number}" for one in outcomes if one.alarm == "carried_out"]
    seen: set[int] = set()
    for one in outcomes:
        for asked in one.asked:
            if asked.state != "done":
                continue
            if asked.expired_when_done or (asked.restart and asked.attempt in seen):
                found.append(asked.id)
            if asked.restart:
                seen.add(asked.attempt)
    return found
