"""The messages between the coordinator and a node's runner: one JSON object per line."""

from __future__ import annotations

import msgspec

from eagle_eye.schema.checkpoint_files import MemoryStep


class Prepare(msgspec.Struct, frozen=True):
    """What a standby must import besides torch, and for which command and number of ranks.

    ``vouched`` says that the user takes responsibility for imports that start threads, and for the memory.
    """

    command: list[str]
    imports: list[str] = []
    ranks_per_node: int = 1
    vouched: bool = False


class Prepared(msgspec.Struct, frozen=True):
    """The standby is ready, or ``reason`` says why it cannot be used. ``rss_bytes`` is its memory."""

    reason: str = ""
    rss_bytes: int = 0


class Forked(msgspec.Struct, frozen=True):
    """The standby has forked the process that runs the attempt."""

    pid: int


class Configure(msgspec.Struct, frozen=True, tag_field="do", tag="configure"):
    """First line: the environment of everything that runs on the node, and how long silence is tolerated.

    ``launch`` marks the ranks of one state folder's launchers: those of an earlier attempt are ended first.
    ``check`` is how the node is checked before it joins (runner.py), for at most ``check_within_s``. ``standby`` is
    None where ranks are to be spawned.
    """

    env: dict[str, str]
    lease_s: float
    node: str = ""
    launch: str = ""
    check: str = "off"
    check_within_s: float = 60.0
    standby: Prepare | None = None


class Start(msgspec.Struct, frozen=True, tag_field="do", tag="start"):
    """Run the ranks of an attempt on this node."""

    attempt: int
    run_id: str
    node: str
    node_rank: int
    nodes: int
    ranks_per_node: int
    store_host: str
    store_port: int
    env: dict[str, str]
    command: list[str]
    log_dir: str
    log_bytes_max: int = 64 << 20


class Regroup(msgspec.Struct, frozen=True, tag_field="do", tag="regroup"):
    """Continue this node's running ranks in another attempt, from their restart points; answered by Started.

    ``env`` is the new part of their environment.
    """

    attempt: int
    store_host: str
    store_port: int
    env: dict[str, str]


class Stop(msgspec.Struct, frozen=True, tag_field="do", tag="stop"):
    """Kill everything that runs; answered by Stopped."""


class CheckNode(msgspec.Struct, frozen=True, tag_field="do", tag="check"):
    """Check the node again; answered by Ready or Unfit."""


class Look(msgspec.Struct, frozen=True, tag_field="do", tag="look"):
    """Report the state of the attempt's ranks; answered by Seen."""

    attempt: int


class ReachStore(msgspec.Struct, frozen=True, tag_field="do", tag="reach"):
    """Try whether the launcher's store is reached from the node; answered by Reached."""

    store_host: str
    store_port: int


class Hold(msgspec.Struct, frozen=True, tag_field="do", tag="hold"):
    """Report which steps of the job the node has in memory; answered by Held."""

    job: str
    node: str


class Ping(msgspec.Struct, frozen=True, tag_field="do", tag="ping"):
    """The coordinator is alive; answered by Alive.

    ``store``: the job keeps checkpoints in memory, and the node has a store for them.
    """

    store: bool = False


class StartedRank(msgspec.Struct, frozen=True):
    """A started rank, and its process on its node."""

    rank: int
    local_rank: int
    pid: int


class RankSight(msgspec.Struct, frozen=True):
    """A rank's state: whether its process is stopped, and whether it has reached the store (None: unknown)."""

    rank: int
    stopped: bool
    joined: bool | None


class RankExit(msgspec.Struct, frozen=True):
    """How a rank ended: the exit code, negative for a signal."""

    rank: int
    exit_code: int


class Alive(msgspec.Struct, frozen=True, tag_field="is", tag="alive"):
    """The runner answers; ``doing`` is its work before it is ready, "" from then on."""

    doing: str = ""


class Ready(msgspec.Struct, frozen=True, tag_field="is", tag="ready"):
    """Torch is imported; an attempt can start at once. ``check`` is the result of the node's check.

    ``standby`` says for people where ranks come from.
    """

    pid: int
    check: str = ""
    standby: str = ""


class Unfit(msgspec.Struct, frozen=True, tag_field="is", tag="unfit"):
    """The node failed its check and must not join; the reasons are for people."""

    reasons: str


class Started(msgspec.Struct, frozen=True, tag_field="is", tag="started"):
    """The node's ranks were spawned, or came from a standby. ``why_not`` says why not, where one was wanted.

    ``kept``: they were already running, and have continued from their restart points.
    """

    attempt: int
    ranks: list[StartedRank]
    standby: bool = False
    why_not: str = ""
    kept: bool = False


class RankAtPoint(msgspec.Struct, frozen=True, tag_field="is", tag="rank_at_point"):
    """A rank has a restart point, and waits there or not (schema/restart_point.py)."""

    attempt: int
    rank: int
    waits: bool = False
    reason: str = ""


class RankDone(msgspec.Struct, frozen=True, tag_field="is", tag="rank_done"):
    """A rank has exited with 0 while others of its node go on."""

    attempt: int
    rank: int


class Ended(msgspec.Struct, frozen=True, tag_field="is", tag="ended"):
    """The node's ranks have exited: all with success, or not. ``detail`` is for people."""

    attempt: int
    success: bool
    exits: list[RankExit] = []
    detail: str = ""


class Seen(msgspec.Struct, frozen=True, tag_field="is", tag="seen"):
    """The state of the node's ranks; ``reaches``: whether it reaches the launcher's store (None: not tried)."""

    attempt: int
    ranks: list[RankSight] = []
    reaches: bool | None = None


class Reached(msgspec.Struct, frozen=True, tag_field="is", tag="reached"):
    """Whether the launcher's store was reached from the node."""

    reaches: bool


class Stopped(msgspec.Struct, frozen=True, tag_field="is", tag="stopped"):
    """Nothing of any attempt runs on the node, except ``survivors``: processes that cannot be killed."""

    survivors: list[int] = []


class Logs(msgspec.Struct, frozen=True, tag_field="is", tag="logs"):
    """The ends of the attempt's rank logs on the node, where the coordinator cannot see them."""

    attempt: int
    files: dict[str, str]


ToRunner = Configure | Start | Regroup | Stop | CheckNode | Look | ReachStore | Hold | Ping


class Held(msgspec.Struct, frozen=True, tag_field="is", tag="held"):
    """The copies of the job's steps in the node's memory."""

    copies: list[MemoryStep]


OfStandby = Prepare | Prepared | Forked
FromRunner = Alive | Ready | Unfit | Started | RankAtPoint | RankDone | Seen | Reached | Ended | Stopped | Logs | Held

decode_to_runner = msgspec.json.Decoder(ToRunner).decode
decode_from_runner = msgspec.json.Decoder(FromRunner).decode


def line(message: ToRunner | FromRunner | OfStandby) -> bytes:
    """Return the message in its wire format."""
    return msgspec.json.encode(message) + b"\n"
