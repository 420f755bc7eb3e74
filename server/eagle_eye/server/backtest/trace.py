"""A trace folder (``eagle-eye-trace/1``): its files and their types, its tables as rows, all of it in order of time."""

from __future__ import annotations

import heapq
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from eagle_eye.detectors.faults import BY_NAME
from eagle_eye.schema import events as event_catalogue
from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.action import ActionKind, MemberRank
from eagle_eye.schema.events import WHOLE_NODE, Event
from eagle_eye.schema.frame import WIRE_VERSION, Block, Frame, Rank
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.names import NAME_CHARS_MAX, RULE, did_you_mean, is_name
from eagle_eye.schema.times import TIME_S_MAX, in_seconds
from eagle_eye.server.engine.roster import Topology
from eagle_eye.server.model.records import Job

OFFSET_S_MIN = 30.0  # smaller offsets are left to the detectors, which tolerate them
OFFSET_INTERVALS_MIN = 3.0
NODES_MIN = 3  # minimum number of nodes; among fewer no outlier can be identified


class RowSpan(NamedTuple):
    """When a node's first and last row ended, Unix seconds."""

    first_s: float
    last_s: float


def clock_offsets(spans: Mapping[str, RowSpan], interval_s: float) -> dict[str, float]:
    """Return how many seconds nodes' clocks are ahead of the others' (behind: negative), {} for none.

    A wrong clock shifts all rows of a node by the same time, so that they begin and end too late, or too early, by the
    same amount. A node that joined late, left early or replaced another does only one of the two. The time of more than
    half of the nodes is taken as correct. Does not detect: offsets below 30 s or three intervals; clocks that are
    corrected in between; a node whose first and last rows are missing as well.
    """
    if len(spans) < NODES_MIN:
        return {}
    usual = RowSpan(median(span.first_s for span in spans.values()), median(span.last_s for span in spans.values()))
    least_s = max(OFFSET_S_MIN, OFFSET_INTERVALS_MIN * interval_s)
    found = {}
    for node, span in spans.items():
        early, late = span.first_s - usual.first_s, span.last_s - usual.last_s
        alike = abs(early - late) <= max(least_s / 3.0, 0.01 * abs(early))
        if alike and min(abs(early), abs(late)) >= least_s and early * late > 0.0:
            found[node] = (early + late) / 2.0
    return found if 2 * len(found) < len(spans) else {}


def clock_lines(trace: str, offsets_s: Mapping[str, float]) -> list[str]:
    """Return messages about nodes whose clocks were wrong."""
    return [
        f"{trace}: the clock of node {node[:NAME_CHARS_MAX]!r} is {abs(offset_s):.0f} s"
        f" {'ahead of' if offset_s > 0.0 else 'behind'} the others'; what it tells is judged at their time"
        for node, offset_s in sorted(offsets_s.items())
    ]


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


# The tables become blocks of frames, in order of time and node, whatever the order in the files.
#
# A table is read once, its keys sorted once (or found sorted), and its cells gathered in chunks of contiguous rows: no
# Python code runs per row. Memory is the file's columns plus one chunk.

CHUNK_CELLS = 1 << 21  # gathered at a time: 16 MiB
DEVICE_MAX = (1 << 15) - 1
NO_KEY = -2  # the row has no device, node or link

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


class TraceRows(NamedTuple):
    """Rows of one scope of one node that ended at one time.

    ``silent`` has the silence in seconds of each device whose rank's process reported nothing.
    """

    time_s: float
    node: str
    block: Block
    silent: dict[int, float]


class _Keys(NamedTuple):
    """The rows' keys: Unix seconds, and indexes into ``nodes`` and ``names`` (devices: the device itself)."""

    times_s: Floats
    node_of: Integers
    key_of: Integers
    nodes: list[str]
    names: list[str] | None


class RowColumns(NamedTuple):
    """A table's usable rows in order of time, node and key, as columns; ``node_of`` and ``key_of`` as in ``_Keys``."""

    times_s: Floats
    node_of: Integers
    key_of: Integers
    nodes: list[str]
    names: list[str] | None
    values: dict[str, Any]


class TableRows:
    """The rows of a table, in order: ``moments`` yields them, ``columns`` has them whole.

    Raises BadTrace where they cannot be read.
    """

    def __init__(self, path: Path, key: str, scopes: Sequence[Scope]) -> None:
        self._path, self._key, self._scopes = path, key, scopes
        self._table = _read(path, key, scopes)
        times_s = _numbers(path, self._table, "time", pa.float64())
        node_of, nodes = _texts(path, self._table, "node")
        names: list[str] | None = None
        if key == "device":
            devices = _numbers(path, self._table, "device", pa.float64())
            known = np.isfinite(devices) & (devices >= WHOLE_NODE) & (devices <= DEVICE_MAX)
            key_of = np.where(known, devices, NO_KEY).astype(np.int64)
        else:
            key_of, names = _texts(path, self._table, key)
        self._keys = _Keys(times_s, node_of, key_of, nodes, names)
        self._check_times()

    def _check_times(self) -> None:
        times_s = self._keys.times_s[np.isfinite(self._keys.times_s)]
        if len(times_s) == 0:
            return
        wrong = (times_s < 0.0) | (times_s >= TIME_S_MAX)
        if wrong.any():
            some = float(times_s[wrong][0])
            limit = f"expected Unix seconds, from 1970 to 2100{in_seconds(some)}"
            raise BadTrace(f"{self._path}: column 'time' has {some:.0f} ({wrong.sum()} of {len(wrong)} rows); {limit}")

    def spans(self) -> dict[str, RowSpan]:
        """Return when each node's first and last rows ended."""
        keys = self._keys
        usable = np.isfinite(keys.times_s) & (keys.node_of != NO_KEY)
        firsts, lasts = np.full(len(keys.nodes), np.inf), np.full(len(keys.nodes), -np.inf)
        np.minimum.at(firsts, keys.node_of[usable], keys.times_s[usable])
        np.maximum.at(lasts, keys.node_of[usable], keys.times_s[usable])
        spans = zip(keys.nodes, firsts.tolist(), lasts.tolist(), strict=True)
        return {node: RowSpan(first_s, last_s) for node, first_s, last_s in spans if first_s <= last_s}

    def spacing_s(self) -> float:
        """Return the typical time between two moments of the first node, NaN where there is none."""
        times_s = np.unique(self._keys.times_s[self._keys.node_of == 0])
        gaps_s = np.diff(times_s[np.isfinite(times_s)])
        return float(np.median(gaps_s)) if len(gaps_s) else float("nan")

    def shift(self, offsets_s: Mapping[str, float]) -> None:
        """Subtract each node's clock offset from the times of its rows."""
        if offsets_s:
            by_node = np.array([*(offsets_s.get(node, 0.0) for node in self._keys.nodes), 0.0])  # NO_KEY: the last
            self._keys = self._keys._replace(times_s=self._keys.times_s - by_node[np.maximum(self._keys.node_of, -1)])

    def outside(self, start_s: float, end_s: float) -> tuple[int, int]:
        """Return how many rows end before ``start_s``, and how many after ``end_s``."""
        times_s = self._keys.times_s
        return int((times_s < start_s).sum()), int((times_s > end_s).sum())

    def columns(self, ignored: Counter[str]) -> RowColumns:
        """Return the usable rows with every metric that the file has, NaN where one was not observed.

        ``ignored`` counts what was left out, as ``moments`` does.
        """
        order = _order(self._keys, ignored, self._key)
        keys = self._keys
        names = [name for name in self._table.schema.names if name in catalogue.BY_NAME]
        values = {name: _metric(self._path, self._table, name)[order] for name in names}
        return RowColumns(keys.times_s[order], keys.node_of[order], keys.key_of[order], keys.nodes, keys.names, values)

    def moments(self, ignored: Counter[str]) -> list[Iterator[TraceRows]]:
        """Return the moments of each scope.

        ``ignored`` counts what was left out: "duplicate row", "row without time, node or device".
        """
        keys = self._keys
        order = _order(keys, ignored, self._key)
        if self._key != "device":
            return [_moments(self._path, self._table, keys, order, self._scopes[0])]
        of_node = keys.key_of[order] == WHOLE_NODE
        return [
            _moments(self._path, self._table, keys, order[~of_node], Scope.DEVICE),
            _moments(self._path, self._table, keys, order[of_node], Scope.NODE),
        ]


def sample_rows(path: Path) -> TableRows:
    """Return the rows of ``samples.parquet``. Raises BadTrace."""
    return TableRows(path, "device", (Scope.DEVICE, Scope.NODE))


def link_rows(path: Path) -> TableRows:
    """Return the rows of ``links.parquet``; the keys of their blocks are the links' names. Raises BadTrace."""
    return TableRows(path, "link", (Scope.LINK,))


def _read(path: Path, key: str, scopes: Sequence[Scope]) -> pa.Table:
    """Return the key columns and those in the catalogue; other columns are not read."""
    try:
        opened(path).close()  # Arrow would wait for ever for a FIFO's other end
        with pq.ParquetFile(path) as file:
            present = file.schema_arrow.names
            missing = [name for name in ("time", "node", key) if name not in present]
            if missing:
                raise BadTrace(f"{path}: no column {', '.join(missing)}")
            metrics = [name for scope in scopes for name in catalogue.names(scope) if name in present]
            ours = [SILENCE_COLUMN] if Scope.DEVICE in scopes and SILENCE_COLUMN in present else []
            return file.read(columns=["time", "node", key, *metrics, *ours])
    except (OSError, pa.ArrowException) as error:
        raise BadTrace(f"{path}: {error}") from None


def _numbers(path: Path, table: pa.Table, name: str, kind: Any) -> Any:
    """Return a column as an array of floats, NaN where it is null."""
    column = table[name]
    try:
        return pc.cast(column, kind, safe=False).to_numpy() if column.type != kind else column.to_numpy()
    except pa.ArrowException as error:
        raise BadTrace(f"{path}: column {name!r} of type {column.type} holds no numbers: {error}") from None


def _metric(path: Path, table: pa.Table, name: str) -> Any:
    return _numbers(path, table, name, pa.float64() if catalogue.BY_NAME[name].exact else pa.float32())


def _texts(path: Path, table: pa.Table, name: str) -> tuple[Integers, list[str]]:
    """Return a column of text as indexes into its sorted values; NO_KEY where it is null."""
    column = table[name]
    try:
        text = pc.cast(column, pa.string()).combine_chunks()
        coded = pc.dictionary_encode(text)
    except pa.ArrowException as error:
        raise BadTrace(f"{path}: column {name!r} of type {column.type} holds no names: {error}") from None
    if isinstance(coded, pa.ChunkedArray):
        coded = coded.combine_chunks()
    values: list[str] = coded.dictionary.to_pylist()
    rank = np.empty(len(values) + 1, dtype=np.int64)
    rank[sorted(range(len(values)), key=values.__getitem__)] = np.arange(len(values))
    rank[-1] = NO_KEY
    indexes = coded.indices.fill_null(len(values)).to_numpy(zero_copy_only=False)
    return rank[indexes], sorted(values)


def _order(keys: _Keys, ignored: Counter[str], key: str) -> Integers:
    """Return the usable rows in order of time, node and key; of duplicates the last one in the file."""
    usable = np.isfinite(keys.times_s) & (keys.node_of != NO_KEY) & (keys.key_of != NO_KEY)
    order = np.flatnonzero(usable)
    if len(order) < len(usable):
        ignored[f"row without time, node or {key}"] += len(usable) - len(order)
    columns = [keys.times_s[order], keys.node_of[order], keys.key_of[order]]
    if not _ascending(columns):
        turned = np.lexsort(columns[::-1])  # stable: the last of equal ones stays the last
        order, columns = order[turned], [column[turned] for column in columns]
    last = np.ones(len(order), dtype=bool)
    last[:-1] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    if not last.all():
        ignored["duplicate row"] += int((~last).sum())
        order = order[last]
    return order


def _ascending(columns: Sequence[Any]) -> bool:
    settled = np.zeros(max(len(columns[0]) - 1, 0), dtype=bool)
    for column in columns:
        before, after = column[:-1], column[1:]
        if (~settled & (after < before)).any():
            return False
        settled |= after > before
    return True


def _moments(path: Path, table: pa.Table, keys: _Keys, order: Integers, scope: Scope) -> Iterator[TraceRows]:
    """Yield the moments of the rows in ``order``; metrics without any value in a moment are left out of its block."""
    names = [name for name in catalogue.names(scope) if name in table.schema.names]
    columns = [_metric(path, table, name) for name in names]
    silence = None
    if scope is Scope.DEVICE and SILENCE_COLUMN in table.schema.names:
        silence = _numbers(path, table, SILENCE_COLUMN, pa.float64())
    return _gathered(columns, names, keys, order, scope, silence)


def _gathered(
    columns: list[Any], names: list[str], keys: _Keys, order: Integers, scope: Scope, silence: Any
) -> Iterator[TraceRows]:
    if len(order) == 0:
        return
    times_s, node_of = keys.times_s[order], keys.node_of[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (times_s[1:] != times_s[:-1]) | (node_of[1:] != node_of[:-1])
    bounds = np.append(np.flatnonzero(new), len(order))
    chunk_rows = max(CHUNK_CELLS // max(len(names), 1), 1)
    patterns = _Patterns(names)
    first = 0
    while first < len(bounds) - 1:
        last = max(int(np.searchsorted(bounds, bounds[first] + chunk_rows, side="right")) - 1, first + 1)
        start, end = int(bounds[first]), int(bounds[last])
        rows = order[start:end]
        cells = np.empty((len(names), end - start), dtype="<f8")
        for line, column in zip(cells, columns, strict=True):
            line[:] = column[rows]
        offsets = bounds[first:last] - start
        seen: Any = np.logical_or.reduceat(~np.isnan(cells), offsets, axis=1).T
        complete = seen.all(axis=1).tolist()
        labels = _labels(keys, rows)
        quiet = _silences(silence, rows, labels)
        at = [*offsets.tolist(), end - start]
        when = times_s[start:end][offsets].tolist()
        who = node_of[start:end][offsets].tolist()
        for i, (time_s, node) in enumerate(zip(when, who, strict=True)):
            low, high = at[i], at[i + 1]
            chosen, wanted = (names, None) if complete[i] else patterns.get(seen[i])
            held = cells[:, low:high] if wanted is None else cells[wanted, low:high]
            silent = dict(quiet[k] for k in range(low, high) if k in quiet) if quiet else {}
            yield TraceRows(time_s, keys.nodes[node], Block(scope, labels[low:high], chosen, held.tobytes()), silent)
        first = last


class _Patterns:
    """The metrics of a block: there are few distinct combinations, and each is looked up once."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._known: dict[bytes, tuple[list[str], Integers]] = {}

    def get(self, seen: Any) -> tuple[list[str], Integers]:
        """Return the names and indexes of the metrics where ``seen`` (metrics,) is true."""
        key = seen.tobytes()
        if key not in self._known:
            wanted = np.flatnonzero(seen)
            self._known[key] = ([self._names[metric] for metric in wanted], wanted)
        return self._known[key]


def _silences(silence: Any, rows: Integers, labels: list[Any]) -> dict[int, tuple[int, float]]:
    """Return the device and silence in seconds of the silent ranks, by position in the chunk."""
    if silence is None:
        return {}
    values = silence[rows]
    return {int(k): (labels[k], float(values[k])) for k in np.flatnonzero(values > 0)}


def _labels(keys: _Keys, rows: Integers) -> list[Any]:
    found: list[int] = keys.key_of[rows].tolist()
    return found if keys.names is None else [keys.names[key] for key in found]


DAY_S = 86_400.0
IDLE_S_MAX = DAY_S  # maximum time that the header may extend beyond the trace's data
SLACK_S = 10.0  # rows this far outside of the header's range are not reported
_JOB, _EVENT, _ROWS = 0, 1, 2  # order of what becomes known at the same moment


@dataclass(frozen=True, slots=True)
class Step:
    """Something that becomes known at ``time_s``: a frame, or the scheduler's report on the job."""

    time_s: float
    frame: Frame | None = None
    job: Job | None = None


class _Reported(NamedTuple):
    """An item of a file, with its sort keys; ``node`` is "" for the job."""

    time_s: float
    node: str
    kind: int
    what: Job | Event | list[Block]
    silent: dict[int, float] = {}  # noqa: RUF012 - never changed


_by_time = attrgetter("time_s")
_by_time_said = attrgetter("time")
_in_order = itemgetter(0, 1, 2)


class Trace:
    """A trace on disk. Raises BadTrace where a file is missing, malformed or of another format.

    ``ignored`` counts, by reason, what ``steps`` left out, once it has been exhausted. ``clock_offsets`` has, from its
    first step on, how many seconds nodes' clocks are ahead of the others'; their data is moved back by as much.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.header = read_header(folder)
        self.ignored: Counter[str] = Counter()
        self.clock_offsets: dict[str, float] = {}
        self._memberships = self._read_memberships()
        self._present = self._ranks_by_node()

    def labels(self) -> list[Label] | None:
        """Return the labels, None when the trace has none. The engine never sees them.

        Raises BadTrace for one that no verdict could fulfil: an unknown fault, expectation or node.
        """
        path = self.folder / LABELS_FILE
        if not path.exists():
            return None
        found = read_lines(path, Label)
        known = {node.node for node in self.header.nodes}
        for label in found:
            for node in label.nodes:
                if node not in known:
                    hint = did_you_mean(node, known) or f"; {HEADER_FILE} names its nodes"
                    raise BadTrace(f"{path}: label {label.fault!r}: the trace has no node {node[:80]!r}{hint}")
        return found

    def members_at(self, time_s: float) -> list[MemberRank]:
        """Return the ranks that the trace names for this time, with their peer groups; [] where it names none."""
        latest = next((item for item in reversed(self._memberships) if item.time <= time_s), None)
        return [] if latest is None else self._members(latest.ranks)

    def topology(self) -> Topology:
        """Return which nodes are on which switch, as far as the trace says."""
        return Topology(
            switch_of_node={node.node: node.switch for node in self.header.nodes if node.switch},
            switch_of_link={
                node.node: {link.link: switch for link in node.links if (switch := link.switch or node.switch)}
                for node in self.header.nodes
                if node.links
            },
        )

    def steps(self) -> Iterator[Step]:
        """Yield the trace's contents in order of time; frames of one moment in order of node.

        An event is known when it happens, a row only when its interval has ended.
        """
        self.ignored.clear()
        events = read_lines(self.folder / EVENTS_FILE, TraceEvent)
        rows = [sample_rows(self.folder / SAMPLES_FILE)]
        if (links := self.folder / LINKS_FILE).exists():
            rows.append(link_rows(links))
        events = self._set_right(rows, events)
        self._check_reach(rows, events)
        tables = [moments for one in rows for moments in one.moments(self.ignored)]
        sequence = 0
        for reported in heapq.merge(self._job_words(events), self._events(events), _rows(tables), key=_in_order):
            if isinstance(reported.what, Job):
                yield Step(reported.time_s, job=reported.what)
            else:
                sequence += 1
                yield Step(reported.time_s, frame=self._frame(reported, sequence, reported.what))

    def _set_right(self, rows: list[TableRows], events: list[TraceEvent]) -> list[TraceEvent]:
        """Shift the data of nodes with a wrong clock to the others' time."""
        spacing_s, interval_s = rows[0].spacing_s(), self.header.interval_s
        if 900.0 <= spacing_s / interval_s <= 1_100.0:
            what = f"rows of a node are {spacing_s:g} apart where interval_s is {interval_s:g}: are they milliseconds?"
            raise BadTrace(f"{self.folder / SAMPLES_FILE}: column 'time': {what} Expected Unix seconds")
        self.clock_offsets = clock_offsets(rows[0].spans(), interval_s)
        for one in rows:
            one.shift(self.clock_offsets)
        if not self.clock_offsets:
            return events
        return [
            msgspec.structs.replace(event, time=event.time - self.clock_offsets.get(event.node or "", 0.0))
            for event in events
        ]

    def _check_reach(self, rows: list[TableRows], events: list[TraceEvent]) -> None:
        """Refuse a header with a time range that the data does not cover; count the rows outside of it."""
        start_s, end_s = self.header.start, self.header.end
        spans = [span for one in rows for span in one.spans().values()]
        reported = [time_s for span in spans for time_s in span]
        reported += [event.time for event in events]
        reported += [item.time for item in self._memberships if item.time > start_s]
        where = self.folder / HEADER_FILE
        for name, beyond_s in (
            ("end", end_s - max(reported, default=start_s)),
            ("start", min(reported, default=start_s) - start_s),
        ):
            if beyond_s > IDLE_S_MAX:
                side = "after the last" if name == "end" else "before the first"
                raise BadTrace(
                    f"{where}: {name} is {getattr(self.header, name):.0f}, {beyond_s / DAY_S:.1f} days {side} row or"
                    f" event; at most {IDLE_S_MAX / DAY_S:g} day of silence is judged: set {name} nearer to it"
                )
        slack_s = max(SLACK_S, self.header.interval_s)
        if spans and all(span.first_s > end_s + slack_s or span.last_s < start_s - slack_s for span in spans):
            first_s, last_s = min(span.first_s for span in spans), max(span.last_s for span in spans)
            raise BadTrace(
                f"{where}: start {start_s:.0f} and end {end_s:.0f} hold none of the rows, which are of {first_s:.0f} to"
                f" {last_s:.0f}; expected Unix seconds in both files"
            )
        for one in rows:
            before, after = one.outside(start_s - slack_s, end_s + slack_s)
            for count, side in ((before, "before the trace's start"), (after, "after the trace's end")):
                if count:
                    self.ignored[f"row {side}"] += count

    def _read_memberships(self) -> list[MembershipLine]:
        """Return the members over time, oldest first; [] when the trace does not say."""
        found = read_lines(self.folder / MEMBERSHIP_FILE, MembershipLine, MEMBERSHIP_LINE_BYTES_MAX)
        start = self.header.start
        if self.header.ranks and not any(item.time <= start for item in found):
            found.append(MembershipLine(start, 0, self.header.ranks))
        return sorted(found, key=_by_time_said)

    def _members(self, ranks: list[TraceRank]) -> list[MemberRank]:
        """Return the ranks with their peer group: the job's own, else pipeline stage and GPU model."""
        model = {node.node: node.gpu_model or "" for node in self.header.nodes}
        return [MemberRank(r.rank, r.node, r.device, r.role or f"pp{r.pp}/{model.get(r.node, '')}") for r in ranks]

    def _ranks_by_node(self) -> list[tuple[float, dict[str, list[Rank]]]]:
        """Return which ranks ran on which node from when on, newest first."""
        present = []
        for item in reversed(self._memberships):
            nodes: dict[str, list[Rank]] = {}
            for member in self._members(item.ranks):
                rank = Rank(
                    job=self.header.job,
                    rank=member.rank,
                    world_size=len(item.ranks),
                    device=member.device,
                    attempt=item.attempt,
                    role=member.role,
                )
                nodes.setdefault(member.node, []).append(rank)
            present.append((item.time, nodes))
        return present

    def _job_words(self, events: list[TraceEvent]) -> list[_Reported]:
        said = [(item.time, item.attempt, "running", item.ranks) for item in self._memberships]
        said += (
            (event.time, self._attempt(event), str(event.attributes.get("state", "")), [])
            for event in events
            if event.kind == "job_state"
        )
        jobs = [
            Job(
                job=self.header.job,
                attempt=attempt,
                state=state,
                ranks=self._members(ranks),
                restart_owner="",
                updated_s=time_s,
            )
            for time_s, attempt, state, ranks in said
        ]
        return sorted((_Reported(job.updated_s, "", _JOB, job) for job in jobs), key=_by_time)

    def _attempt(self, event: TraceEvent) -> int:
        """Return the attempt of a job_state event: if it names none, the one in progress then."""
        named = event.attributes.get("attempt")
        if isinstance(named, int | float) and math.isfinite(named):
            return int(named)
        begun = [item.attempt for item in self._memberships if item.time <= event.time]
        return max(begun, default=0)

    def _events(self, events: list[TraceEvent]) -> list[_Reported]:
        found: list[_Reported] = []
        for event in events:
            if event.kind not in event_catalogue.BY_KIND:
                self.ignored[f"event of unknown kind {event.kind[:80]!r}"] += 1
            elif event.kind != "job_state":
                device = WHOLE_NODE if event.device is None else event.device
                one = Event(event.time, event.kind, device, event.attributes)
                nodes = [event.node] if event.node else [known.node for known in self.header.nodes]
                found += (_Reported(event.time, node, _EVENT, one) for node in nodes)
        return sorted(found, key=_in_order)

    def _frame(self, reported: _Reported, sequence: int, what: Event | list[Block]) -> Frame:
        time_s, node = reported.time_s, reported.node
        ranks = next((nodes.get(node, []) for since_s, nodes in self._present if since_s <= time_s), [])
        if reported.silent:
            ranks = [msgspec.structs.replace(rank, silent_s=reported.silent.get(rank.device, 0.0)) for rank in ranks]
        return Frame(
            version=WIRE_VERSION,
            node=node,
            boot_id="trace",
            stream="trace",
            sequence=sequence,
            time_s=time_s,
            interval_s=self.header.interval_s,
            agent_version="trace",
            job=self.header.job,
            ranks=ranks,
            blocks=what if isinstance(what, list) else [],
            events=[what] if isinstance(what, Event) else [],
        )


def _rows(tables: list[Iterator[TraceRows]]) -> Iterator[_Reported]:
    """Yield one set of blocks for each node and moment, from all tables."""
    blocks: list[Block] = []
    silent: dict[int, float] = {}
    time_s, node = math.nan, ""
    for moment in heapq.merge(*tables, key=itemgetter(0, 1)):
        if blocks and (moment.time_s != time_s or moment.node != node):
            yield _Reported(time_s, node, _ROWS, blocks, silent)
            blocks, silent = [], {}
        time_s, node = moment.time_s, moment.node
        blocks.append(moment.block)
        silent = moment.silent or silent
    if blocks:
        yield _Reported(time_s, node, _ROWS, blocks, silent)
