"""The journal: durable storage of recent frames in SQLite, written by one thread in group commits.

Frames are deleted from it once they are in segments (see compaction.py) and a restart would not replay them.
"""

from __future__ import annotations

import sqlite3
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from eagle_eye.server.history.history import Appended, StreamInfo
from eagle_eye.server.history.journal_chunks import chunks_of, insert
from eagle_eye.server.history.journal_reader import JournalReader
from eagle_eye.server.history.journal_refusals import Refusals
from eagle_eye.server.history.journal_retention import RETENTION_S, Retention
from eagle_eye.server.history.journal_schema import MIGRATIONS
from eagle_eye.server.history.journal_streams import JournalStream, Streams, Touched
from eagle_eye.server.history.journal_templates import JournalTemplates
from eagle_eye.server.history.settings import HistorySettings
from eagle_eye.server.model.batch import Batch, StreamRef
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import HistoryBusy, HistoryUnavailable, StoreUnavailable
from eagle_eye.server.store import database

COMMIT_ENTRIES_MAX = 20_000  # frames per transaction: bounds how long the first of them waits
CHUNK_BYTES_MAX = 4 << 20  # per chunk; SQLite allows 1,000,000,000
PAGE_BYTES = 16_384  # a page holds several frames: half the CPU time of 4 KiB pages, and small fleets write little more
RETENTION_SHARE = 0.25  # duration of a retention step relative to the pause after it
IDLE_S = 1.0  # how often an idle writer checks whether a failed disk works again
ADOPT_FRAMES = 500  # of the first version's file, moved in one transaction
WINDOW_S = 900.0
BATCH_BYTES = 512  # approximate memory overhead of a request beside its frames
COMMITS_MAX = 1_000  # number of commits remembered of those that a restart would replay

T = TypeVar("T")


_Work = Callable[[sqlite3.Connection], Any]


class Journal:
    """The newest part of a History, in ``path``. Sealed chunks stay for ``window_s``: a restart replays them."""

    def __init__(
        self, path: Path, settings: HistorySettings, pending_bytes_max: int, clock: Clock, window_s: float = WINDOW_S
    ) -> None:
        self.path = path
        self._settings = settings
        self._pending_bytes_max = pending_bytes_max
        self._clock = clock
        self._writer = database.connect(path, PAGE_BYTES)
        # Some builds of SQLite overwrite deleted data with zeros, which would double the bytes written.
        self._writer.execute("PRAGMA secure_delete = OFF")
        database.migrate(self._writer, MIGRATIONS, path)
        condition = database.DatabaseCondition(path)
        self.reader = JournalReader(path, clock, condition)
        self._waiting: deque[tuple[Batch | _Work, int, Future[Any]]] = deque()  # each with its size in bytes
        self._waiting_bytes = 0
        self._wake = threading.Condition()
        self._closing = False
        self._condition = condition
        self._refusals = Refusals(clock)
        self._streams = Streams(self._writer)
        self.templates = JournalTemplates(self._writer)
        self._commits: deque[tuple[int, int]] = deque()  # last chunk and frames of those that a restart would replay
        self._commits_frames = 0
        self._replay_id = 0  # a restart would not replay chunks up to this id
        self._retention = Retention(self._writer, self.reader, self._streams, self.templates, settings, window_s)
        self._retaining: Iterator[None] | None = None
        self._next_step_s = 0.0  # of retention, by the process's monotonic clock
        self._retained_at_s = clock.monotonic_s()
        self.id: str
        (self.id,) = self._writer.execute("SELECT id FROM journal").fetchone()
        self._open()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        """Bytes of frames waiting for the disk."""
        return self._waiting_bytes

    @property
    def dropped_by_retention(self) -> int:
        """Number of frames deleted before they were in a segment."""
        return self._retention.dropped

    def submit(self, batch: Batch) -> Future[Appended]:
        """Return a future that is done once the batch is durable. Raises HistoryBusy, HistoryUnavailable."""
        return self._enqueue(batch, batch.raw_bytes + BATCH_BYTES * len(batch.refs))

    def change(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Run ``work`` in a transaction of its own; return a future of its result. Raises HistoryUnavailable."""
        return self._enqueue(work, 0)

    def streams(self) -> list[StreamInfo]:
        """Return every stream that the history knows."""
        rows = self.reader.read(
            "SELECT n.node, s.stream, s.sequences, s.heard_s FROM streams s JOIN nodes n ON n.id = s.node_id", ()
        )
        return self._streams.known(rows)

    def problem(self) -> str | None:
        """Return why frames cannot be made durable at present, or None."""
        if not self._thread.is_alive():
            return "the history's writer has ended"
        return self._refusals.reason or self._condition.damage

    def note_damage(self, how: str) -> None:
        """Make ``problem`` report that the file is damaged."""
        self._condition.note_damage(how)

    def close(self) -> None:
        """Make durable what was submitted, then release the files."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self.reader.close()
        self._writer.close()

    # The writer thread

    def _enqueue(self, what: Batch | _Work, size: int) -> Future[Any]:
        with self._wake:
            if self._closing or not self._thread.is_alive():
                raise HistoryUnavailable("the history is closed; the server is stopping")
            if size and self._waiting and self._waiting_bytes + size > self._pending_bytes_max:
                raise HistoryBusy(
                    f"{self._waiting_bytes} bytes of frames wait for the disk, at most {self._pending_bytes_max}"
                    " may; send again later (ingest.pending_bytes_max)"
                )
            future: Future[Any] = Future()
            self._waiting.append((what, size, future))
            self._waiting_bytes += size
            self._wake.notify()
        return future

    def _open(self) -> None:
        try:
            with database.transaction(self._writer):
                self._streams.recover()
            self._adopt()
            for id_, frames in sorted(
                self._writer.execute("SELECT id, frames FROM chunks INDEXED BY chunks_of_shard").fetchall()
            ):
                self._note_commit(id_, frames)
        except (sqlite3.Error, struct.error, TypeError, ValueError) as error:
            # What no commit ever writes: a directory of a wrong length, or streams without rows.
            damaged = not isinstance(error, sqlite3.Error) or database.tells_damage(error)
            remedy = f"; it is damaged: {database.REMEDY}" if damaged else ""
            raise StoreUnavailable(f"{self.path} cannot be read: {error}{remedy}") from error

    def _adopt(self) -> None:
        """Move the frames of the first version's file, which had a row for each, into chunks."""
        while True:
            rows = self._writer.execute(
                "SELECT f.id, s.node, s.stream, f.received_s, f.offset_s, f.sequence, f.time_s, f.raw"
                " FROM earlier_frames f JOIN earlier_streams s ON s.id = f.stream_id ORDER BY f.id LIMIT ?",
                (ADOPT_FRAMES,),
            ).fetchall()
            if not rows:
                return
            touched = Touched()
            with database.transaction(self._writer):
                batch = Batch.of(
                    (StreamRef(node, stream), sequence, time_s - offset_s, received_s, offset_s, raw)
                    for _, node, stream, received_s, offset_s, sequence, time_s, raw in rows
                )
                insert(self._writer, self._append(batch, touched)[2])
                self._writer.execute("DELETE FROM earlier_frames WHERE id <= ?", (rows[-1][0],))
            self._streams.keep(touched)

    def _run(self) -> None:
        while True:
            taken = self._take()
            if taken and not isinstance(taken[0][0], Batch):
                self._do(taken[0][0], taken[0][1])
            elif taken:
                self._write([(what, future) for what, future in taken if isinstance(what, Batch)])
            elif self._closing:
                return
            elif self._refusals.reason is not None:
                self._probe()
            self._retain_if_due()
            self._refusals.look()

    def _take(self) -> list[tuple[Batch | _Work, Future[Any]]]:
        # No delay is added to gather more: while one commit runs, the next group gathers by itself.
        with self._wake:
            if not self._waiting and not self._closing:
                until_step_s = self._next_step_s - time.monotonic()
                self._wake.wait(IDLE_S if self._retaining is None else min(max(until_step_s, 0.0), IDLE_S))
            taken: list[tuple[Batch | _Work, Future[Any]]] = []
            entries = 0
            while self._waiting and entries < COMMIT_ENTRIES_MAX:
                what, size, future = self._waiting[0]
                batch = what if isinstance(what, Batch) else None
                if taken and batch is None:
                    break
                self._waiting.popleft()
                self._waiting_bytes -= size
                # From here on the waiting request can no longer cancel it.
                if future.set_running_or_notify_cancel():
                    taken.append((what, future))
                    if batch is None:
                        break
                    entries += len(batch.refs)
            return taken

    def _do(self, work: _Work, future: Future[Any]) -> None:
        try:
            with database.transaction(self._writer):
                result = work(self._writer)
        except Exception as error:  # noqa: BLE001 - the thread must survive and the caller must get the error
            self._condition.note(error)
            future.set_exception(HistoryUnavailable(f"{self.path} cannot be changed: {error}"))
        else:
            future.set_result(result)

    def _write(self, taken: list[tuple[Batch, Future[Any]]]) -> None:
        touched = Touched()
        chunks: list[tuple[object, ...]] = []
        results: list[tuple[Appended, list[JournalStream]]] = []
        try:
            with database.transaction(self._writer):
                for batch, _ in taken:
                    appended, streams, rows = self._append(batch, touched)
                    results.append((appended, streams))
                    chunks += rows
                last_id = insert(self._writer, chunks)
        except Exception as error:  # noqa: BLE001 - the thread must survive and the agents must get the error
            touched.undo()
            self._failed("frames cannot be written to", error, sum(len(batch.refs) for batch, _ in taken))
            for _, future in taken:
                future.set_exception(HistoryUnavailable(self.problem()))
            return
        self._refusals.worked()
        self._note_commit(last_id, sum(sum(appended.new) for appended, _ in results))
        room_wanted = self._streams.keep(touched)
        for (batch, future), (appended, streams) in zip(taken, results, strict=True):
            self._streams.keep_referred(batch.refs, streams)
            future.set_result(appended)
        if room_wanted:
            self._note_streams()

    def _append(self, batch: Batch, touched: Touched) -> tuple[Appended, list[JournalStream], list[tuple[object, ...]]]:
        """Return the result of a batch, the streams of its rows, and its new frames as chunks for ``insert``."""
        streams = self._streams.referred(batch.refs, batch.received_s, touched)
        if batch.templates:
            used_s = float(batch.received_s.max())
            self.templates.write({id_: (raw, used_s) for id_, raw in batch.templates.items()})
        appended = touched.add(streams, batch.sequence.tolist(), batch.received_s.tolist())
        ids, shards = [stream.id for stream in streams], [stream.shard for stream in streams]
        return appended, streams, list(chunks_of(batch, ids, shards, appended.new, CHUNK_BYTES_MAX))

    def _note_commit(self, last_id: int | None, frames: int) -> None:
        if last_id is None:
            return
        self._commits_frames += frames
        if self._commits and self._commits[-1][1] < self._settings.replay_frames_max / COMMITS_MAX:
            frames += self._commits.pop()[1]  # merged: an hour has a hundred thousand commits
        self._commits.append((last_id, frames))
        while self._commits_frames - self._commits[0][1] >= self._settings.replay_frames_max:
            self._replay_id, gone = self._commits.popleft()
            self._commits_frames -= gone

    def _note_streams(self) -> None:
        try:
            for _ in self._streams.noting():
                pass
        except sqlite3.Error as error:
            self._failed("streams cannot be written to", error)

    def _probe(self) -> None:
        # Otherwise a full disk that has space again would count as full until an agent tries.
        try:
            with database.transaction(self._writer):
                insert(self._writer, [(-1, 0, 0, 0.0, 0.0, 0.0, b"", bytes(65_536))])
                self._writer.execute("DELETE FROM chunks WHERE shard = -1")
        except sqlite3.Error as error:
            self._failed("frames cannot be written to", error)
        else:
            self._refusals.worked()

    def _failed(self, what: str, error: Exception, frames: int = 0) -> None:
        self._condition.note(error)
        if frames or self._condition.damage is None:  # damage that affects no frame refuses none
            self._refusals.failed(f"{what} {self.path}: {error}", frames)

    def _retain_if_due(self) -> None:
        """Run one step of retention if a round is in progress or due.

        What a compactor seals in a minute takes many steps. They run one at a time, with pauses in which only frames
        are written; otherwise acknowledgements would wait for all of them.
        """
        now_s, began_s = self._clock.monotonic_s(), time.monotonic()
        if began_s < self._next_step_s:
            return
        if self._retaining is None and now_s - self._retained_at_s < RETENTION_S:
            return
        if self._retaining is None:
            self._retained_at_s = now_s
            self._retaining = self._retention.round(self._clock.now_s(), self._replay_id)
        try:
            next(self._retaining)
        except StopIteration:
            self._retaining = None
        except sqlite3.Error as error:
            self._retaining = None
            self._failed("old frames cannot be deleted from", error)
        ended_s = time.monotonic()
        self._next_step_s = ended_s + (ended_s - began_s) / RETENTION_SHARE
