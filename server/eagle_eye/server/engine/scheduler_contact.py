"""When schedulers were last heard, and which faults have to wait for them. Pure.

A scheduler that ends a job kills its ranks, and agents see them die before the scheduler has been asked for the reason.
So faults that a scheduler may have caused are not reported before it was asked again. Hardware's own reports do not
wait.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from eagle_eye.server.model.records import Job

MARGIN_S = 2.0  # possible offset between nodes' clocks and ours, and so of a fault's onset
CAUSED_BY_SCHEDULERS = frozenset({"process_crash"})  # facts that are no proof against hardware
FAILED_S = 60.0  # how long a job that ended by itself is still judged: its cause may only be reported now


class Claim(Protocol):
    """A verdict or an incident."""

    @property
    def fault(self) -> str:
        """The fault's name."""
        ...

    @property
    def fact(self) -> bool:
        """Whether its evidence alone is proof."""
        ...

    @property
    def onset_s(self) -> float:
        """When it began."""
        ...


@dataclass(frozen=True, slots=True)
class SchedulerReports:
    """What one scheduler reported. ``heard_s`` is when it last answered; None: never.

    ``jobs`` are those of our jobs that it covers. ``patience_s`` is how long a fault waits for it.
    """

    source: str
    heard_s: float | None
    jobs: frozenset[str] = field(default_factory=frozenset)
    patience_s: float = 30.0


@dataclass(frozen=True, slots=True)
class SchedulerContact:
    """When the scheduler of one job was last heard; ``source`` "": the job has none, and nothing waits."""

    source: str = ""
    heard_s: float | None = None
    patience_s: float = 0.0

    def covers(self, onset_s: float) -> bool:
        """Whether the scheduler has reported since ``onset_s``: what it did to the job is known."""
        return not self.source or (self.heard_s is not None and self.heard_s >= onset_s + MARGIN_S)

    def is_awaited(self, claim: Claim, now_s: float) -> bool:
        """Whether the claim must not be reported yet."""
        waits = not is_proof(claim) and not self.covers(claim.onset_s)
        return waits and now_s - claim.onset_s < self.patience_s

    def can_answer(self, claim: Claim, now_s: float) -> bool:
        """Whether an answer requested now would be late enough to cover the claim."""
        return bool(self.source) and now_s >= claim.onset_s + MARGIN_S


NO_SCHEDULER = SchedulerContact()


def is_proof(claim: Claim) -> bool:
    """Return whether hardware or a kernel reported it: no scheduler can have caused it."""
    return claim.fact and claim.fault not in CAUSED_BY_SCHEDULERS


def hearing(job: str, started_s: float, words: Collection[SchedulerReports]) -> SchedulerContact:
    """Return when the job's scheduler was heard.

    A job that began after the last report of a scheduler may be its: it counts as such until the next report.
    """
    for word in words:
        if job in word.jobs:
            return SchedulerContact(word.source, word.heard_s, word.patience_s)
    for word in words:
        if word.heard_s is None or word.heard_s < started_s + MARGIN_S:
            return SchedulerContact(word.source, word.heard_s, word.patience_s)
    return NO_SCHEDULER


def failed_by_itself(job: Job) -> bool:
    """Return whether the job's scheduler reports that it failed, and no launcher that it is over."""
    return job.scheduled_state == "failed" and job.declared_state in ("", "running")


def since_s(job: Job | None) -> float:
    """Return since when the job is in its state; -inf if not reported."""
    return -math.inf if job is None else job.since_s if job.since_s is not None else job.updated_s
