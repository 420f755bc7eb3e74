"""What can happen to the launcher: the inputs of its state machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Moment:
    """Now, on the clock for durations and on the clock that checkpoints and Eagle Eye use."""

    monotonic_s: float
    unix_s: float


@dataclass(frozen=True)
class Opened:
    """The runners are being started."""


@dataclass(frozen=True)
class RunnerReady:
    """The node's runner can start ranks."""

    node: str


@dataclass(frozen=True)
class RunnerLost:
    """The node's runner has ended, or the connection to it; ``returning`` says that it is started again."""

    node: str
    detail: str
    returning: bool = False
    in_touch: bool = True


@dataclass(frozen=True)
class RanksStarted:
    """The node's ranks were spawned."""

    node: str
    attempt: int


@dataclass(frozen=True)
class RanksEnded:
    """The node's ranks are gone. ``exits`` are (rank, exit code), the first to fail first.

    ``in_touch`` is whether Eagle Eye could send word about it.
    """

    node: str
    attempt: int
    success: bool
    exits: tuple[tuple[int, int], ...] = ()
    detail: str = ""
    in_touch: bool = True


@dataclass(frozen=True)
class RanksStopped:
    """Nothing runs on the node but for some processes that cannot be killed."""

    node: str
    survivors: int = 0


@dataclass(frozen=True)
class StartImpossible:
    """The launcher itself could not start the attempt."""

    attempt: int
    detail: str


@dataclass(frozen=True)
class ExcludeAsked:
    """The nodes shall not be used: from now on, or from the next start on if possible."""

    request: int
    nodes: tuple[str, ...]
    now: bool
    reason: str


@dataclass(frozen=True)
class RestartAsked:
    """The attempt shall be ended and a next one started; see protocol.Restart."""

    request: int
    over_attempt: int
    distrust_since_s: float | None
    reason: str


@dataclass(frozen=True)
class ReadmitAsked:
    """The nodes may be used again."""

    request: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Cancelled:
    """The user or the system wants the job to end."""

    reason: str
    exit_code: int


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


RunnerWord = RunnerReady | RunnerLost | RanksStarted | RanksEnded | RanksStopped
Asked = ExcludeAsked | RestartAsked | ReadmitAsked
Happening = RunnerWord | Asked | Opened | StartImpossible | Cancelled | Tick
