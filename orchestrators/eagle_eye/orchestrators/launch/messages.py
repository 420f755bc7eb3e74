"""What the coordinator and a node's runner say to each other: one JSON object a line."""

from __future__ import annotations

import msgspec


class Configure(msgspec.Struct, frozen=True, tag_field="do", tag="configure"):
    """First line: the environment of everything that runs on the node, and how long silence is borne."""

    env: dict[str, str]
    lease_s: float


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


class Stop(msgspec.Struct, frozen=True, tag_field="do", tag="stop"):
    """Kill whatever runs; answered by Stopped."""


class Ping(msgspec.Struct, frozen=True, tag_field="do", tag="ping"):
    """The coordinator is still there."""


class Rank(msgspec.Struct, frozen=True):
    """A rank that was started, and the process that it is on its node."""

    rank: int
    local_rank: int
    pid: int


class Exit(msgspec.Struct, frozen=True):
    """How a rank ended: the exit code, negative for a signal."""

    rank: int
    exit_code: int


class Ready(msgspec.Struct, frozen=True, tag_field="is", tag="ready"):
    """Torch is imported; an attempt can start at once."""

    pid: int


class Started(msgspec.Struct, frozen=True, tag_field="is", tag="started"):
    """The node's ranks were spawned."""

    attempt: int
    ranks: list[Rank]


class Ended(msgspec.Struct, frozen=True, tag_field="is", tag="ended"):
    """The node's ranks are gone: all with success, or not. ``detail`` is for people."""

    attempt: int
    success: bool
    exits: list[Exit] = []
    detail: str = ""


class Stopped(msgspec.Struct, frozen=True, tag_field="is", tag="stopped"):
    """Nothing of any attempt runs on the node, but for ``survivors``: processes that cannot be killed."""

    survivors: list[int] = []


ToRunner = Configure | Start | Stop | Ping
FromRunner = Ready | Started | Ended | Stopped

decode_to_runner = msgspec.json.Decoder(ToRunner).decode
decode_from_runner = msgspec.json.Decoder(FromRunner).decode


def line(message: ToRunner | FromRunner) -> bytes:
    """Return the message as it is written."""
    return msgspec.json.encode(message) + b"\n"
