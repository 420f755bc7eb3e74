"""The job source protocol, and a scheduler's reports on its jobs and nodes. Pure, except for the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from eagle_eye.server.model.errors import ServerError
from eagle_eye.server.model.records import NodeState

KnownState = Literal[
    "pending",
    "running",
    "suspended",
    "completing",
    "cancelled",
    "preempted",
    "timeout",
    "failed",
    "finished",
]
# "" if a source cannot tell: then the earlier state stays.
ScheduledState = Literal["", KnownState]
HELD_STATES = frozenset({"running", "suspended", "completing"})  # in which a job has its nodes
OVER_STATES = frozenset({"cancelled", "preempted", "timeout", "failed", "finished"})

JOBS_MAX = 100_000  # per answer; a larger answer is refused
NODES_MAX = 100_000
TEXT_CHARS_MAX = 256  # of a reason, or a user's name


class SourceFailed(ServerError):
    """A scheduler could not be queried, or its answer is unusable; it never means that there are no jobs.

    ``reason`` is one stable word for counters: missing, timeout, refused, unauthorised, oversized, malformed, status.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ScheduledJob:
    """One job. ``id`` is the scheduler's, ``name`` the one agents would use, ``said`` the scheduler's word for it.

    ``attempt`` counts its restarts. ``nodes`` are the scheduler's names, () if it holds none. ``started_s`` and
    ``ends_s`` are when this run began and when its time limit ends it; None: not begun, no limit, or unknown. ``owner``
    is the user who owns the job, "" if unknown.
    """

    id: str
    name: str
    state: ScheduledState
    attempt: int = 0
    nodes: tuple[str, ...] = ()
    started_s: float | None = None
    ends_s: float | None = None
    said: str = ""
    owner: str = ""


@dataclass(frozen=True, slots=True)
class ScheduledNode:
    """One node: whether it is in service with the scheduler ("" if unknown), and why not.

    ``drained``: somebody drained it; it did not just fail. ``maintenance``: it is reserved for that.
    """

    name: str
    state: NodeState | Literal[""]
    reason: str = ""
    drained: bool = False
    maintenance: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All jobs that a scheduler knows, at ``asked_s`` (the server's clock) or later.

    A job that is missing is gone. ``nodes`` None: not queried this time. ``left_out`` counts unusable parts of the
    answer, by reason.
    """

    asked_s: float
    jobs: tuple[ScheduledJob, ...]
    nodes: tuple[ScheduledNode, ...] | None = None
    left_out: dict[str, int] = field(default_factory=dict)


class JobSource(Protocol):
    """A scheduler that can be queried."""

    @property
    def name(self) -> str:
        """The source's name in records, metrics and logs."""
        ...

    @property
    def patience_s(self) -> float:
        """How long it may be silent before the server counts as not knowing its state."""
        ...

    def snapshots(self, sooner: asyncio.Event) -> AsyncGenerator[Snapshot, None]:
        """Yield the scheduler's reports at the source's own interval, and at once when ``sooner`` is set.

        Raises SourceFailed; the caller then starts it again after a delay.
        """
        ...
