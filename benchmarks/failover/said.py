"""What the subscriber wrote down, and what it shows: done twice, done for a former leader, done for nothing. Pure."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec


class Said(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line: a request to act that came, or what was carried out. Times are Unix seconds.

    ``attempt`` is the one to end; ``outcome`` what became of a delivery, ``highest`` the highest epoch before it.
    """

    what: Literal["delivery", "restart", "exclusion"]
    time_s: float
    action: str
    job: str
    attempt: int
    fault: str = ""
    epoch: int = 0
    highest: int = 0
    outcome: str = ""


class Term(NamedTuple):
    """A server was seen to lead with an epoch from this time on."""

    epoch: int
    since_s: float
    server: str


def restarts(said: Iterable[Said]) -> list[Said]:
    """Return the restarts that were carried out."""
    return [one for one in said if one.what == "restart"]


def twice(said: Iterable[Said]) -> int:
    """Return how many restarts were carried out for an attempt that had been restarted before."""
    attempts = collections.Counter((one.job, one.attempt) for one in restarts(said))
    return sum(times - 1 for times in attempts.values())


def for_nothing(said: Iterable[Said], faults: Collection[tuple[str, int]]) -> int:
    """Return how many restarts were of a job and attempt in which nothing was made to fail."""
    return sum((one.job, one.attempt) not in faults for one in restarts(said))


def refused(said: Iterable[Said]) -> int:
    """Return how many deliveries were refused for their epoch."""
    return sum(one.what == "delivery" and one.outcome == "lower epoch" for one in said)


def of_a_former_leader(said: Sequence[Said], terms: Sequence[Term]) -> int:
    """Return how many carried-out actions were taken with a lower epoch than had come, or than was led with by then."""
    carried_out = {one.action for one in said if one.what != "delivery"}
    return sum(
        one.what == "delivery"
        and one.outcome == "queued"
        and one.action in carried_out
        and one.epoch < max([one.highest, *(term.epoch for term in terms if term.since_s < one.time_s)])
        for one in said
    )
