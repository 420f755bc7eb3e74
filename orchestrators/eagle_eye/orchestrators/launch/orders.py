"""The outputs of the launcher's state machine, carried out by the coordinator in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eagle_eye.orchestrators.launch.checkpoints import Span


@dataclass(frozen=True)
class ChooseCheckpoint:
    """Find the newest complete checkpoint outside ``distrusted``.

    On storage, and in the memory of ``nodes``. One written at a time in ``suspected`` is taken only where there is no
    other.
    """

    attempt: int
    distrusted: tuple[Span, ...]
    suspected: tuple[float, ...] = ()
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StartRanks:
    """Start the attempt on the nodes, by node rank. ``resume_from``: a folder, ``memory:STEP``, or "".

    The ranks of ``kept`` nodes wait at their restart points, and continue from there.
    """

    attempt: int
    nodes: tuple[str, ...]
    resume_from: str
    step: int | None
    kept: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StopRanks:
    """Kill everything that runs on the nodes."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class LookAtRanks:
    """Ask the runners for the state of the attempt's ranks."""

    attempt: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class AskReach:
    """Ask the runners whether their nodes reach the launcher's store."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Abandon:
    """Give up the node's runner and kill its reachable processes. Another one is tried later."""

    node: str
    reason: str


@dataclass(frozen=True)
class CheckAgain:
    """Check the node again; its runner reports ready or unfit."""

    node: str


@dataclass(frozen=True)
class Revive:
    """Start a runner on the node again if it has none."""

    node: str


@dataclass(frozen=True)
class TellServer:
    """The job's state, and the membership of its attempt; ``held_up_by`` are the ranks that block its start."""

    state: str
    attempt: int
    nodes: tuple[str, ...]
    held_up_by: tuple[int, ...] = ()


@dataclass(frozen=True)
class TellUnfit:
    """Have the server count the node as out of service, for these reasons, until it is readmitted."""

    node: str
    reasons: str


@dataclass(frozen=True)
class Running:
    """Every rank was spawned: answer the requests with a description of the attempt."""

    attempt: int
    nodes: tuple[str, ...]
    requests: tuple[int, ...]
    unconfirmed: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """The outcome of a request."""

    request: int
    success: bool
    text: str


@dataclass(frozen=True)
class Say:
    """A message for people and programs that watch the launcher."""

    event: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Persist:
    """Save the changed state; it is on disk before the next order is carried out."""


@dataclass(frozen=True)
class End:
    """The job has ended; the launcher exits with this code."""

    phase: str
    reason: str
    exit_code: int


RunnerOrder = StartRanks | StopRanks | LookAtRanks | AskReach | Abandon | CheckAgain | Revive
Order = RunnerOrder | ChooseCheckpoint | TellServer | TellUnfit | Running | Answer | Say | Persist | End
