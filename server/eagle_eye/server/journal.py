"""The history in one SQLite file of raw frames, written by one thread in group commits."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from eagle_eye.schema.frame import BadFrame, decode_frame
from eagle_eye.server import database
from eagle_eye.server.clock import Clock
from eagle_eye.server.config import HistorySettings
from eagle_eye.server.errors import HistoryBusy, HistoryUnavailable
from eagle_eye.server.history import LATE_S, Appended, Batch, Recorded, StreamInfo

COMMIT_ENTRIES_MAX = 20_000  # frames in one transaction: bounds how long the first of them waits
IDLE_S = 1.0  # how often an idle writer looks whether a failed disk works again
RETENTION_S = 30.0  # how often old frames are looked for
DELETE_BATCH = 500  # frames deleted in one transaction; new frames wait for no more
READ_CHUNK = 500  # frames read in one statement; a longer one would keep the write-ahead log from being reset
STREAMS_CACHED_MAX = 50_000  # streams kept in memory: a large fleet's; an outage leaves each node some for each minute

_MIGRATIONS = (
    """
    CREATE TABLE streams (
        id INTEGER PRIMARY KEY, node TEXT NOT NULL, stream TEXT NOT NULL,
        watermark INTEGER NOT NULL, heard_s REAL NOT NULL, UNIQUE (node, stream));
    CREATE TABLE frames (
        id INTEGER PRIMARY KEY AUTOINCREMENT, stream_id INTEGER NOT NULL, sequence INTEGER NOT NULL,
        received_s REAL NOT NULL, time_s REAL NOT NULL, offset_s REAL NOT NULL, raw BLOB NOT NULL);
    CREATE UNIQUE INDEX frames_identity ON frames (stream_id, sequence);
    CREATE INDEX frames_time ON frames (stream_id, time_s);
    CREATE INDEX frames_received ON frames (received_s);
    """,
)


class Journal:
    """A History in ``path``. ``time_s`` of a row is the corrected time, by the server's clock."""

    def __init__(self, path: Path, settings: HistorySettings, pending_bytes_max: int, clock: Clock) -> None:
        self._settings = settings
        self._pending_bytes_max = pending_bytes_max
        self._clock = clock
        self._path = path
        self._writer = database.connect(path)
        database.migrate(self._writer, _MIGRATIONS, path)
        self._reader = database.connect(path)
        self._read_lock = threading.Lock()
        self._waiting: deque[tuple[Batch, Future[Appended]]] = deque()
        self._waiting_bytes = 0
        self._wake = threading.Condition()
        self._closing = False
        self._problem: str | None = None
        self._streams: dict[tuple[str, str], tuple[int, int]] = {}  # id and watermark of those heard of lately
        self._retained_at_s = clock.monotonic_s()
        self.dropped_by_retention = 0
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        """How many bytes of frames wait for the disk."""
        return self._waiting_bytes

    def submit(self, batch: Batch) -> Future[Appended]:
        """Return a future that is done once the batch is durable. Raises HistoryBusy, HistoryUnavailable."""
        size = _size(batch)
        with self._wake:
            if self._closing or not self._thread.is_alive():
                raise HistoryUnavailable("the history is closed; the server is stopping")
            if self._waiting and self._waiting_bytes + size > self._pending_bytes_max:
                raise HistoryBusy(
                    f"{self._waiting_bytes} bytes of frames wait for the disk, at most {self._pending_bytes_max}"
                    " may; send again later (ingest.pending_bytes_max)"
                )
            future: Future[Appended] = Future()
            self._waiting.append((batch, future))
            self._waiting_bytes += size
            self._wake.notify()
        return future

    def replay(self, since_s: float, frames_max: int) -> Iterator[Recorded]:
        """Yield the frames received at ``since_s`` or later, but for the late; of too many, the newest. See History."""
        with self._read_lock:
            low, high = self._reader.execute(
                "SELECT (SELECT id FROM frames WHERE received_s >= ? ORDER BY received_s, id LIMIT 1),"
                " (SELECT max(id) FROM frames)",
                (since_s,),
            ).fetchone()
        if low is None:
            return
        position = max(low, high - frames_max + 1) - 1
        newest: dict[str, float] = {}
        while True:
            rows = self._read(
                "SELECT id, raw, received_s, offset_s FROM frames WHERE id > ? AND id <= ? ORDER BY id LIMIT ?",
                (position, high, READ_CHUNK),
            )
            if not rows:
                return
            position = rows[-1][0]
            for recorded in _decoded(row[1:] for row in rows):
                time_s = recorded.frame.time_s + recorded.offset_s
                newest_s = newest.get(recorded.frame.node, time_s)
                if time_s >= newest_s or recorded.received_s - time_s <= LATE_S:
                    newest[recorded.frame.node] = time_s
                    yield recorded

    def query(self, nodes: Sequence[str], start_s: float, end_s: float) -> Iterator[Recorded]:
        """Yield the nodes' frames (all if empty) whose corrected time is in the range; see History."""
        for stream_id in self._stream_ids(nodes, start_s, end_s):
            after = (start_s, -1)
            while True:
                rows = self._read(
                    "SELECT time_s, id, raw, received_s, offset_s FROM frames"
                    " WHERE stream_id = ? AND time_s <= ? AND (time_s, id) > (?, ?) ORDER BY time_s, id LIMIT ?",
                    (stream_id, end_s, *after, READ_CHUNK),
                )
                if not rows:
                    break
                after = (rows[-1][0], rows[-1][1])
                yield from _decoded(row[2:] for row in rows)

    def count(self, nodes: Sequence[str], start_s: float, end_s: float, limit: int) -> int:
        """Return how many frames ``query`` would read, counting no further than ``limit`` + 1."""
        total = 0
        for stream_id in self._stream_ids(nodes, start_s, end_s):
            total += self._read(
                "SELECT count(*) FROM (SELECT 1 FROM frames WHERE stream_id = ? AND time_s BETWEEN ? AND ? LIMIT ?)",
                (stream_id, start_s, end_s, limit + 1 - total),
            )[0][0]
            if total > limit:
                break
        return total

    def streams(self) -> list[StreamInfo]:
        """Return every stream that the history knows."""
        return [StreamInfo(*row) for row in self._read("SELECT node, stream, watermark, heard_s FROM streams", ())]

    def problem(self) -> str | None:
        """Return why frames cannot be made durable at the moment, or None."""
        if not self._thread.is_alive():
            return "the history's writer has ended"
        return self._problem

    def close(self) -> None:
        """Make durable what was submitted, then release the files."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        with self._read_lock:
            self._reader.close()
        self._writer.close()

    # The writer's thread

    def _run(self) -> None:
        while True:
            taken = self._take()
            if taken:
                self._write(taken)
            elif self._closing:
                return
            elif self._problem is not None:
                self._probe()
            self._retain_if_due()

    def _take(self) -> list[tuple[Batch, Future[Appended]]]:
        # No delay is added to gather more: while one commit runs, the next group gathers by itself.
        with self._wake:
            if not self._waiting and not self._closing:
                self._wake.wait(IDLE_S)
            taken: list[tuple[Batch, Future[Appended]]] = []
            entries = 0
            while self._waiting and entries < COMMIT_ENTRIES_MAX:
                batch, future = self._waiting.popleft()
                self._waiting_bytes -= _size(batch)
                # From here on the waiting request can no longer cancel it.
                if future.set_running_or_notify_cancel():
                    entries += len(batch.entries)
                    taken.append((batch, future))
            return taken

    def _write(self, taken: list[tuple[Batch, Future[Appended]]]) -> None:
        # Kept apart until the commit has succeeded: a watermark that was rolled back must not be answered.
        streams: dict[tuple[str, str], tuple[int, int]] = {}
        results: list[Appended] = []
        try:
            with database.transaction(self._writer):
                results.extend(self._append(batch, streams) for batch, _ in taken)
        except Exception as error:  # noqa: BLE001 - whatever it was, the thread must live and the agents must hear it
            self._problem = f"frames cannot be written to {self._path}: {error}"
            for _, future in taken:
                future.set_exception(HistoryUnavailable(self._problem))
            return
        self._problem = None
        self._streams.update(streams)
        while len(self._streams) > STREAMS_CACHED_MAX:
            del self._streams[next(iter(self._streams))]
        for (_, future), result in zip(taken, results, strict=True):
            future.set_result(result)

    def _append(self, batch: Batch, streams: dict[tuple[str, str], tuple[int, int]]) -> Appended:
        name = (batch.node, batch.stream)
        known = streams.get(name) or self._streams.get(name) or self._look_up(name)
        if known is None:
            cursor = self._writer.execute(
                "INSERT INTO streams (node, stream, watermark, heard_s) VALUES (?, ?, 0, ?)",
                (batch.node, batch.stream, batch.received_s),
            )
            known = (cursor.lastrowid or 0, 0)
        stream_id, watermark = known
        new = tuple(
            self._writer.execute(
                "INSERT OR IGNORE INTO frames (stream_id, sequence, received_s, time_s, offset_s, raw)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (
                    stream_id,
                    entry.sequence,
                    batch.received_s,
                    entry.time_s + batch.offset_s,
                    batch.offset_s,
                    entry.raw,
                ),
            ).rowcount
            == 1
            for entry in batch.entries
        )
        highest = max((watermark, *(entry.sequence for entry in batch.entries)))
        if any(new):
            self._writer.execute(
                "UPDATE streams SET watermark = ?, heard_s = ? WHERE id = ?",
                (highest, batch.received_s, stream_id),
            )
        streams[name] = (stream_id, highest)
        return Appended(new, highest)

    def _look_up(self, name: tuple[str, str]) -> tuple[int, int] | None:
        found: tuple[int, int] | None = self._writer.execute(
            "SELECT id, watermark FROM streams WHERE node = ? AND stream = ?", name
        ).fetchone()
        return found

    def _probe(self) -> None:
        # Without this a full disk that has space again would count as full until an agent tries.
        try:
            with database.transaction(self._writer):
                self._writer.execute(
                    "INSERT INTO frames (stream_id, sequence, received_s, time_s, offset_s, raw)"
                    " VALUES (0, 0, 0, 0, 0, zeroblob(65536))"
                )
                self._writer.execute("DELETE FROM frames WHERE stream_id = 0")
        except sqlite3.Error as error:
            self._problem = f"frames cannot be written to {self._path}: {error}"
        else:
            self._problem = None

    def _retain_if_due(self) -> None:
        if self._clock.monotonic_s() - self._retained_at_s < RETENTION_S:
            return
        try:
            if not self._retain():
                self._retained_at_s = self._clock.monotonic_s()
        except sqlite3.Error as error:
            self._retained_at_s = self._clock.monotonic_s()
            self._problem = f"old frames cannot be deleted from {self._path}: {error}"

    def _retain(self) -> bool:
        """Delete one batch of frames that are too old or too many; return whether there may be more."""
        pages, free, page_bytes = (
            self._writer.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        too_big = (pages - free) * page_bytes > self._settings.retention_bytes
        oldest_s = self._clock.now_s() - self._settings.retention_s
        with database.transaction(self._writer):
            doomed = self._writer.execute(
                "SELECT id FROM (SELECT id, received_s FROM frames ORDER BY id LIMIT ?) WHERE ? OR received_s < ?",
                (DELETE_BATCH, too_big, oldest_s),
            ).fetchall()
            self._writer.executemany("DELETE FROM frames WHERE id = ?", doomed)
            if not doomed:
                self._forget_streams(oldest_s)
        self.dropped_by_retention += len(doomed)
        return len(doomed) == DELETE_BATCH

    def _forget_streams(self, oldest_s: float) -> None:
        gone = self._writer.execute(
            "DELETE FROM streams WHERE heard_s < ?"
            " AND NOT EXISTS (SELECT 1 FROM frames WHERE stream_id = streams.id) RETURNING node, stream",
            (oldest_s,),
        ).fetchall()
        for node, stream in gone:
            self._streams.pop((node, stream), None)

    # Readers

    def _stream_ids(self, nodes: Sequence[str], start_s: float, end_s: float) -> list[int]:
        """Return the nodes' streams (all if empty) that have frames in the range: by node, then as they begin in it."""
        rows = self._read(
            "SELECT id, (SELECT min(time_s) FROM frames WHERE stream_id = streams.id AND time_s BETWEEN ? AND ?)"
            " AS begin_s FROM streams WHERE (? OR node IN (SELECT value FROM json_each(?)))"
            " AND begin_s IS NOT NULL ORDER BY node, begin_s, id",
            (start_s, end_s, not nodes, json.dumps(list(nodes))),
        )
        return [id_ for id_, _ in rows]

    def _read(self, statement: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        with self._read_lock:
            try:
                return self._reader.execute(statement, values).fetchall()
            except sqlite3.Error as error:
                raise HistoryUnavailable(f"{self._path} cannot be read: {error}") from error


def _size(batch: Batch) -> int:
    return sum(len(entry.raw) for entry in batch.entries) + 512


def _decoded(rows: Iterator[tuple[Any, ...]]) -> Iterator[Recorded]:
    for raw, received_s, offset_s in rows:
        try:
            frame = decode_frame(raw)
        except BadFrame:
            # Accepted by an older server with a larger catalogue; it was judged then.
            continue
        yield Recorded(frame, received_s, offset_s)
