"""Reading the journal: what a restart replays, and what queries find in chunks that are in no segment yet."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from eagle_eye.schema.frame import BadFrame, Frame, decode_frame
from eagle_eye.schema.rows import Outline, decode_outline, is_row, outline_of_row, read_row
from eagle_eye.server import database
from eagle_eye.server.clock import Clock
from eagle_eye.server.errors import HistoryUnavailable
from eagle_eye.server.history import LATE_S, Recorded
from eagle_eye.server.journal_chunks import Found, Line, found_in, lines
from eagle_eye.server.journal_schema import UNSEALED

CHUNKS_AT_ONCE = 256  # whose directories are read under one lock, likewise
FRAMES_AT_ONCE = 200  # read under one lock; a longer read would keep the write-ahead log from being reset
OUTLINES_MAX = 4_096  # kept in memory for the next frames
PIN_S_MAX = 3_600.0  # a reader that takes longer no longer keeps chunks from being deleted

T = TypeVar("T")


class Chunk(NamedTuple):
    """A row of the journal without its frames; ``first_s`` and ``last_s`` are corrected times."""

    id: int
    shard: int
    frames: int
    size: int
    received_s: float
    first_s: float
    last_s: float


class JournalReader:
    """One connection that only reads, for any thread."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._connection = database.connect(path)
        self._lock = threading.Lock()
        self._pins: dict[object, float] = {}
        self._outlines: dict[bytes, Outline] = {}

    def replay(self, since_s: float, frames_max: int) -> Iterator[Recorded]:
        """Yield the frames received at ``since_s`` or later, but for the late; of too many, the newest. See History."""
        known = sorted(
            self.read("SELECT id, frames FROM chunks INDEXED BY chunks_of_shard WHERE received_s >= ?", (since_s,))
        )
        surplus = sum(frames for _, frames in known) - frames_max
        newest: dict[str, float] = {}
        for id_, frames in known:
            left_out, surplus = surplus, surplus - frames
            if surplus >= 0:
                continue
            for recorded in self._decode((id_, line) for line in self._lines(id_) if line.received_s >= since_s):
                if left_out > 0:  # of the first chunk only its end
                    left_out -= 1
                    continue
                time_s = recorded.frame.time_s + recorded.offset_s
                newest_s = newest.get(recorded.frame.node, time_s)
                if time_s >= newest_s or recorded.received_s - time_s <= LATE_S:
                    newest[recorded.frame.node] = time_s
                    yield recorded

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Keep the chunks that are here from being deleted while the block reads, for an hour at most."""
        pin = object()
        self._pins[pin] = self._clock.monotonic_s()
        try:
            yield
        finally:
            del self._pins[pin]

    def in_use(self) -> bool:
        """Return whether somebody reads who has not been at it for too long."""
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
                for found in self._found(mine, list(names), start_s, end_s)
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
        return sum(len(found.chunk_ids) for found in self._found(chunks, [id_ for (id_,) in ids], start_s, end_s))

    def read(self, statement: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        """Return all rows. Raises HistoryUnavailable."""
        return self.read_together(lambda reader: reader.execute(statement, values).fetchall())

    def read_together(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return what ``work`` returns, who sees one state of the file. Raises HistoryUnavailable."""
        with self._lock:
            try:
                with database.transaction(self._connection, "DEFERRED"):
                    return work(self._connection)
            except sqlite3.Error as error:
                raise HistoryUnavailable(f"{self._path} cannot be read: {error}") from error

    def outline(self, id_: bytes) -> bytes | None:
        """Return an outline by its id; None: it is not here. Raises HistoryUnavailable."""
        rows = self.read("SELECT raw FROM outlines WHERE id = ?", (id_,))
        return rows[0][0] if rows else None

    def whole(self, raw: bytes) -> Frame:
        """Return a frame that is kept whole or as a row. Raises BadFrame, HistoryUnavailable."""
        if not is_row(raw):
            return decode_frame(raw)
        id_ = outline_of_row(raw)
        outline = self._outlines.get(id_)
        if outline is None:
            encoded = self.outline(id_)
            if encoded is None:
                raise BadFrame("outline", f"the outline {id_.hex()} of a row is not here")
            outline = decode_outline(encoded)[0]
            if len(self._outlines) >= OUTLINES_MAX:
                self._outlines.clear()
            self._outlines[id_] = outline
        return read_row(outline, raw).frame

    def close(self) -> None:
        """Release the file."""
        with self._lock:
            self._connection.close()

    def _found(
        self, chunks: Sequence[Chunk], stream_ids: Sequence[int], start_s: float, end_s: float
    ) -> Iterator[Found]:
        """Yield where the streams' frames of the range are; a chunk that has gone meanwhile has none."""
        for begin in range(0, len(chunks), CHUNKS_AT_ONCE):
            ids = [chunk.id for chunk in chunks[begin : begin + CHUNKS_AT_ONCE]]
            statement = "SELECT id, directory FROM chunks WHERE id IN (SELECT value FROM json_each(?))"
            yield found_in(self.read(statement, (json.dumps(ids),)), stream_ids, start_s, end_s)

    def _lines(self, chunk_id: int) -> list[Line]:
        rows = self.read("SELECT directory FROM chunks WHERE id = ?", (chunk_id,))
        return list(lines(rows[0][0])) if rows else []

    def _decode(self, places: Iterable[tuple[int, Line]]) -> list[Recorded]:
        """Return the frames at the places (chunk and line), but for those that cannot be read."""

        def raws(reader: sqlite3.Connection) -> list[tuple[Line, bytes | None]]:
            found = []
            for chunk_id, line in places:
                row = reader.execute(
                    "SELECT substr(raw, ?, ?) FROM chunks WHERE id = ?", (line.at + 1, line.size, chunk_id)
                ).fetchone()
                found.append((line, row[0] if row else None))
            return found

        decoded = []
        for line, raw in self.read_together(raws):
            if raw is None:
                self._check_retired()
                continue
            try:
                frame = self.whole(raw)
            except BadFrame:
                # Of another wire version, accepted by a server of that version; it was judged then.
                continue
            decoded.append(Recorded(frame, line.received_s, line.offset_s))
        return decoded

    def _check_retired(self) -> None:
        """Return if a chunk can only have gone by retention. Raises HistoryUnavailable."""
        now_s = self._clock.monotonic_s()
        if any(now_s - at_s >= PIN_S_MAX for at_s in self._pins.copy().values()):
            raise HistoryUnavailable(
                f"the frames have moved on: reading took more than {PIN_S_MAX:.0f} s; ask for less at a time"
            )
