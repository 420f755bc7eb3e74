"""Reads the journal: replay after a restart, and queries of chunks that are in no segment yet."""

from __future__ import annotations

import json
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from eagle_eye.schema.frame import BadFrame, Frame, decode_frame
from eagle_eye.schema.rows import RowTemplate, decode_template, is_row, read_row, row_head, template_of_row
from eagle_eye.server.history.history import Recorded, RecordedRow
from eagle_eye.server.history.journal_chunks import NO_ENTRIES, FoundEntries, Line, found_in
from eagle_eye.server.history.journal_schema import UNSEALED
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import HistoryUnavailable
from eagle_eye.server.store import database

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
                self._condition.note(error)
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
