"""What the files of a trace folder (``eagle-eye-trace/1``) hold besides tables, as types; and why a folder is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from eagle_eye.schema.events import WHOLE_NODE

FORMAT = "eagle-eye-trace/1"
HEADER_FILE, SAMPLES_FILE, LINKS_FILE = "trace.json", "samples.parquet", "links.parquet"
EVENTS_FILE, MEMBERSHIP_FILE, LABELS_FILE = "events.jsonl", "membership.jsonl", "faults.jsonl"

# A column of ours, which other readers ignore: for how long a rank's living process has said nothing, in seconds.
SILENCE_COLUMN = "rank_silent_seconds"

ShapeT = TypeVar("ShapeT", bound=msgspec.Struct)


class BadTrace(ValueError):
    """A folder that is no usable trace; the message names the file and what was expected."""


class TraceLink(msgspec.Struct, frozen=True, omit_defaults=True):
    """A port of a node, and the switch that it hangs on."""

    link: str
    switch: str | None = None


class TraceNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node of the trace; ``switch`` is that of its ports which name none of their own."""

    node: str
    gpus: int
    switch: str | None = None
    gpu_model: str | None = None
    links: list[TraceLink] = []


class TraceRank(msgspec.Struct, frozen=True):
    """A rank of the trace; ``pp`` is its pipeline stage.

    ``role`` names its group of comparable ranks where the job itself said so ("" otherwise: pipeline stage and GPU
    model tell); an addition of ours that other readers of the format ignore.
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


class Membership(msgspec.Struct, frozen=True):
    """One line of ``membership.jsonl``: who takes part from ``time`` on."""

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
    """One line of ``faults.jsonl``: what was done to the job, and what is expected of us."""

    start: float
    end: float
    nodes: list[str]
    fault: str
    expect: str


def read_header(folder: Path) -> Header:
    """Return ``trace.json``. Raises BadTrace where it is missing, malformed or of another format."""
    path = folder / HEADER_FILE
    try:
        header = msgspec.json.decode(path.read_bytes(), type=Header)
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror}; a trace is a folder with {HEADER_FILE}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadTrace(f"{path}: {error}") from None
    if header.format != FORMAT:
        raise BadTrace(f"{path}: format {header.format!r}; this program reads {FORMAT!r}")
    if not header.interval_s > 0:
        raise BadTrace(f"{path}: interval_s is {header.interval_s}; it has to be more than 0")
    if not header.end >= header.start:
        raise BadTrace(f"{path}: end is {header.end}, before start, {header.start}")
    return header


def read_lines(path: Path, shape: type[ShapeT]) -> list[ShapeT]:
    """Return the lines of an optional JSON-lines file, [] without it. Raises BadTrace naming file and line."""
    decoder = msgspec.json.Decoder(shape)
    found = []
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found.append(decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise BadTrace(f"{path}:{number}: {error}") from None
    return found
