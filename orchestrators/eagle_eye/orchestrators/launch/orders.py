"""What the launcher's state machine wants done: its outputs, carried out by the coordinator in their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eagle_eye.orchestrators.launch.checkpoints import Span


@dataclass(frozen=True)
class ChooseCheckpoint:
    """Look for the newest complete checkpoint outside ``distrusted``, and say which it is.

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

    The ranks of nodes that are ``kept`` wait at their restart points, and go on from there.
    """

    attempt: int
    nodes: tuple[str, ...]
    resume_from: str
    step: int | None
    kept: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StopRanks:
    """Kill what runs on the nodes."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class LookAtRanks:
    """Have the runners say where the attempt's ranks are."""

    attempt: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Abandon:
    """Give the node's runner up; whatever of it can be reached from here is killed. Another one is tried later."""

    node: str
    reason: str


@dataclass(frozen=True)
class Check:
    """Have the node checked again; its runner says that it is ready, or that the node is unfit."""

    node: str


@dataclass(frozen=True)
class Revive:
    """Start a runner on the node again if it has none."""

    node: str


@dataclass(frozen=True)
class TellServer:
    """The job's state, and the membership of its attempt; ``held_up_by`` are the ranks that keep it from starting."""

    state: str
    attempt: int
    nodes: tuple[str, ...]
    held_up_by: tuple[int, ...] = ()


@dataclass(frozen=True)
class TellUnfit:
    """Have the server count the node as out of service, for these reasons, until somebody readmits it."""

    node: str
    reasons: str


@dataclass(frozen=True)
class Running:
    """Every rank was spawned: the requests are answered with a description of the attempt."""

    attempt: int
    nodes: tuple[str, ...]
    requests: tuple[int, ...]
    unconfirmed: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """The outcome of something asked for."""

    request: int
    success: bool
    text: str


@dataclass(frozen=True)
class Say:
    """Something that people and programs who watch the launcher want to know."""

    event: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Persist:
    """What must outlive the launcher has changed; on disk before the next order is carried out."""


@dataclass(frozen=True)
class End:
    """The job has ended; the launcher exits with this code."""

    phase: str
    reason: str
    exit_code: int


RunnerOrder = StartRanks | StopRanks | LookAtRanks | Abandon | Check | Revive
Order = RunnerOrder | ChooseCheckpoint | TellServer | TellUnfit | Running | Answer | Say | Persist | End
