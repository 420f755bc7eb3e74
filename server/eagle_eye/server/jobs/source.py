"""What a scheduler says of its jobs and nodes, and what a source of such words is. Pure, but for the protocol."""

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
# "" where it can't be told from what a source says: then what was known before stands.
ScheduledState = Literal["", KnownState]
HELD_STATES = frozenset({"running", "suspended", "completing"})  # in which a job has its nodes
OVER_STATES = frozenset({"cancelled", "preempted", "timeout", "failed", "finished"})

JOBS_MAX = 100_000  # of one answer; more is no answer
NODES_MAX = 100_000
TEXT_CHARS_MAX = 256  # of a reason, or a user's name


class SourceFailed(ServerError):
    """A scheduler could not be asked, or its answer is of no use; never that it has no jobs.

    ``reason`` is one stable word for counters: missing, timeout, refused, unauthorised, oversized, malformed, status.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ScheduledJob:
    """One job. ``id`` is the scheduler's, ``name`` how agents would call it, ``said`` the scheduler's own word for it.

    ``attempt`` counts its restarts. ``nodes`` are by the scheduler's names, () where it holds none. ``started_s`` and
    ``ends_s`` are when this run began and when its time limit ends it; None: not begun, no limit, or not known.
    ``owner`` is the user whose job it is, "" where the scheduler does not say.
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
    """One node: whether the scheduler has it in service, "" where it cannot tell, and why not.

    ``drained``: somebody took it out, it did not just fail. ``maintenance``: it is reserved for that.
    """

    name: str
    state: NodeState | Literal[""]
    reason: str = ""
    drained: bool = False
    maintenance: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All jobs that a scheduler knows, as they were at ``asked_s`` (the server's clock) or later.

    A job that is missing is gone. ``nodes`` None: they were not asked for this time. ``left_out`` counts what of the
    answer could not be used, by reason.
    """

    asked_s: float
    jobs: tuple[ScheduledJob, ...]
    nodes: tuple[ScheduledNode, ...] | None = None
    left_out: dict[str, int] = field(default_factory=dict)


class JobSource(Protocol):
    """A scheduler that can be asked."""

    @property
    def name(self) -> str:
        """The source's name in records, metrics and logs."""
        ...

    @property
    def patience_s(self) -> float:
        """How long it may not be heard before the server counts as not knowing what it does."""
        ...

    def snapshots(self, sooner: asyncio.Event) -> AsyncGenerator[Snapshot, None]:
        """Yield what the scheduler says, at the source's own pace, at once when ``sooner`` is set.

        Raises SourceFailed; then it is begun anew after a while.
        """
        ...
