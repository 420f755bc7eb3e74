"""The compactor: writes sealed stretches of the journal as segments, in a process of its own.

``python -m eagle_eye.server.history.compactor JOURNAL FOLDER THROUGH [SHARD...]`` compacts the chunks of these node
groups (default: all) that are in no segment yet, up to chunk THROUGH, group by group, and reports what is on disk as
JSON lines on standard output. It does not change the journal: the server does, line by line. As a separate process it
takes no CPU core from clients waiting for the server.

A stretch is read into arrays, sorted by node and time. A row group of it becomes tables in bulk where its frames are
rows with templates, and fastest where no node changed its layout; else frame by frame (``segment_tables.Columns``).
"""

from __future__ import annotations

import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from eagle_eye.schema.frame import BadFrame, encode_frame
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.record_types import prepare_record_types
from eagle_eye.schema.rows import ID_BYTES, ROW_HEAD, VERSION, decode_tail, decode_template, ranks_of, whole_frame
from eagle_eye.server.history.history import LATE_S
from eagle_eye.server.history.journal_reader import DIRECTORY, UNSEALED
from eagle_eye.server.history.minutes import MinutesWriter
from eagle_eye.server.history.processes import settle
from eagle_eye.server.history.segment_files import SegmentWriter
from eagle_eye.server.history.segment_tables import (
    FRAMES_SCHEMA,
    LINKS_SCHEMA,
    MINUTES_FOLDER,
    SAMPLES_SCHEMA,
    STRETCH_BYTES_MAX,
    Columns,
    Facts,
    Floats,
    Integers,
    JournaledFrame,
    MinutesFacts,
    Numbers,
    Odd,
    Rows,
    Sealed,
    Step,
    Tables,
    as_json,
    column,
    no_step,
    plain,
    rows_table,
    texts,
)
from eagle_eye.server.model.batch import ColumnLayout, Part, ResolvedTemplate
from eagle_eye.server.model.errors import in_words

GROUP_FRAMES = 2_048  # frames per row group: the least that a query of one node reads
SAMPLES, SAMPLE_FRAMES = 8, 128

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Gathered(NamedTuple):
    """Frames sorted by node and then time, one per element of the arrays; ``time_s`` is the corrected time.

    ``node`` and ``stream`` are indexes into ``names`` and ``streams``; node indexes sort as the names do. ``raw`` has
    room for one more row head after the last frame.
    """

    raw: Bytes
    names: list[str]
    streams: list[str]
    at: Integers
    size: Integers
    node: Integers
    stream: Integers
    time_s: Floats
    sequence: Integers
    received_s: Floats
    offset_s: Floats

    @property
    def frames(self) -> int:
        """Number of frames."""
        return len(self.at)

    def of(self, chosen: Any) -> Gathered:
        """Return a subset of the frames."""
        return Gathered(*self[:3], *(array[chosen] for array in self[3:]))

    def bytes_of(self, place: int) -> bytes:
        """Return one frame's bytes."""
        at = int(self.at[place])
        return self.raw[at : at + int(self.size[place])].tobytes()

    def parts(self, skipped: int, size: int) -> Bytes:
        """Return ``size`` bytes of each frame after skipping ``skipped``: (frames, size)."""
        if size == 0:
            return np.empty((len(self.at), 0), dtype=np.uint8)
        # A view with an item beginning at each byte of the buffer: indexing it copies all parts in one operation.
        items = np.ndarray((len(self.raw) - size + 1,), f"V{size}", self.raw, strides=(1,))
        return items[self.at + skipped].view(np.uint8).reshape(len(self.at), size)

    def sample(self) -> Gathered:
        """Return a sample: a few minutes of frames of some nodes."""
        begins = np.linspace(0, max(self.frames - SAMPLE_FRAMES, 0), SAMPLES, dtype=np.int64)
        places = np.unique(begins[:, None] + np.arange(SAMPLE_FRAMES))
        return self.of(places[places < self.frames])

    def kept(self) -> list[JournaledFrame]:
        """Return the frames one by one."""
        return [
            JournaledFrame(
                self.names[int(self.node[place])],
                float(self.time_s[place]),
                self.streams[int(self.stream[place])],
                int(self.sequence[place]),
                float(self.received_s[place]),
                float(self.offset_s[place]),
                self.bytes_of(place),
            )
            for place in range(self.frames)
        ]

    def groups(self) -> Iterator[tuple[int, Gathered]]:
        """Yield frames in row groups of whole nodes; only a node larger than a row group is split."""
        begins = np.flatnonzero(np.r_[True, self.node[1:] != self.node[:-1]])
        first = 0
        while first < self.frames:
            end = min(first + GROUP_FRAMES, self.frames)
            if end < self.frames:
                begin = int(begins[np.searchsorted(begins, end, side="right") - 1])
                end = begin if begin > first else end
            yield first, self.of(slice(first, end))
            first = end


class Gatherer:
    """Reads stretches of the journal, one after the other, into the same memory."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._room = np.empty(0, dtype=np.uint8)

    def gather(self, shard: int, chunks: Sequence[int], size: int) -> tuple[Gathered, Gathered]:
        """Return the chunks' late frames and the others; both are valid until the next call.

        All frames together have ``size`` bytes, or less if retention deleted some meanwhile.

        Late frames come from outages; among the others they would make every segment appear as long as the outage.
        """
        known: list[tuple[int, str, str]] = self._connection.execute(
            "SELECT s.id, n.node, s.stream FROM streams s JOIN nodes n ON n.id = s.node_id"
            " WHERE n.shard = ? ORDER BY s.id",
            (shard,),
        ).fetchall()
        ids = np.array([id_ for id_, _, _ in known], dtype=np.int64)
        names = sorted({node for _, node, _ in known})
        place_of = {node: place for place, node in enumerate(names)}
        nodes = np.array([place_of[node] for _, node, _ in known], dtype=np.int64)
        lines, raw = self._read(chunks, size)
        sizes = lines["size"].astype(np.int64)
        at = np.cumsum(sizes) - sizes
        begin_s = float(lines["received_s"][0]) if len(lines) else 0.0
        stream = np.minimum(np.searchsorted(ids, lines["stream_id"]), max(len(ids) - 1, 0))
        # A stream unheard for so long that it was forgotten no longer has a name.
        named = np.flatnonzero(ids[stream] == lines["stream_id"]) if len(ids) else np.empty(0, dtype=np.int64)
        stream, lines = stream[named], lines[named]
        order = _order(nodes[stream], lines["time_s"], stream, lines["sequence"])
        stream, lines = stream[order], lines[order]
        frames = Gathered(
            raw,
            names,
            [name for _, _, name in known],
            at[named][order],
            sizes[named][order],
            nodes[stream],
            stream,
            lines["time_s"].copy(),
            lines["sequence"].astype(np.int64),
            lines["received_s"].copy(),
            lines["offset_s"].copy(),
        )
        late = frames.time_s < begin_s - LATE_S
        return (frames.of(late), frames.of(~late)) if late.any() else (frames.of(slice(0)), frames)

    def _read(self, chunks: Sequence[int], size: int) -> tuple[Any, Bytes]:
        """Return the chunks' directories as one, and the concatenated bytes of their frames."""
        if size + ROW_HEAD.size > len(self._room):
            self._room = np.empty(size + ROW_HEAD.size, dtype=np.uint8)
        directories: list[bytes] = []
        end = 0
        for chunk in chunks:
            row = self._connection.execute("SELECT directory, raw FROM chunks WHERE id = ?", (chunk,)).fetchone()
            if row is None:
                continue  # deleted by retention meanwhile
            directory, raw = row
            self._room[end : end + len(raw)] = np.frombuffer(raw, np.uint8)
            directories.append(directory)
            end += len(raw)
        return np.frombuffer(b"".join(directories), DIRECTORY), self._room[: end + ROW_HEAD.size]


def _order(node: Integers, time_s: Floats, stream: Integers, sequence: Integers) -> Integers:
    """Return the order of frames by node, time, stream and sequence."""
    if len(node) == 0:
        return np.empty(0, dtype=np.int64)
    # A node's frames mostly arrive in order of time; sorting 16-bit keys is several times faster than wider ones.
    order: Integers = np.argsort(node.astype(np.uint16) if node.max() < 1 << 16 else node, kind="stable")
    times_s, nodes = time_s[order], node[order]
    if ((nodes[1:] == nodes[:-1]) & (times_s[1:] <= times_s[:-1])).any():
        order = np.lexsort((sequence, stream, time_s, node))
    return order


# The fast path to a row group's columns, for nodes that kept a single layout throughout. Ordered by node, key and time,
# each number's destination follows from the position of its frame: nothing is sorted, and each number is copied once.
# Anything less regular takes the general path (``segment_tables.Rows``) to the same table.

_Place = slice | list[int]


class RowRun(NamedTuple):
    """Frames ``low`` to before ``high``, of ``nodes`` consecutive nodes, equally many of each, in one layout."""

    low: int
    high: int
    nodes: int
    layout: int


class _Piece(NamedTuple):
    """A run's rows of one table, from row ``begin`` (nodes, keys, frames per node), and where its metrics are."""

    run: RowRun
    begin: int
    keys: Sequence[int | str]
    metrics: list[tuple[str, _Place, Numbers]]  # name, index among the keys, (nodes, frames per node, its keys)

    def of(self, cells: Any) -> Any:
        """Return the piece's part of a column."""
        each = (self.run.high - self.run.low) // self.run.nodes
        end = self.begin + (self.run.high - self.run.low) * len(self.keys)
        return cells[self.begin : end].reshape(self.run.nodes, len(self.keys), each)


def constant_layout_runs(node: Integers, layout: Integers) -> list[RowRun] | None:
    """Return the runs of frames sorted by node and time; None if a node changed its layout."""
    changed = node[1:] != node[:-1]
    if (~changed & (layout[1:] != layout[:-1])).any():
        return None
    begins = np.flatnonzero(np.append(True, changed))
    counts, of = np.diff(begins, append=len(node)), layout[begins]
    firsts = np.flatnonzero(np.append(True, (counts[1:] != counts[:-1]) | (of[1:] != of[:-1])))
    lows = [*begins[firsts].tolist(), len(node)]
    nodes = np.diff(firsts, append=len(begins)).tolist()
    return [
        RowRun(low, high, number, place)
        for low, high, number, place in zip(lows, lows[1:], nodes, of[firsts].tolist(), strict=False)
    ]


def constant_layout_tables(
    frames: Gathered, runs: Sequence[RowRun], layouts: Sequence[ColumnLayout], first: int
) -> tuple[pa.Table | None, pa.Table | None]:
    """Return the rows of devices and nodes, and those of links; ``first`` is the first frame's number.

    No key may be in two tables of a layout.
    """
    samples, links = _ConstantLayoutTable(), _ConstantLayoutTable()
    for run in runs:
        layout = layouts[run.layout]
        numbers = frames.of(slice(run.low, run.high)).parts(ROW_HEAD.size, layout.size)
        by_table = {True: links, False: samples}
        for linked, table in by_table.items():
            table.add(run, [part for part in layout.parts if (part.scope is Scope.LINK) is linked], numbers)
    return samples.table(SAMPLES_SCHEMA, "device", frames, first), links.table(LINKS_SCHEMA, "link", frames, first)


class _ConstantLayoutTable:
    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._length = 0

    def add(self, run: RowRun, parts: Sequence[Part], numbers: Any) -> None:
        """Add the parts of a run's frames; ``numbers`` are their bytes: (frames, bytes)."""
        keys = sorted({key for part in parts for key in part.keys}, key=lambda key: (isinstance(key, str), key))
        if keys:
            metrics = [metric for part in parts for metric in _piece_metrics(part, keys, numbers, run)]
            self._pieces.append(_Piece(run, self._length, keys, metrics))
            self._length += len(keys) * (run.high - run.low)

    def table(self, schema: pa.Schema, key: str, frames: Gathered, first: int) -> pa.Table | None:
        """Return the rows; None if there are none."""
        if self._length == 0:
            return None
        number = np.empty(self._length, dtype=np.int32)
        names = sorted({key for piece in self._pieces for key in piece.keys})
        place_of = {name: place for place, name in enumerate(names)}
        keyed = np.empty(self._length, dtype=np.int64)
        for piece in self._pieces:
            run = piece.run
            piece.of(number)[...] = np.arange(run.low, run.high).reshape(run.nodes, 1, -1)
            places = [place_of[name] if key == "link" else name for name in piece.keys]
            piece.of(keyed)[...] = np.array(places, dtype=np.int64)[:, None]
        columns = {
            "time": plain(frames.time_s[number], pa.float64()),
            "node": texts(frames.node[number], frames.names),
            key: texts(keyed, list(map(str, names))) if key == "link" else plain(keyed.astype(np.int16), pa.int16()),
            "frame": plain(number + np.int32(first), pa.int32()),
        }
        covered: dict[str, int] = {}
        for piece in self._pieces:
            for name, _, values in piece.metrics:
                covered[name] = covered.get(name, 0) + values.size
        cells = {
            name: np.empty(self._length, schema.field(name).type.to_pandas_dtype())
            if count == self._length
            else np.full(self._length, np.nan, schema.field(name).type.to_pandas_dtype())
            for name, count in covered.items()
        }
        with np.errstate(over="ignore"):  # beyond float32 is infinite
            for piece in self._pieces:
                for name, at, values in piece.metrics:
                    piece.of(cells[name])[:, at] = values.transpose(0, 2, 1)
        found = {name: column(values, schema.field(name)) for name, values in cells.items()}
        return rows_table(schema, {**columns, **found}, self._length)


def _piece_metrics(
    part: Part, keys: Sequence[int | str], numbers: Any, run: RowRun
) -> Iterator[tuple[str, _Place, Numbers]]:
    width = np.dtype(part.dtype).itemsize * len(part.metrics) * len(part.keys)
    values = numbers[:, part.begin : part.begin + width].view(part.dtype)
    values = values.reshape(run.nodes, -1, len(part.metrics), len(part.keys))
    at = [keys.index(key) for key in part.keys]
    place: _Place = slice(at[0], at[-1] + 1) if at == list(range(at[0], at[-1] + 1)) else at
    for number, name in enumerate(part.metrics):
        yield name, place, values[:, :, number, :]


# Tables of a row group: rows with templates in bulk, other frames one by one

TEMPLATES_MAX = 32_768  # cached for later groups

# The columns of frames.parquet that are determined by the template.
_SAID = ("boot_id", "agent_version", "job", "ranks", "collectors", "dropped", "layout")
_HEAD = np.dtype([("version", "u1", 4), ("tail", "<u4"), ("id", "V16"), ("sequence", "<u8"), ("time_s", "<f8")])


class _ReadTemplate:
    """A template and the columns common to its frames' rows."""

    __slots__ = ("layout", "resolved", "said")

    def __init__(self, raw: bytes) -> None:
        self.resolved = ResolvedTemplate(*decode_template(raw))
        self.layout: ColumnLayout | None = self.resolved.layout
        template = self.resolved.template
        scopes = {block.scope for block in template.blocks}
        if len(scopes) < len(template.blocks):
            self.layout = None  # two tables of one scope: columns cannot hold that
        self.said = (
            template.boot_id,
            template.agent_version,
            template.job,
            _json(template.ranks),
            _json(template.collectors),
            _json(template.dropped),
            _json([[block.scope.value, block.keys, block.metrics] for block in template.blocks]),
        )


class GroupTables:
    """Builds tables of groups; reads templates from the journal and caches them."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._columns = Columns()
        self._templates: dict[bytes, _ReadTemplate | None] = {}

    def of(self, frames: Gathered, first: int) -> Tables:
        """Return the frames of a group as one row group; ``first`` is the first one's number."""
        heads = frames.parts(0, ROW_HEAD.size).view(_HEAD)[:, 0]
        ids, of = _templates_of(heads, frames.size)
        read = [self._template(id_) for id_ in ids]
        known = [one for one in read if one is not None and one.layout is not None]
        if len(known) == len(read):
            try:
                return self._of_rows(frames, heads, of, known, first)
            except (Odd, BadFrame):
                pass  # at least one of them cannot be held by columns
        whole = [self._whole(kept, read[place]) for kept, place in zip(frames.kept(), of.tolist(), strict=True)]
        return self._columns.tables(whole, first)

    def _of_rows(self, frames: Gathered, heads: Any, of: Integers, read: list[_ReadTemplate], first: int) -> Tables:
        """Return frames that are all rows as tables; ``of`` maps each to its template. Raises Odd, BadFrame."""
        rows_bytes = np.array([ROW_HEAD.size + one.resolved.size for one in read])
        if (frames.size != rows_bytes[of] + heads["tail"]).any():
            raise Odd
        said = {name: texts(of, [one.said[number] for one in read]) for number, name in enumerate(_SAID)}
        said["interval"] = plain(np.array([one.resolved.template.interval_s for one in read])[of], pa.float64())
        events: list[str | None] = [None] * frames.frames
        self._read_tails(frames, heads["tail"], of, read, said, events)
        cells = {
            **said,
            "time": plain(frames.time_s, pa.float64()),
            "node": texts(frames.node, frames.names),
            "stream": texts(frames.stream, frames.streams),
            "sequence": plain(frames.sequence, pa.int64()),
            "received": plain(frames.received_s, pa.float64()),
            "node_time": plain(heads["time_s"].copy(), pa.float64()),
            "clock_offset": plain(frames.offset_s, pa.float64()),
            "events": pa.array(events, pa.string()),
        }
        samples, links = self._rows(frames, of, read, first)
        return Tables(rows_table(FRAMES_SCHEMA, cells, frames.frames), samples, links)

    @staticmethod
    def _rows(
        frames: Gathered, of: Integers, read: list[_ReadTemplate], first: int
    ) -> tuple[pa.Table | None, pa.Table | None]:
        numbers: dict[ColumnLayout, int] = {}
        for one in read:
            assert one.layout is not None  # noqa: S101 - checked by the caller
            numbers.setdefault(one.layout, len(numbers))
        layouts = list(numbers)
        own = np.array([numbers[one.layout] for one in read if one.layout is not None])[of]
        runs = constant_layout_runs(frames.node, own)
        if runs is not None and not any(map(_has_twins, layouts)):
            return constant_layout_tables(frames, runs, layouts, first)
        samples, links = Rows("device"), Rows("link")
        for number, layout in enumerate(layouts):
            chosen = np.flatnonzero(own == number)
            matrix = frames.of(chosen).parts(ROW_HEAD.size, layout.size)
            tables: dict[Scope, tuple[tuple[int | str, ...], dict[str, Any]]] = {}
            for part in layout.parts:
                _, columns = tables.setdefault(part.scope, (part.keys, {}))
                values = layout.values(part, matrix)
                columns.update((name, values[:, at, :]) for at, name in enumerate(part.metrics))
            for scope, (keys, columns) in tables.items():
                (links if scope is Scope.LINK else samples).add_all(chosen, keys, columns)
        return (
            samples.table(SAMPLES_SCHEMA, first, frames.time_s, frames.node, frames.names),
            links.table(LINKS_SCHEMA, first, frames.time_s, frames.node, frames.names),
        )

    @staticmethod
    def _read_tails(
        frames: Gathered,
        sizes: Any,
        of: Integers,
        read: list[_ReadTemplate],
        said: dict[str, Any],
        events: list[str | None],
    ) -> None:
        """Put the contents of rows' tails into the columns."""
        with_tail = np.flatnonzero(sizes).tolist()
        if not with_tail:
            return
        ranks = said["ranks"].to_pylist()
        for place in with_tail:
            template = read[int(of[place])].resolved.template
            row = frames.bytes_of(place)
            tail = decode_tail(template, row[len(row) - int(sizes[place]) :])
            if tail.events:
                events[place] = _json(tail.events)
            if tail.silent_s:
                ranks[place] = _json(ranks_of(template, tail))
        said["ranks"] = pa.array(ranks, pa.string())

    def _template(self, id_: bytes) -> _ReadTemplate | None:
        if id_ and id_ not in self._templates:
            row = self._connection.execute("SELECT raw FROM outlines WHERE id = ?", (id_,)).fetchone()
            if len(self._templates) >= TEMPLATES_MAX:
                self._templates.clear()
            try:
                self._templates[id_] = None if row is None else _ReadTemplate(row[0])
            except (BadFrame, Odd):
                self._templates[id_] = None
        return self._templates[id_] if id_ else None

    @staticmethod
    def _whole(kept: JournaledFrame, read: _ReadTemplate | None) -> JournaledFrame:
        """Return a row as the equivalent whole frame; one that cannot be decoded stays as it is."""
        if read is None:
            return kept
        try:
            return kept._replace(raw=encode_frame(whole_frame(read.resolved.template, bytes(kept.raw))))
        except BadFrame:
            return kept


def _templates_of(heads: Any, sizes: Integers) -> tuple[list[bytes], Integers]:
    """Return the template ids that the frames' heads name, and each frame's index among them; b"" if it is no row."""
    ids = heads["id"].copy()
    ids[(heads["version"][:, 0] != VERSION) | (sizes < ROW_HEAD.size)] = b""
    halves = ids.view("<u8").reshape(-1, 2)
    begins = np.flatnonzero(np.append(True, (halves[1:] != halves[:-1]).any(axis=1)))
    places: dict[bytes, int] = {}
    of = [places.setdefault(ids[begin].tobytes(), len(places)) for begin in begins.tolist()]
    nothing = bytes(ID_BYTES)
    return (
        [b"" if id_ == nothing else id_ for id_ in places],
        np.repeat(np.array(of, dtype=np.int64), np.diff(begins, append=len(ids))),
    )


def _has_twins(layout: ColumnLayout) -> bool:
    """Return whether two rows of a frame have the same key."""
    keys = {part.scope: part.keys for part in layout.parts}
    of_links = keys.pop(Scope.LINK, ())
    of_samples = [key for own in keys.values() for key in own]
    return len(set(of_links)) < len(of_links) or len(set(of_samples)) < len(of_samples)


def _json(value: Any) -> str:
    return as_json(msgspec.to_builtins(value))


NICENESS = 10  # yields to the server and all other processes
BUSY_S = 5.0


class _Stretch(NamedTuple):
    shard: int
    chunks: list[int]
    size: int  # of their frames, in bytes


def compact(
    journal: Path,
    folder: Path,
    through: int,
    done: Callable[[Sealed], None],
    step: Step = no_step,
    shards: Sequence[int] = (),
) -> None:
    """Write the segments of the groups' stretches (all if empty) up to chunk ``through``.

    ``done`` is called with each stretch once it is on disk.
    """
    connection = sqlite3.connect(f"file:{journal}?mode=ro", uri=True, timeout=BUSY_S, isolation_level=None)
    try:
        (journal_id,) = connection.execute("SELECT id FROM journal").fetchone()
        tables_of = GroupTables(connection).of
        gatherer = Gatherer(connection)
        for stretch in _stretches(connection, through):
            if shards and stretch.shard not in shards:
                continue
            late, timely = gatherer.gather(*stretch)
            written = [
                _write(folder, journal_id, stretch, frames, frames is late, tables_of, step)
                for frames in (timely, late)
                if frames.frames
            ]
            done(Sealed(stretch.shard, stretch.chunks[-1], [raw for raw, _ in written], [own for _, own in written]))
            step("announced")
    finally:
        connection.close()


def _stretches(connection: sqlite3.Connection, through: int) -> list[_Stretch]:
    found: list[_Stretch] = []
    rows = connection.execute(
        f"SELECT shard, id, size FROM ({UNSEALED}) WHERE id <= ? ORDER BY shard, id",  # noqa: S608 - a constant
        (through,),
    )
    for shard, chunk, bytes_ in rows:
        if not found or found[-1].shard != shard or found[-1].size + bytes_ > STRETCH_BYTES_MAX:
            found.append(_Stretch(shard, [], 0))
        found[-1] = found[-1]._replace(size=found[-1].size + bytes_)
        found[-1].chunks.append(chunk)
    return found


def _write(
    folder: Path,
    journal_id: str,
    stretch: _Stretch,
    frames: Gathered,
    late: bool,
    tables_of: Callable[[Gathered, int], Tables],
    step: Step,
) -> tuple[Facts, MinutesFacts]:
    first_s = float(frames.time_s.min())
    facts = Facts(
        name=f"{int(first_s)}-{stretch.shard}-{token_hex(4)}",
        journal=journal_id,
        shard=stretch.shard,
        first_chunk=stretch.chunks[0],
        last_chunk=stretch.chunks[-1],
        late=late,
        first_node=frames.names[int(frames.node[0])],
        last_node=frames.names[int(frames.node[-1])],
        first_s=first_s,
        last_s=float(frames.time_s.max()),
        received_s=float(frames.received_s.max()),
        frames=frames.frames,
        bytes=0,
    )
    writer = SegmentWriter(folder, facts.name, step, tables_of(frames.sample(), 0))
    minutes = MinutesWriter(folder.parent / MINUTES_FOLDER, facts.name, step)
    try:
        for first, group in frames.groups():
            tables = tables_of(group, first)
            writer.write(tables)
            minutes.add(tables, first)
        return writer.finish(facts), minutes.finish(facts)
    except BaseException:
        writer.discard()
        minutes.discard()
        shutil.rmtree(folder / facts.name, ignore_errors=True)  # written, but its minutes could not be
        raise


def main(arguments: Sequence[str]) -> int:
    """Compact; return 0 when nothing is left, 1 on failure, with the reason on standard error."""
    journal, folder, through, *shards = arguments
    settle(NICENESS)

    def tell(sealed: Sealed) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(sealed) + b"\n")
        sys.stdout.buffer.flush()

    try:
        compact(Path(journal), Path(folder), int(through), tell, shards=[int(shard) for shard in shards])
    except (OSError, sqlite3.Error, pa.ArrowException) as error:
        sys.stderr.write(f"{in_words(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    prepare_record_types()
    sys.exit(main(sys.argv[1:]))
