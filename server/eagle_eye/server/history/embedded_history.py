"""The single-server History: a journal of recent frames and segments of older ones, read as one."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from eagle_eye.schema.metrics import MetricSpec
from eagle_eye.server.history.history import (
    RankReport,
    Recorded,
    RecordedRow,
    Run,
    StepQuery,
    StreamInfo,
    UnreadableRange,
    runs_of,
    speaks_of,
)
from eagle_eye.server.history.journal import Journal
from eagle_eye.server.history.journal_reader import Chunk
from eagle_eye.server.history.segments.compaction import Compaction
from eagle_eye.server.history.segments.downsampling import BucketSeries
from eagle_eye.server.history.segments.facts import RAW_FOLDER, shard_of
from eagle_eye.server.history.segments.gaps import gaps
from eagle_eye.server.history.segments.level_table import holding
from eagle_eye.server.history.segments.replaced_folders import FolderRemoval
from eagle_eye.server.history.segments.resolution import choose, left_of
from eagle_eye.server.history.segments.segment_store import SegmentEntry, SegmentStore
from eagle_eye.server.history.settings import HistorySettings
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import HistoryMoved

HISTORY_FILE = "history.db"
HISTORY_FOLDER = "history"
IN_TIME_S = 120.0  # how far the newest frame of on-time data may lag behind its receipt: exporters are slow

T = TypeVar("T")


class _Plan(NamedTuple):
    """Where a query's frames are; each frame is in exactly one of these places."""

    segments: list[SegmentEntry]
    chunks: list[Chunk]


class EmbeddedHistory:
    """A History in ``folder``. Raises StoreUnavailable when its files cannot be opened."""

    def __init__(
        self, folder: Path, settings: HistorySettings, pending_bytes_max: int, clock: Clock, window_s: float
    ) -> None:
        self.journal = Journal(folder / HISTORY_FILE, settings, pending_bytes_max, clock, window_s)
        self.id = self.journal.id
        self._reader = self.journal.reader
        self.submit = self.journal.submit
        self._removal = FolderRemoval(clock)
        self.segment_store = SegmentStore(folder / HISTORY_FOLDER, self.journal, settings, self._removal)
        self.compaction = Compaction(self.journal, self.segment_store, settings, clock)
        self._thread = threading.Thread(target=self.compaction.run, name="compaction", daemon=True)
        self._thread.start()

    @property
    def dropped_by_retention(self) -> int:
        """Number of frames deleted because of their age or the history's size."""
        return self.journal.dropped_by_retention + self.segment_store.dropped_by_retention

    def template(self, id_: bytes) -> bytes | None:
        """Return the template of a durable row by its id; None if it is unknown or was deleted."""
        return self._reader.template(id_)

    def replay(self, since_s: float, frames_max: int) -> Iterator[Recorded | RecordedRow]:
        """Yield the frames from ``since_s`` on in the order of their times, the newest ``frames_max``; see History."""
        return self._reader.replay(since_s, frames_max)

    def query(self, nodes: Sequence[str], start_s: float, end_s: float) -> Iterator[Recorded]:
        """Yield the nodes' frames (all if empty) whose corrected time is in the range; see History."""
        return self._parts(
            nodes,
            start_s,
            end_s,
            lambda segment: self.segment_store.frames(segment, nodes, start_s, end_s),
            lambda chunks: self._reader.frames(chunks, nodes, start_s, end_s),
        )

    def runs(
        self, metric: MetricSpec, nodes: Sequence[str], start_s: float, end_s: float, job: str | None
    ) -> Iterator[Run]:
        """Yield the metric's values in the range; see History."""
        return self._parts(
            nodes,
            start_s,
            end_s,
            lambda segment: self.segment_store.runs(segment, metric, nodes, start_s, end_s, job),
            lambda chunks: self._runs_of(chunks, metric, nodes, start_s, end_s, job),
        )

    def ranks(self, nodes: Sequence[str], start_s: float, end_s: float) -> Iterator[RankReport]:
        """Yield the ranks that the nodes' frames in the range report; see History."""
        return self._parts(
            nodes,
            start_s,
            end_s,
            lambda segment: self.segment_store.ranks(segment, nodes, start_s, end_s),
            lambda chunks: (
                RankReport(frame.node, frame.time_s + offset_s, frame.ranks)
                for frame, _, offset_s in self._reader.frames(chunks, nodes, start_s, end_s)
            ),
        )

    @contextmanager
    def courses(
        self,
        metric: MetricSpec,
        nodes: Sequence[str],
        start_s: float,
        end_s: float,
        job: str | None,
        step_s: float,
        limit: int,
    ) -> Iterator[StepQuery]:
        """Open a query of the metric's values in the range; see History."""
        with self._reader.pinned(), self._removal.reading():
            plan, rows = self._reader.read_together(
                lambda reader: (
                    self._plan_of(reader, nodes, start_s, end_s),
                    holding(reader, nodes, start_s, end_s),
                )
            )
            choice = choose(rows, step_s, start_s, end_s)
            raw = [
                (one, low_s, high_s)
                for one in plan.segments
                for low_s, high_s in left_of(
                    max(one.first_s, start_s),
                    min(one.last_s, end_s),
                    one.id,
                    choice.covers.get(shard_of(one.name), ()),
                )
            ]
            frames = sum(piece.frames(nodes) for piece in choice.pieces)
            frames += self._reader.count(plan.chunks, nodes, start_s, end_s)
            for one, low_s, high_s in raw:
                if frames > limit:
                    break
                frames += self.segment_store.count(one, nodes, low_s, high_s)

            def read() -> Iterator[Run | BucketSeries]:
                for piece in choice.pieces:
                    yield from self.segment_store.levels.courses(
                        piece.stored, metric, nodes, piece.start_s, piece.end_s, job
                    )
                broken = self.segment_store.set_aside_total
                for one, low_s, high_s in raw:
                    yield from self.segment_store.runs(one, metric, nodes, low_s, high_s, job)
                if self.segment_store.set_aside_total > broken:
                    raise HistoryMoved("a segment was found broken; ask again: its minutes may answer")
                yield from self._runs_of(plan.chunks, metric, nodes, start_s, end_s, job)

            yield StepQuery(frames, choice.spans, read())

    def count(self, nodes: Sequence[str], start_s: float, end_s: float, limit: int) -> int:
        """Return how many frames ``query`` would read; stops counting soon after ``limit``."""
        with self._reader.pinned(), self._removal.reading():
            plan = self._plan(nodes, start_s, end_s)
            total = self._reader.count(plan.chunks, nodes, start_s, end_s)
            for segment in plan.segments:
                if total > limit:
                    break
                total += self.segment_store.count(segment, nodes, start_s, end_s)
        return total

    def gaps(self, nodes: Sequence[str], start_s: float, end_s: float, levels: bool) -> list[UnreadableRange]:
        """Return the parts of the range in which the nodes' data is damaged; see History."""

        def found(reader: sqlite3.Connection) -> list[UnreadableRange]:
            raw = self.segment_store.broken(reader, nodes, start_s, end_s)
            return gaps(raw, holding(reader, nodes, start_s, end_s) if levels else [], start_s, end_s)

        return self._reader.read_together(found)

    def begins_s(self) -> float | None:
        """Return the time since which all on-time frames are here; None if there are none. See History."""
        for table in ("segments", "chunks"):  # there are few chunks as long as there is no segment
            statement = f"SELECT min(first_s) FROM {table} WHERE last_s > received_s - ?"  # noqa: S608 - a constant
            begins_s: float | None = self._reader.read(statement, (IN_TIME_S,))[0][0]
            if begins_s is not None:
                return begins_s
        return None

    def streams(self) -> list[StreamInfo]:
        """Return every stream that the history knows."""
        return self.journal.streams()

    def set_aside(self, folder: str, name: str, reason: str) -> None:
        """Stop reading a damaged segment in one of the history's folders. Raises HistoryUnavailable."""
        if folder == RAW_FOLDER:
            self.segment_store.set_aside(name, reason)
        else:
            self.segment_store.levels.set_aside(folder, name, reason)

    def problem(self) -> str | None:
        """Return why frames cannot be made durable at present, or None."""
        return self.journal.problem()

    def close(self) -> None:
        """Make durable what was submitted, then release the files."""
        self.compaction.stop()
        self._thread.join()
        self.journal.close()

    def _runs_of(
        self,
        chunks: Sequence[Chunk],
        metric: MetricSpec,
        nodes: Sequence[str],
        start_s: float,
        end_s: float,
        job: str | None,
    ) -> Iterator[Run]:
        found = self._reader.frames(chunks, nodes, start_s, end_s)
        of_job = (one for one in found if job is None or speaks_of(one.frame, job))
        yield from runs_of(((one.frame, one.frame.time_s + one.offset_s) for one in of_job), metric)

    def _plan(self, nodes: Sequence[str], start_s: float, end_s: float) -> _Plan:
        return self._reader.read_together(lambda reader: self._plan_of(reader, nodes, start_s, end_s))

    def _plan_of(self, reader: sqlite3.Connection, nodes: Sequence[str], start_s: float, end_s: float) -> _Plan:
        return _Plan(
            self.segment_store.holding(reader, nodes, start_s, end_s),
            self._reader.unsealed(reader, nodes, start_s, end_s),
        )

    def _parts(
        self,
        nodes: Sequence[str],
        start_s: float,
        end_s: float,
        of_segment: Callable[[SegmentEntry], Iterator[T]],
        of_chunks: Callable[[Sequence[Chunk]], Iterator[T]],
    ) -> Iterator[T]:
        with self._reader.pinned(), self._removal.reading():
            plan = self._plan(nodes, start_s, end_s)
            for segment in sorted(plan.segments, key=lambda one: (max(one.first_s, start_s), one.first_node)):
                yield from of_segment(segment)
            yield from of_chunks(plan.chunks)
