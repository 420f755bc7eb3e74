"""What is in the journal's file, and how it is read: tables, chunks of frames, replay after a restart, and queries."""

from __future__ import annotations

import json
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from eagle_eye.schema.frame import BadFrame, Frame, decode_frame
from eagle_eye.schema.rows import RowTemplate, decode_template, is_row, read_row, row_head, template_of_row
from eagle_eye.server.history.history import Recorded, RecordedRow
from eagle_eye.server.model.batch import Batch
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import HistoryUnavailable
from eagle_eye.server.store import database

# A chunk is the frames of one group commit and one shard as one row of the journal, with a directory of its contents.
# One row per frame would cost a page and an index entry each; a fleet sends more than ten thousand frames a second.

# One directory entry: stream id, sequence, corrected time, time of receipt, clock offset, size of the frame.
_LINE = struct.Struct("<iqdddI")
# The same as a numpy dtype, to read a whole directory at once.
DIRECTORY = np.dtype(
    [
        ("stream_id", "<i4"),
        ("sequence", "<i8"),
        ("time_s", "<f8"),
        ("received_s", "<f8"),
        ("offset_s", "<f8"),
        ("size", "<u4"),
    ]
)


INSERT_ROWS_MAX = 1_000  # chunks per statement: SQLite allows 32,766 values
_INSERT = "INSERT INTO chunks (shard, frames, size, received_s, first_s, last_s, directory, raw) VALUES "
_INSERTED_ROW = "(?, ?, ?, ?, ?, ?, ?, ?)"


class Line(NamedTuple):
    """A frame's directory entry; ``time_s`` is the corrected time, ``at`` the offset of its ``size`` bytes."""

    stream_id: int
    sequence: int
    time_s: float
    received_s: float
    offset_s: float
    size: int
    at: int


def chunks_of(
    batch: Batch, stream_ids: Sequence[int], shards: Sequence[int], new: Sequence[bool], bytes_max: int
) -> Iterator[tuple[object, ...]]:
    """Yield a batch's new frames as chunks, with values in the order of the INSERT statement."""
    of_shard = np.fromiter(shards, np.int64, len(shards))
    order = np.argsort(of_shard, kind="stable")
    if False in new:
        order = order[np.array(new)[order]]
    if not len(order):
        return
    raw = batch.raw
    lines = np.empty(len(order), DIRECTORY)
    lines["stream_id"] = np.fromiter(stream_ids, np.int32, len(stream_ids))[order]
    lines["sequence"] = batch.sequence[order]
    lines["offset_s"] = batch.offset_s[order]
    lines["time_s"] = batch.time_s[order] + lines["offset_s"]
    lines["received_s"] = batch.received_s[order]
    if isinstance(raw, np.ndarray):
        lines["size"] = raw.shape[1]
        sorted_raw: Any = raw[order]
    else:
        sorted_raw = [raw[at] for at in order.tolist()]
        lines["size"] = [len(one) for one in sorted_raw]
    ends = np.cumsum(lines["size"], dtype=np.int64)
    sorted_shards = of_shard[order]
    begins = [0, *(np.flatnonzero(np.diff(sorted_shards)) + 1).tolist(), len(order)]
    for begin, end in pairwise(begins):
        first = begin
        while first < end:
            before = int(ends[first - 1]) if first else 0
            last = min(max(int(np.searchsorted(ends, before + bytes_max, "right")), first + 1), end)
            part = slice(first, last)
            times_s, inside = lines["time_s"][part], sorted_raw[part]
            yield (
                int(sorted_shards[first]),
                last - first,
                int(ends[last - 1]) - before,
                float(lines["received_s"][part].max()),
                float(times_s.min()),
                float(times_s.max()),
                lines[part].tobytes(),
                inside.tobytes() if isinstance(inside, np.ndarray) else b"".join(inside),
            )
            first = last


def insert_chunks(writer: sqlite3.Connection, rows: Sequence[tuple[object, ...]]) -> int | None:
    """Write chunks within a transaction; return the last one's id, None if there are none."""
    # As one statement: each statement releases the GIL and waits to get it back.
    last_id: int | None = None
    for first in range(0, len(rows), INSERT_ROWS_MAX):
        part = rows[first : first + INSERT_ROWS_MAX]
        statement = _INSERT + ", ".join([_INSERTED_ROW] * len(part))
        last_id = writer.execute(statement, list(chain.from_iterable(part))).lastrowid
    return last_id


class FoundEntries(NamedTuple):
    """Entries of several chunks' directories; ``at`` is the offset of each frame's bytes in its chunk."""

    chunk_ids: np.ndarray[Any, np.dtype[np.int64]]
    directory: np.ndarray[Any, Any]
    at: np.ndarray[Any, np.dtype[np.int64]]

    def lines(self) -> Iterator[tuple[int, Line]]:
        """Yield the chunk's id and the directory entry of each frame."""
        for id_, line, at in zip(self.chunk_ids.tolist(), self.directory.tolist(), self.at.tolist(), strict=True):
            yield id_, Line._make((*line, at))


NO_ENTRIES = FoundEntries(np.empty(0, np.int64), np.empty(0, DIRECTORY), np.empty(0, np.int64))


def found_in(
    directories: Sequence[tuple[int, bytes]], stream_ids: Sequence[int] | None, start_s: float, end_s: float
) -> FoundEntries:
    """Return the entries of these streams (None: of all) whose corrected time is in the range.

    ``directories`` are (chunk id, bytes).

    A fleet's chunks have hundreds of thousands of entries, of which a chart needs a few.
    """
    directory = np.frombuffer(b"".join(raw for _, raw in directories), DIRECTORY)
    counts = np.array([len(raw) // DIRECTORY.itemsize for _, raw in directories], np.int64)
    chunk_ids = np.repeat(np.array([id_ for id_, _ in directories], np.int64), counts)
    begins = np.concatenate([[0], np.cumsum(directory["size"], dtype=np.int64)])
    at = begins[:-1] - np.repeat(begins[np.cumsum(counts) - counts], counts)
    wanted = (directory["time_s"] >= start_s) & (directory["time_s"] <= end_s)
    if stream_ids is not None:
        wanted &= np.isin(directory["stream_id"], np.array(stream_ids, np.int32))
    return FoundEntries(chunk_ids[wanted], directory[wanted], at[wanted])


def directory_lines(directory: bytes) -> Iterator[Line]:
    """Yield a directory's entries in the order in which the frames arrived."""
    at = 0
    for stream_id, sequence, time_s, received_s, offset_s, size in _LINE.iter_unpack(directory):
        yield Line(stream_id, sequence, time_s, received_s, offset_s, size, at)
        at += size


# The tables of history.db: the journal's chunks, and the manifest of the segments made from them.
# ``streams.sequences`` covers the chunks up to ``noted_id``. ``sealed_id`` of a shard is the last chunk that is in
# segments: chunks and the segments that hold their frames change places in one transaction, so that readers find each
# frame in exactly one of them. ``outlines`` has the templates of the rows in chunks; ``used_s``, some minutes stale, is
# when a row of one last arrived.
MIGRATIONS = (
    """
    CREATE TABLE streams (
        id INTEGER PRIMARY KEY, node TEXT NOT NULL, stream TEXT NOT NULL,
        watermark INTEGER NOT NULL, heard_s REAL NOT NULL, UNIQUE (node, stream));
    CREATE TABLE frames (
        id INTEGER PRIMARY KEY AUTOINCREMENT, stream_id INTEGER NOT NULL, sequence INTEGER NOT NULL,
        received_s REAL NOT NULL, time_s REAL NOT NULL, offset_s REAL NOT NULL, raw BLOB NOT NULL);
    """,
    """
    ALTER TABLE streams RENAME TO earlier_streams;
    ALTER TABLE frames RENAME TO earlier_frames;
    CREATE TABLE journal (id TEXT NOT NULL, noted_id INTEGER NOT NULL);
    INSERT INTO journal (id, noted_id) VALUES (lower(hex(randomblob(8))), 0);
    CREATE TABLE nodes (id INTEGER PRIMARY KEY, node TEXT NOT NULL UNIQUE, shard INTEGER NOT NULL);
    CREATE INDEX nodes_of_shard ON nodes (shard);
    CREATE TABLE streams (
        id INTEGER PRIMARY KEY, node_id INTEGER NOT NULL, stream TEXT NOT NULL,
        sequences BLOB NOT NULL, heard_s REAL NOT NULL, UNIQUE (node_id, stream));
    CREATE TABLE chunks (
        id INTEGER PRIMARY KEY AUTOINCREMENT, shard INTEGER NOT NULL, frames INTEGER NOT NULL, size INTEGER NOT NULL,
        received_s REAL NOT NULL, first_s REAL NOT NULL, last_s REAL NOT NULL,
        directory BLOB NOT NULL, raw BLOB NOT NULL);
    CREATE INDEX chunks_of_shard ON chunks (shard, id, frames, size, received_s, first_s, last_s);
    CREATE TABLE shards (shard INTEGER PRIMARY KEY, sealed_id INTEGER NOT NULL);
    CREATE TABLE segments (
        id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, first_node TEXT NOT NULL,
        last_node TEXT NOT NULL, first_s REAL NOT NULL, last_s REAL NOT NULL, received_s REAL NOT NULL,
        frames INTEGER NOT NULL, bytes INTEGER NOT NULL, problem TEXT);
    CREATE INDEX segments_by_time ON segments (last_s, first_s);
    """,
    """
    CREATE TABLE outlines (id BLOB PRIMARY KEY, raw BLOB NOT NULL, used_s REAL NOT NULL);
    """,
)

# Chunks that are in no segment yet; answered by the index alone, without reading frames.
UNSEALED = (
    "SELECT c.id, c.shard, c.frames, c.size, c.received_s, c.first_s, c.last_s FROM chunks c"
    " LEFT JOIN shards s ON s.shard = c.shard WHERE c.id > coalesce(s.sealed_id, 0)"
)

# When the oldest of them was received, looking only at each shard's first, as ids ascend with receipt. ``UNSEALED``
# would look at each of a large fleet's hundred thousand chunks.
OLDEST_UNSEALED = (
    "SELECT min(received_s) FROM (SELECT (SELECT c.received_s FROM chunks c WHERE c.shard = n.shard"
    " AND c.id > coalesce(s.sealed_id, 0) ORDER BY c.id LIMIT 1) AS received_s"
    " FROM (SELECT DISTINCT shard FROM nodes) n LEFT JOIN shards s ON s.shard = n.shard)"
)

# How much of the file is in use: an upper bound for the frames in no segment.
BYTES_IN_USE = (
    "SELECT (p.page_count - f.freelist_count) * s.page_size"
    " FROM pragma_page_count p, pragma_freelist_count f, pragma_page_size s"
)


def live_bytes(connection: sqlite3.Connection) -> int:
    """Return how many bytes of the file are in use, without free pages, which are reused."""
    return int(connection.execute(BYTES_IN_USE).fetchone()[0])


CHUNKS_AT_ONCE = 256  # directories read under one lock, likewise
REPLAYED_AT_ONCE = 2_048  # in the order of time they lie in many chunks, each of which is opened
FRAMES_AT_ONCE = 200  # read under one lock; a longer read would keep the write-ahead log from being reset
TEMPLATES_MAX = 4_096  # cached for later frames
PIN_S_MAX = 3_600.0  # a reader that takes longer no longer keeps chunks from being deleted

T = TypeVar("T")


class Chunk(NamedTuple):
    """A chunk's metadata without its frames; ``first_s`` and ``last_s`` are corrected times."""

    id: int
    shard: int
    frames: int
    size: int
    received_s: float
    first_s: float
    last_s: float


class JournalReader:
    """One read-only connection, for any thread."""

    def __init__(self, path: Path, clock: Clock, condition: database.DatabaseCondition) -> None:
        self._path = path
        self._condition = condition
        self._clock = clock
        self._connection = database.connect(path)
        self._lock = threading.Lock()
        self._pins: dict[object, float] = {}
        self._templates: dict[bytes, RowTemplate] = {}

    def replay(self, since_s: float, frames_max: int) -> Iterator[Recorded | RecordedRow]:
        """Yield the frames from ``since_s`` on in the order of their times, the newest ``frames_max``; see History."""
        found = self._newest(since_s, frames_max)
        for first in range(0, len(found.chunk_ids), REPLAYED_AT_ONCE):
            part = FoundEntries(*(column[first : first + REPLAYED_AT_ONCE] for column in found))
            for line, raw in self._raws(part.lines()):
                recorded = self._recorded(line, raw, rows=True)
                if recorded is not None:
                    yield recorded

    def _newest(self, since_s: float, frames_max: int) -> FoundEntries:
        """Return the newest entries from a time on, by their times."""
        statement = "SELECT id, last_s FROM chunks INDEXED BY chunks_of_shard WHERE received_s >= ? AND last_s >= ?"
        known = sorted(self.read(statement, (since_s, since_s)), key=lambda chunk: (chunk[1], chunk[0]), reverse=True)
        parts = [NO_ENTRIES]
        for first in range(0, len(known), CHUNKS_AT_ONCE):
            # Chunks with frames that came late reach back far: what follows may be newer than what they begin with.
            last_s = known[first][1]
            if sum(int(np.count_nonzero(part.directory["time_s"] >= last_s)) for part in parts) >= frames_max:
                break
            ids = [id_ for id_, _ in known[first : first + CHUNKS_AT_ONCE]]
            parts.extend(self._found(ids, None, since_s, np.inf))
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        order = np.lexsort((columns[2], columns[0], columns[1]["time_s"]))[-frames_max:]
        return FoundEntries(*(column[order] for column in columns))

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Keep the current chunks from being deleted while the block reads, for an hour at most."""
        pin = object()
        self._pins[pin] = self._clock.monotonic_s()
        try:
            yield
        finally:
            del self._pins[pin]

    def in_use(self) -> bool:
        """Return whether any read is in progress that began within PIN_S_MAX."""
        now_s = self._clock.monotonic_s()
        return any(now_s - at_s < PIN_S_MAX for at_s in self._pins.copy().values())

    def unsealed(self, reader: sqlite3.Connection, nodes: Sequence[str], start_s: float, end_s: float) -> list[Chunk]:
        """Return the chunks in no segment that may hold frames of the nodes (all if empty) in the range."""
        statement = UNSEALED + " AND c.first_s <= ? AND c.last_s >= ?"
        values: tuple[object, ...] = (end_s, start_s)
        if nodes:
            statement += " AND c.shard IN (SELECT shard FROM nodes WHERE node IN (SELECT value FROM json_each(?)))"
            values = (*values, json.dumps(list(nodes)))
        return [Chunk(*row) for row in reader.execute(statement + " ORDER BY c.id", values)]

    def frames(self, chunks: Sequence[Chunk], nodes: Sequence[str], start_s: float, end_s: float) -> Iterator[Recorded]:
        """Yield the chunks' frames of the nodes (all if empty) in the range, by node and then by time."""
        for shard in sorted({chunk.shard for chunk in chunks}):
            names = dict(
                self.read(
                    "SELECT s.id, n.node FROM streams s JOIN nodes n ON n.id = s.node_id WHERE n.shard = ?"
                    " AND (? OR n.node IN (SELECT value FROM json_each(?)))",
                    (shard, not nodes, json.dumps(list(nodes))),
                )
            )
            mine = [chunk for chunk in chunks if chunk.shard == shard]
            wanted = sorted(
                (names[line.stream_id], line.time_s, line.stream_id, line.sequence, chunk_id, line)
                for found in self._found([chunk.id for chunk in mine], list(names), start_s, end_s)
                for chunk_id, line in found.lines()
            )
            for begin in range(0, len(wanted), FRAMES_AT_ONCE):
                part = wanted[begin : begin + FRAMES_AT_ONCE]
                yield from self._decode((chunk_id, line) for *_, chunk_id, line in part)

    def count(self, chunks: Sequence[Chunk], nodes: Sequence[str], start_s: float, end_s: float) -> int:
        """Return how many frames ``frames`` would yield."""
        if not nodes and all(start_s <= chunk.first_s and chunk.last_s <= end_s for chunk in chunks):
            return sum(chunk.frames for chunk in chunks)
        ids = self.read(
            "SELECT s.id FROM streams s JOIN nodes n ON n.id = s.node_id"
            " WHERE ? OR n.node IN (SELECT value FROM json_each(?))",
            (not nodes, json.dumps(list(nodes))),
        )
        chunk_ids, stream_ids = [chunk.id for chunk in chunks], [id_ for (id_,) in ids]
        return sum(len(found.chunk_ids) for found in self._found(chunk_ids, stream_ids, start_s, end_s))

    def read(self, statement: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        """Return all rows. Raises HistoryUnavailable."""
        return self.read_together(lambda reader: reader.execute(statement, values).fetchall())

    def read_together(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of ``work``, run on one consistent snapshot of the file. Raises HistoryUnavailable."""
        with self._lock:
            try:
                with database.transaction(self._connection, "DEFERRED"):
                    return work(self._connection)
            except sqlite3.Error as error:
                self._condition.record_error(error)
                raise HistoryUnavailable(self._condition.damage or f"{self._path} cannot be read: {error}") from error

    def template(self, id_: bytes) -> bytes | None:
        """Return a template by its id; None if it is not here. Raises HistoryUnavailable."""
        rows = self.read("SELECT raw FROM outlines WHERE id = ?", (id_,))
        return rows[0][0] if rows else None

    def whole(self, raw: bytes) -> Frame:
        """Decode a frame that is stored whole or as a row. Raises BadFrame, HistoryUnavailable."""
        if not is_row(raw):
            return decode_frame(raw)
        id_ = template_of_row(raw)
        template = self._templates.get(id_)
        if template is None:
            encoded = self.template(id_)
            if encoded is None:
                raise BadFrame("outline", f"the template {id_.hex()} of a row is not here")
            template = decode_template(encoded)[0]
            if len(self._templates) >= TEMPLATES_MAX:
                self._templates.clear()
            self._templates[id_] = template
        return read_row(template, raw).frame

    def close(self) -> None:
        """Release the file."""
        with self._lock:
            self._connection.close()

    def _found(
        self, chunk_ids: Sequence[int], stream_ids: Sequence[int] | None, start_s: float, end_s: float
    ) -> Iterator[FoundEntries]:
        """Yield the directory entries of the streams' frames (None: of all) in the range.

        Chunks deleted meanwhile have none.
        """
        for begin in range(0, len(chunk_ids), CHUNKS_AT_ONCE):
            ids = chunk_ids[begin : begin + CHUNKS_AT_ONCE]
            statement = "SELECT id, directory FROM chunks WHERE id IN (SELECT value FROM json_each(?))"
            rows = self.read(statement, (json.dumps(ids),))
            with self._telling_damage():
                found = found_in(rows, stream_ids, start_s, end_s)
            yield found

    @contextmanager
    def _telling_damage(self) -> Iterator[None]:
        try:
            yield
        except (struct.error, ValueError, IndexError) as error:
            self._condition.note_damage(f"the directory of a chunk cannot be read: {error}")
            raise HistoryUnavailable(self._condition.damage) from error

    def _decode(self, places: Iterable[tuple[int, Line]]) -> list[Recorded]:
        """Return the frames at these (chunk, entry) places, without those that cannot be decoded."""
        found = (self._recorded(line, raw) for line, raw in self._raws(places))
        return [recorded for recorded in found if isinstance(recorded, Recorded)]

    def _recorded(self, line: Line, raw: bytes, *, rows: bool = False) -> Recorded | RecordedRow | None:
        """Return the frame, or with ``rows`` an undecoded row of numbers alone; None if of another wire version.

        A server of that version accepted it, and evaluated it then.
        """
        try:
            if rows and is_row(raw) and not row_head(raw).tail_bytes:
                return RecordedRow(raw, line.received_s, line.offset_s)
            return Recorded(self.whole(raw), line.received_s, line.offset_s)
        except BadFrame:
            return None

    def _raws(self, places: Iterable[tuple[int, Line]]) -> list[tuple[Line, bytes]]:
        """Return the bytes at these (chunk, entry) places, without those that retention deleted meanwhile."""

        def read(reader: sqlite3.Connection) -> list[tuple[Line, bytes | None]]:
            found = []
            with ExitStack() as opened:
                blobs: dict[int, sqlite3.Blob | None] = {}  # an open blob knows its pages: substr() reads all of them
                for chunk_id, line in places:
                    if chunk_id not in blobs:
                        here = reader.execute("SELECT 1 FROM chunks WHERE id = ?", (chunk_id,)).fetchone()
                        blobs[chunk_id] = here and opened.enter_context(
                            reader.blobopen("chunks", "raw", chunk_id, readonly=True)
                        )
                    blob = blobs[chunk_id]
                    if blob is not None:
                        blob.seek(line.at)
                    found.append((line, None if blob is None else blob.read(line.size)))
            return found

        with self._telling_damage():
            found = self.read_together(read)
        raws = [(line, raw) for line, raw in found if raw is not None]
        if len(raws) < len(found):
            self._check_retired()
        return raws

    def _check_retired(self) -> None:
        """Raise HistoryUnavailable if a read lasted so long that its chunks may have been deleted."""
        now_s = self._clock.monotonic_s()
        if any(now_s - at_s >= PIN_S_MAX for at_s in self._pins.copy().values()):
            raise HistoryUnavailable(
                f"the frames have moved on: reading took more than {PIN_S_MAX:.0f} s; ask for less at a time"
            )
