"""The inputs of the launcher's state machine."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_eye.schema.action import RestartScope


@dataclass(frozen=True)
class Moment:
    """Now, on the monotonic clock and on the wall clock that checkpoints and Eagle Eye use."""

    monotonic_s: float
    unix_s: float


@dataclass(frozen=True)
class Opened:
    """The runners are being started."""


@dataclass(frozen=True)
class RunnerReady:
    """The node's runner can start ranks. ``check`` is the result of the node's check, for people.

    ``standby`` says, for people as well, whether ranks will come from a standby.
    """

    node: str
    check: str = ""
    standby: str = ""


@dataclass(frozen=True)
class RunnerBusy:
    """The node's runner answers but is not ready; ``doing`` is its current work, for people."""

    node: str
    doing: str


@dataclass(frozen=True)
class RunnerSilent:
    """The node's runner has spoken before and has not answered for ``for_s`` seconds. Repeated.

    ``returning`` says that another one would be started if this one is given up.
    """

    node: str
    for_s: float
    returning: bool = False
    in_touch: bool = True


@dataclass(frozen=True)
class NodeUnfit:
    """The node failed its check before joining; ``reasons`` are for people."""

    node: str
    reasons: str


@dataclass(frozen=True)
class RunnerLost:
    """The node's runner has exited, or its connection is lost; ``returning`` says that it is restarted."""

    node: str
    detail: str
    returning: bool = False
    in_touch: bool = True


@dataclass(frozen=True)
class RanksStarted:
    """The node's ranks, these, were spawned."""

    node: str
    attempt: int
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class RanksSeen:
    """The state of the node's ranks: how many have reached the rendezvous, which have not, which are stopped.

    ``cut_off`` says that the node cannot reach the rendezvous, even if its ranks had reached it before. ``in_touch`` is
    whether Eagle Eye could report on it.
    """

    node: str
    attempt: int
    joined: int
    absent: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()
    cut_off: bool = False
    in_touch: bool = True


@dataclass(frozen=True)
class NodeReached:
    """Whether the node reaches the launcher's store, as it was asked."""

    node: str
    reaches: bool


@dataclass(frozen=True)
class RanksEnded:
    """The node's ranks are gone. ``exits`` are (rank, exit code), the first to fail first.

    ``in_touch`` is whether Eagle Eye could report on it.
    """

    node: str
    attempt: int
    success: bool
    exits: tuple[tuple[int, int], ...] = ()
    detail: str = ""
    in_touch: bool = True


@dataclass(frozen=True)
class RankFinished:
    """A rank has exited with 0 while others of its node go on."""

    node: str
    attempt: int
    rank: int


@dataclass(frozen=True)
class RankReachedPoint:
    """A rank has a restart point, and ``waits`` there because its peers are gone, or does not. See machine.py.

    ``reason`` is what it says of its peers; ``in_touch`` is whether Eagle Eye could report on it.
    """

    node: str
    attempt: int
    rank: int
    waits: bool = False
    reason: str = ""
    in_touch: bool = True


@dataclass(frozen=True)
class RanksStopped:
    """Nothing runs on the node except processes that cannot be killed."""

    node: str
    survivors: int = 0


@dataclass(frozen=True)
class StartImpossible:
    """The launcher itself could not start the attempt."""

    attempt: int
    detail: str


@dataclass(frozen=True)
class CheckpointChosen:
    """The checkpoint to resume from was chosen: its step, its folder, and when it was completed (Unix time).

    A step of None means from scratch; ``path`` then says so where ranks would find a later one.
    """

    attempt: int
    step: int | None
    path: str = ""
    written_s: float | None = None


@dataclass(frozen=True)
class StepSeen:
    """The attempt's first reported step; ``most`` is the highest it can have reached by then."""

    attempt: int
    step: int
    most: int


@dataclass(frozen=True)
class CheckpointWritten:
    """The attempt has completed a checkpoint."""

    attempt: int
    step: int


@dataclass(frozen=True)
class ExcludeAsked:
    """The nodes must not be used: from now on, or from the next start on if possible; see protocol.Exclusion.

    ``waits``: with them the job does not train, or computes wrong results, so waiting for other nodes costs nothing.
    """

    request: int
    nodes: tuple[str, ...]
    now: bool
    reason: str
    over_attempt: int = 0
    distrust_since_s: float | None = None
    waits: bool = False


@dataclass(frozen=True)
class RestartAsked:
    """End the attempt and start the next one; see protocol.Restart.

    ``blames_nobody``: no node is excluded, so the fault may be in the checkpoint that the attempt resumed from.
    ``scope`` is the smallest restart that is safe.
    """

    request: int
    over_attempt: int
    distrust_since_s: float | None
    reason: str
    blames_nobody: bool = False
    scope: RestartScope = "job"


@dataclass(frozen=True)
class ReadmitAsked:
    """The nodes may be used again."""

    request: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Cancelled:
    """The user or the system asks the job to end."""

    reason: str
    exit_code: int


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


RankEvent = RanksStarted | RankReachedPoint | RankFinished | RanksEnded
RunnerEvent = RunnerReady | RunnerBusy | RunnerLost | RunnerSilent | NodeUnfit | RanksStopped | RankEvent
Progress = CheckpointChosen | StepSeen | CheckpointWritten
Asked = ExcludeAsked | RestartAsked | ReadmitAsked
LaunchEvent = RunnerEvent | RanksSeen | NodeReached | Progress | Asked | Opened | StartImpossible | Cancelled | Tick
