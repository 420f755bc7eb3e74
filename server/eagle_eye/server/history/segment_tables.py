"""A segment as data: what it is on disk, and the tables that frames become. Pure.

A segment is a folder of Parquet tables and ``segment.json``, its facts; see docs/explanation/history.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.metrics import Scope

FORMAT = "eagle-eye-segment/1"
MINUTES_FORMAT = "eagle-eye-minutes/1"
WINDOW_FORMAT = "eagle-eye-downsampled/1"  # of earlier versions: an hour of minutes, a day of hours
FACTS_FILE = "segment.json"
RAW_FOLDER = "raw"
MINUTES_FOLDER, HOURS_FOLDER = "1m", "1h"
MINUTE_S, HOUR_S = 60, 3_600
BUCKET_S = {MINUTES_FOLDER: MINUTE_S, HOURS_FOLDER: HOUR_S}  # of the levels
STRETCH_BYTES_MAX = 128 << 20  # of encoded frames that are sorted in memory at once and become one segment
PARTIAL = ".partial-"  # name prefix of a folder that is still being written

Step = Callable[[str], None]


def no_step(_name: str) -> None:
    """Do nothing between two steps; a test may end the process there."""


def shard_of(name: str) -> int:
    """Return the node group of a segment of this name; -1 where the name does not say."""
    parts = name.split("-")
    return int(parts[-2]) if len(parts) > 2 and parts[-2].isdecimal() else -1


def any_between(names: Sequence[str], first: str, last: str) -> bool:
    """Return whether any of the sorted names is between ``first`` and ``last``, inclusive."""
    place = bisect_left(names, first)
    return place < len(names) and names[place] <= last


class Facts(msgspec.Struct, frozen=True):
    """``segment.json``, and the segment's row in the manifest. Times are corrected Unix seconds.

    ``journal`` names the journal that the frames came from: chunks ``first_chunk`` to ``last_chunk`` of ``shard``.
    ``received_s`` is when the last of them arrived, ``bytes`` the size of the tables. ``sources`` are the segments that
    it was merged from.
    """

    name: str
    journal: str
    shard: int
    first_chunk: int
    last_chunk: int
    late: bool
    first_node: str
    last_node: str
    first_s: float
    last_s: float
    received_s: float
    frames: int
    bytes: int
    format: str = FORMAT
    sources: tuple[str, ...] = ()


class MinutesFacts(msgspec.Struct, frozen=True):
    """``segment.json`` of the minutes of the raw segment of this name; of earlier versions, of an hour or a day.

    ``start_s`` and ``end_s`` are where its first bucket begins and its last one ends. ``frames`` counts the node
    buckets, ``rows`` those of the table, ``bytes`` its size. The journal is the one whose frames it summarizes.
    """

    name: str
    journal: str
    shard: int
    first_node: str
    last_node: str
    start_s: float
    end_s: float
    frames: int
    rows: int
    bytes: int
    last_chunk: int = 0
    level: str = MINUTES_FOLDER
    format: str = MINUTES_FORMAT


class Sealed(msgspec.Struct, frozen=True):
    """The compactor's report on a stretch: the chunks of ``shard`` up to ``through`` are on disk in ``segments``.

    ``minutes`` are those of these segments.
    """

    shard: int
    through: int
    segments: list[Facts]
    minutes: list[MinutesFacts] = []


class Remade(msgspec.Struct, frozen=True):
    """The report on a raw segment without minutes: they are on disk now, or (None) the segment is broken."""

    name: str
    minutes: MinutesFacts | None
    reason: str = ""


# The tables, and their columns

FRAMES_FILE = "frames.parquet"
SAMPLES_FILE = "samples.parquet"
LINKS_FILE = "links.parquet"

SAMPLE_METRICS = (*catalogue.names(Scope.DEVICE), *catalogue.names(Scope.NODE))
LINK_METRICS = catalogue.names(Scope.LINK)

FRAMES_SCHEMA = pa.schema(
    [
        ("time", pa.float64()),  # corrected: by the server's clock
        ("node", pa.string()),
        ("stream", pa.string()),
        ("sequence", pa.int64()),
        ("received", pa.float64()),
        ("node_time", pa.float64()),  # as the node sent it
        ("clock_offset", pa.float64()),
        ("interval", pa.float64()),
        ("boot_id", pa.string()),
        ("agent_version", pa.string()),
        ("job", pa.string()),
        ("ranks", pa.string()),  # this and the next four: JSON
        ("collectors", pa.string()),
        ("dropped", pa.string()),
        ("events", pa.string()),  # null: none
        ("other", pa.string()),  # keys that the server did not know; null: none
        ("layout", pa.string()),  # JSON: scope, rows and metrics of each of the frame's blocks
        ("unknown", pa.binary()),  # values of the layout's metrics without a column: little-endian float64
        ("raw", pa.binary()),  # the whole frame, if no columns could hold it; it has no rows then
    ]
)


def _rows_schema(key: tuple[str, pa.DataType], metrics: tuple[str, ...]) -> pa.Schema:
    return pa.schema(
        [
            ("time", pa.float64()),
            ("node", pa.string()),
            key,
            ("frame", pa.int32()),  # the row number of its frame in frames.parquet, from 0
            *((name, pa.float64() if catalogue.BY_NAME[name].exact else pa.float32()) for name in metrics),
        ]
    )


SAMPLES_SCHEMA = _rows_schema(("device", pa.int16()), SAMPLE_METRICS)
LINKS_SCHEMA = _rows_schema(("link", pa.string()), LINK_METRICS)

# Rows of devices, nodes and links, with frames grouped by layout

Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]
Numbers = np.ndarray[Any, np.dtype[np.floating[Any]]]


class Tables(NamedTuple):
    """One row group of each table; None: no rows."""

    frames: pa.Table
    samples: pa.Table | None
    links: pa.Table | None


class Odd(Exception):
    """A frame that the columns cannot hold."""


class _Group(NamedTuple):
    """Frames of one layout; their numbers, by frame, then metric, as little-endian float64."""

    keys: Sequence[int | str]
    metrics: int
    columns: Sequence[str]
    places: Sequence[int]  # indexes of the columns among the metrics
    frames: list[int]
    values: list[bytes]


class Rows:
    """Rows of one table; each layout's values become columns at once. ``key`` distinguishes the rows of a frame."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._groups: dict[object, _Group] = {}
        self._matrices: list[tuple[Integers, Sequence[int | str], Mapping[str, Numbers]]] = []

    def add(
        self,
        frame: int,
        layout: object,
        keys: Sequence[int | str],
        metrics: int,
        columns: Sequence[str],
        places: Sequence[int],
        values: bytes,
    ) -> None:
        """Add a block of one frame: ``columns`` are its metrics with a column, ``places`` their indexes in it."""
        group = self._groups.get(layout)
        if group is None:
            group = self._groups[layout] = _Group(keys, metrics, columns, places, [], [])
        group.frames.append(frame)
        group.values.append(values)

    def add_all(self, frames: Integers, keys: Sequence[int | str], columns: Mapping[str, Numbers]) -> None:
        """Add a block of each of the frames; a column's numbers are (frames, keys)."""
        self._matrices.append((frames, keys, columns))

    def table(
        self, schema: pa.Schema, first: int, times_s: Floats, node: Integers, names: Sequence[str]
    ) -> pa.Table | None:
        """Return the rows by node, key and time; None if there are none.

        ``times_s`` and ``node`` (indexes into ``names``) are those of the frames, which are sorted by node and time;
        ``first`` is the first one's number.
        """
        blocks = [*self._matrices, *map(_matrix, self._groups.values())]
        count = sum(len(frames) * len(keys) for frames, keys, _ in blocks)
        if count == 0:
            return None
        cells: dict[str, Numbers] = defaultdict(lambda: np.full(count, np.nan))
        frame = np.empty(count, dtype=np.int64)
        named: list[Any] = []
        low = 0
        for frames, keys, columns in blocks:
            high = low + len(frames) * len(keys)
            for name, values in columns.items():
                if len(blocks) == 1:
                    cells[name] = values.reshape(-1)
                else:
                    cells[name][low:high] = values.reshape(-1)
            frame[low:high] = np.repeat(frames, len(keys))
            named.append(np.tile(np.array(keys, dtype=object if self._key == "link" else np.int64), len(frames)))
            low = high
        every_key = np.concatenate(named)
        if self._key == "link":
            links, rank = np.unique(every_key.astype(str).astype(object), return_inverse=True)
        else:
            rank = every_key
        order = np.lexsort((frame, rank, node[frame]))
        frame, rank = frame[order], rank[order]
        known = {
            "time": plain(times_s[frame], pa.float64()),
            "node": texts(node[frame], names),
            self._key: texts(rank, links.tolist()) if self._key == "link" else plain(rank.astype(np.int16), pa.int16()),
            "frame": plain((frame + first).astype(np.int32), pa.int32()),
        }
        found = {name: column(values[order], schema.field(name)) for name, values in cells.items()}
        return rows_table(schema, {**known, **found}, count)


def rows_table(schema: pa.Schema, columns: Mapping[str, pa.Array], length: int) -> pa.Table:
    """Return the columns as a table in the order of the schema, with nulls for missing columns."""
    arrays = [columns[field.name] if field.name in columns else _nothing(field.type, length) for field in schema]
    return pa.table(arrays, names=schema.names)


def column(values: Numbers, field: pa.Field) -> pa.Array:
    """Return the values as a column; NaN is null."""
    with np.errstate(over="ignore"):  # beyond float32 is infinite
        cells = np.ascontiguousarray(values, field.type.to_pandas_dtype())
    if len(cells) == 0 or not np.isnan(cells.min()):  # the minimum is NaN if any is NaN
        return plain(cells, field.type)
    seen = ~np.isnan(cells)
    return plain(cells, field.type, seen)


def plain(cells: np.ndarray[Any, Any], kind: pa.DataType, seen: Any = None) -> pa.Array:
    """Return numbers of this type as a column; ``seen`` marks those that are not null (None: all)."""
    # Not pa.array: that imports pandas if it is installed, which takes half a second.
    bits = None if seen is None else pa.py_buffer(np.packbits(seen, bitorder="little"))
    return pa.Array.from_buffers(kind, len(cells), [bits, pa.py_buffer(cells)])


def texts(places: Integers, names: Sequence[str | None]) -> pa.DictionaryArray:
    """Return the names at these indexes as a dictionary-encoded column; None is null."""
    here = np.flatnonzero(np.bincount(places, minlength=len(names))).tolist()
    own: dict[str, int] = {}
    index = np.full(len(names), -1, dtype=np.int32)
    for place in here:
        name = names[place]
        if name is not None:
            index[place] = own.setdefault(name, len(own))
    indices = index[places]
    seen = None if None not in names else indices >= 0
    return pa.DictionaryArray.from_arrays(plain(indices, pa.int32(), seen), pa.array(own, pa.string()))


@lru_cache(maxsize=64)
def _nothings(kind: pa.DataType, length: int) -> pa.Array:
    return pa.nulls(length, kind)


def _nothing(kind: pa.DataType, length: int) -> pa.Array:
    """Return a column of nulls; all of a type share their memory."""
    return _nothings(kind, 1 << max(length - 1, 1).bit_length()).slice(0, length)


def as_json(plain: Any) -> str:
    """Return the value as JSON. Raises Odd for values that JSON would change: NaN, infinity, bytes."""
    text = msgspec.json.encode(plain)
    if msgspec.json.decode(text) != plain:
        raise Odd
    return text.decode()


def _matrix(group: _Group) -> tuple[Integers, Sequence[int | str], Mapping[str, Numbers]]:
    shape = len(group.frames), group.metrics, len(group.keys)
    block = np.frombuffer(b"".join(group.values), "<f8").reshape(shape)
    columns = {name: block[:, place, :] for name, place in zip(group.columns, group.places, strict=True)}
    return np.array(group.frames), group.keys, columns


# Frames become columns one by one. Only precision is lost: gauges become float32, as in a trace. Fields of newer agents
# that this server does not know are stored beside the columns; a frame that columns cannot represent is stored whole.

REMEMBERED_MAX = 10_000  # texts and layouts that recur between frames, of each kind


class JournaledFrame(NamedTuple):
    """A frame as the journal stores it; ``time_s`` is the corrected time."""

    node: str
    time_s: float
    stream: str
    sequence: int
    received_s: float
    offset_s: float
    raw: bytes | memoryview


class _Block(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    scope: Scope
    keys: msgspec.Raw
    metrics: msgspec.Raw
    values: bytes


class _Frame(msgspec.Struct, gc=False):
    """Like schema.frame's Frame, but what is the same in most frames stays encoded."""

    version: int
    node: str
    boot_id: str
    stream: str
    sequence: int
    time_s: float
    interval_s: float
    agent_version: str
    job: str | None = None
    ranks: msgspec.Raw = msgspec.Raw(b"\x90")
    blocks: list[_Block] = []
    events: msgspec.Raw = msgspec.Raw(b"\x90")
    collectors: msgspec.Raw = msgspec.Raw(b"\x80")
    dropped: msgspec.Raw = msgspec.Raw(b"\x80")
    clock_base_s: float | None = None  # only used to compute the offset; has no column


class _KnownFrame(_Frame, forbid_unknown_fields=True):
    pass


class _Placed(NamedTuple):
    scope: Scope
    keys: list[int | str]
    metrics: list[str]
    columns: list[str]  # the metrics that have a column
    known: list[int]  # and their indexes among the metrics
    unknown: list[int]


_NO_EVENTS = b"\x90"
_COLUMNS = {
    Scope.DEVICE: frozenset(SAMPLES_SCHEMA.names),
    Scope.NODE: frozenset(SAMPLES_SCHEMA.names),
    Scope.LINK: frozenset(LINKS_SCHEMA.names),
}
_known_frame_decoder = msgspec.msgpack.Decoder(_KnownFrame)
_frame_decoder = msgspec.msgpack.Decoder(_Frame)
_map_decoder = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_keys_decoder = msgspec.msgpack.Decoder(list[int | str])
_names_decoder = msgspec.msgpack.Decoder(list[str])


class Columns:
    """Builds tables of frames; caches what recurs in them."""

    def __init__(self) -> None:
        self._texts: dict[bytes, str] = {}
        self._layouts: dict[tuple[tuple[Scope, bytes, bytes], ...], tuple[str, list[_Placed]]] = {}

    def tables(self, frames: Sequence[JournaledFrame], first: int) -> Tables:
        """Return the frames, sorted by node and then time, as one row group; ``first`` is the first one's row."""
        samples, links = Rows("device"), Rows("link")
        columns = list(zip(*(self._row(kept, at, samples, links) for at, kept in enumerate(frames)), strict=True))
        times_s = np.array(columns[0], dtype=np.float64)
        names = list(dict.fromkeys(columns[1]))
        place_of = {name: place for place, name in enumerate(names)}
        node = np.array([place_of[name] for name in columns[1]], dtype=np.int64)
        cells = [pa.array(column, field.type) for column, field in zip(columns, FRAMES_SCHEMA, strict=True)]
        return Tables(
            pa.table(cells, schema=FRAMES_SCHEMA),
            samples.table(SAMPLES_SCHEMA, first, times_s, node, names),
            links.table(LINKS_SCHEMA, first, times_s, node, names),
        )

    def _row(self, kept: JournaledFrame, at: int, samples: Rows, links: Rows) -> tuple[Any, ...]:
        """Return the frame's row of frames.parquet, and add its blocks to the other tables."""
        of_journal = (kept.time_s, kept.node, kept.stream, kept.sequence, kept.received_s)
        try:
            frame, other = _decode(kept.raw)
            layout, blocks = self._layout(frame)
            row = (
                *of_journal,
                frame.time_s,
                kept.offset_s,
                frame.interval_s,
                frame.boot_id,
                frame.agent_version,
                frame.job,
                self._text(frame.ranks),
                self._text(frame.collectors),
                self._text(frame.dropped),
                None if bytes(frame.events) == _NO_EVENTS else self._text(frame.events),
                other,
                layout,
                _unknown(frame.blocks, blocks),
                None,
            )
        except (msgspec.MsgspecError, UnicodeError, ValueError, RecursionError, Odd):
            return (*of_journal, None, kept.offset_s, *[None] * 11, bytes(kept.raw))
        for block, placed in zip(frame.blocks, blocks, strict=True):
            (links if placed.scope is Scope.LINK else samples).add(
                at, (layout, placed.scope), placed.keys, len(placed.metrics), placed.columns, placed.known, block.values
            )
        return row

    def _text(self, raw: msgspec.Raw) -> str:
        """Return encoded values as equivalent JSON. Raises Odd."""
        encoded = bytes(raw)
        text = self._texts.get(encoded)
        if text is None:
            text = as_json(msgspec.msgpack.decode(encoded))
            if len(self._texts) >= REMEMBERED_MAX:
                self._texts.clear()
            self._texts[encoded] = text
        return text

    def _layout(self, frame: _Frame) -> tuple[str, list[_Placed]]:
        """Return the layout of the frame's blocks, as text and with its columns located. Raises Odd."""
        key = tuple((block.scope, bytes(block.keys), bytes(block.metrics)) for block in frame.blocks)
        found = self._layouts.get(key)
        if found is None:
            placed = [_placed(*parts) for parts in key]
            if len({block.scope for block in placed}) < len(placed):
                raise Odd
            text = as_json([[block.scope.value, block.keys, block.metrics] for block in placed])
            if len(self._layouts) >= REMEMBERED_MAX:
                self._layouts.clear()
            found = self._layouts[key] = (text, placed)
        for block, place in zip(frame.blocks, found[1], strict=True):
            if len(block.values) != 8 * len(place.keys) * len(place.metrics):
                raise Odd
        return found


def _placed(scope: Scope, keys: bytes, metrics: bytes) -> _Placed:
    rows, names = _keys_decoder.decode(keys), _names_decoder.decode(metrics)
    numbers = scope is Scope.LINK or all(isinstance(key, int) and -1 <= key < 1 << 15 for key in rows)
    if not numbers or len({str(key) for key in rows}) < len(rows) or len(set(names)) < len(names):
        raise Odd
    columns = _COLUMNS[scope] - {"time", "node", "device", "link", "frame"}
    known = [at for at, name in enumerate(names) if name in columns]
    unknown = [at for at, name in enumerate(names) if name not in columns]
    return _Placed(scope, rows, names, [names[at] for at in known], known, unknown)


def _decode(raw: bytes | memoryview) -> tuple[_Frame, str | None]:
    """Return the frame, and its unknown keys as JSON. Raises Odd, MsgspecError."""
    try:
        return _known_frame_decoder.decode(raw), None
    except msgspec.ValidationError:
        frame = _frame_decoder.decode(raw)
    parts = _map_decoder.decode(raw)
    other = {key: msgspec.msgpack.decode(parts[key]) for key in parts.keys() - set(_Frame.__struct_fields__)}
    return frame, as_json(other)


def _unknown(blocks: list[_Block], placed: list[_Placed]) -> bytes | None:
    """Return the values of the metrics without a column: by block, then metric, then row."""
    if not any(place.unknown for place in placed):
        return None
    return b"".join(
        block.values[8 * at * len(place.keys) : 8 * (at + 1) * len(place.keys)]
        for block, place in zip(blocks, placed, strict=True)
        for at in place.unknown
    )
