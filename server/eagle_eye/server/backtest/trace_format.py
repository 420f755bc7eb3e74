"""The types of a trace folder's files (``eagle-eye-trace/1``) other than tables, and the error for invalid folders."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, TypeVar

import msgspec

from eagle_eye.detectors.faults import BY_NAME
from eagle_eye.schema.action import ActionKind
from eagle_eye.schema.events import WHOLE_NODE
from eagle_eye.schema.names import RULE, did_you_mean, is_name
from eagle_eye.schema.times import TIME_S_MAX, in_seconds

FORMAT = "eagle-eye-trace/1"
HEADER_FILE, SAMPLES_FILE, LINKS_FILE = "trace.json", "samples.parquet", "links.parquet"
EVENTS_FILE, MEMBERSHIP_FILE, LABELS_FILE = "events.jsonl", "membership.jsonl", "faults.jsonl"

INTERVAL_S_MIN, INTERVAL_S_MAX = 0.01, 86_400.0
HEADER_BYTES_MAX = 256 << 20  # a job of a million ranks
LINE_BYTES_MAX = 1 << 20
MEMBERSHIP_LINE_BYTES_MAX = HEADER_BYTES_MAX
LINES_MAX = 2_000_000  # per file

# A column of ours, ignored by other readers: for how many seconds a rank's living process has reported nothing.
SILENCE_COLUMN = "rank_silent_seconds"

ShapeT = TypeVar("ShapeT", bound=msgspec.Struct)


# Legal values of a label's "expect", each with the action that fulfils it; None: there should be none.
EXPECTED_ACTIONS: Mapping[str, ActionKind | None] = MappingProxyType(
    {"exclude": "exclude_node", "restart": "restart_job", "drain": "drain_node", "job": "notify", "none": None}
)


class BadTrace(ValueError):
    """The folder is not a usable trace; the message names the file and what was expected."""


class TraceLink(msgspec.Struct, frozen=True, omit_defaults=True):
    """A port of a node, and the switch that it connects to."""

    link: str
    switch: str | None = None


class TraceNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node of the trace; ``switch`` applies to its ports that name none of their own."""

    node: str
    gpus: int
    switch: str | None = None
    gpu_model: str | None = None
    links: list[TraceLink] = []


class TraceRank(msgspec.Struct, frozen=True):
    """A rank of the trace; ``pp`` is its pipeline stage.

    ``role`` names its group of comparable ranks if the job itself reported one ("" otherwise: pipeline stage and GPU
    model are used); an addition of ours that other readers of the format ignore.
    """

    rank: int
    node: str
    device: int
    dp: int = 0
    pp: int = 0
    tp: int = 0
    role: str = ""


class Header(msgspec.Struct, frozen=True):
    """``trace.json``; times are Unix seconds, ``ranks`` the members at the start ([]: the trace does not say)."""

    format: str
    job: str
    interval_s: float
    start: float
    end: float
    nodes: list[TraceNode]
    ranks: list[TraceRank] = []


class MembershipLine(msgspec.Struct, frozen=True):
    """One line of ``membership.jsonl``: the members from ``time`` on."""

    time: float
    attempt: int
    ranks: list[TraceRank]


class TraceEvent(msgspec.Struct, frozen=True):
    """One line of ``events.jsonl``; ``node`` None for the whole job, ``device`` None or -1 for the node."""

    time: float
    kind: str
    node: str | None = None
    device: int | None = WHOLE_NODE
    attributes: dict[str, Any] = {}


class Label(msgspec.Struct, frozen=True):
    """One line of ``faults.jsonl``: what was wrong with the job, and the expected action (``EXPECTED_ACTIONS``)."""

    start: float
    end: float
    nodes: list[str]
    fault: str
    expect: str

    def __post_init__(self) -> None:
        """Refuse what no verdict could fulfil. Raises ValueError."""
        if self.expect not in EXPECTED_ACTIONS:
            raise ValueError(f"expect is {self.expect[:80]!r}; expected one of {_legal(self.expect)}")
        if self.fault not in BY_NAME:
            hint = did_you_mean(self.fault, BY_NAME) or f"; known are {', '.join(BY_NAME)}"
            raise ValueError(f"no fault is named {self.fault[:80]!r}{hint}")
        if not self.end >= self.start:
            raise ValueError(f"end is {self.end}, before start, {self.start}")


def _legal(expect: str) -> str:
    """Return the legal values, and which of them a word means: an action that fulfils it, or one much like it."""
    fulfilled = next((name for name, action in EXPECTED_ACTIONS.items() if action == expect), None)
    meant = f"; did you mean {fulfilled}?" if fulfilled else did_you_mean(expect, EXPECTED_ACTIONS)
    return ", ".join(EXPECTED_ACTIONS) + meant


def read_header(folder: Path) -> Header:
    """Return ``trace.json``. Raises BadTrace where it is missing, malformed or of another format."""
    path = folder / HEADER_FILE
    try:
        with opened(path) as file:
            text = file.read(HEADER_BYTES_MAX + 1)
        if len(text) > HEADER_BYTES_MAX:
            raise BadTrace(f"{path}: more than {HEADER_BYTES_MAX >> 20} MiB, which is the most read")
        header = msgspec.json.decode(text, type=Header)
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror}; a trace is a folder with {HEADER_FILE}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadTrace(f"{path}: {error}") from None
    if header.format != FORMAT:
        raise BadTrace(f"{path}: format {header.format[:80]!r}; this program reads {FORMAT!r}")
    if not INTERVAL_S_MIN <= header.interval_s <= INTERVAL_S_MAX:
        limits = f"expected {INTERVAL_S_MIN:g} to {INTERVAL_S_MAX:.0f} seconds between the rows of a node"
        raise BadTrace(f"{path}: interval_s is {header.interval_s}; {limits}")
    for name in ("start", "end"):
        check_time(str(path), name, getattr(header, name))
    if not header.end >= header.start:
        raise BadTrace(f"{path}: end is {header.end}, before start, {header.start}")
    named = [("job", header.job), *(("node", node.node) for node in header.nodes)]
    named += [("rank's node", rank.node) for rank in header.ranks]
    named += [("rank's role", rank.role) for rank in header.ranks if rank.role]
    for what, name in named:
        if not is_name(name):
            raise BadTrace(f"{path}: {what} {name[:80]!a} is no name: {RULE}")
    return header


def check_time(where: str, name: str, time_s: float) -> None:
    """Raise BadTrace unless a time may be Unix seconds."""
    if not 0.0 <= time_s < TIME_S_MAX:
        hint = in_seconds(time_s)
        raise BadTrace(f"{where}: {name} is {time_s}; expected Unix seconds, from 1970 to 2100{hint}")


def opened(path: Path) -> BinaryIO:
    """Open a file for reading, without ever waiting for one that is not regular. Raises BadTrace, OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise BadTrace(f"{path}: expected a file, found {_KINDS.get(stat.S_IFMT(kind), 'something else')}")
    return os.fdopen(descriptor, "rb")


_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_lines(path: Path, shape: type[ShapeT], line_bytes_max: int = LINE_BYTES_MAX) -> list[ShapeT]:
    """Return the lines of an optional JSON-lines file, [] without it. Raises BadTrace naming file and line."""
    decoder = msgspec.json.Decoder(shape)
    found: list[ShapeT] = []
    number = 0
    try:
        with opened(path) as file:
            while line := file.readline(line_bytes_max + 1):
                number += 1
                if len(line) > line_bytes_max:
                    limit = f"a line has at most {line_bytes_max} bytes, one JSON object"
                    raise BadTrace(f"{path}:{number}: too long; {limit}")
                if line.strip():
                    if len(found) == LINES_MAX:
                        raise BadTrace(f"{path}: more than {LINES_MAX} lines, which is the most read; cut the trace")
                    found.append(_decoded(decoder, line, f"{path}:{number}"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror}") from None
    return found


def _decoded(decoder: msgspec.json.Decoder[ShapeT], line: bytes, where: str) -> ShapeT:
    try:
        item = decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadTrace(f"{where}: {error}") from None
    for name in ("time", "start", "end"):
        if (time_s := getattr(item, name, None)) is not None:
            check_time(where, name, time_s)
    return item
