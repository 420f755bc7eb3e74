"""The History of one server: a journal for what was just received, segments for what went before, read as one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, TypeVar

from eagle_eye.schema.metrics import MetricSpec
from eagle_eye.server.clock import Clock
from eagle_eye.server.config import HistorySettings
from eagle_eye.server.history import Appended, Batch, Recorded, Run, StreamInfo, runs_of, speaks_of
from eagle_eye.server.journal import Journal
from eagle_eye.server.journal_reader import Chunk
from eagle_eye.server.segments.compaction import Compaction
from eagle_eye.server.segments.shelf import Shelf, Shelved

HISTORY_FILE = "history.db"
HISTORY_FOLDER = "history"

T = TypeVar("T")


class _Plan(NamedTuple):
    """What holds the answer: each frame is in one of them."""

    segments: list[Shelved]
    chunks: list[Chunk]


class EmbeddedHistory:
    """A History in ``folder``. Raises StoreUnavailable when its files cannot be opened."""

    def __init__(
        self, folder: Path, settings: HistorySettings, pending_bytes_max: int, clock: Clock, window_s: float
    ) -> None:
        self.journal = Journal(folder / HISTORY_FILE, settings, pending_bytes_max, clock, window_s)
        self._reader = self.journal.reader
        self.shelf = Shelf(folder / HISTORY_FOLDER, self.journal, settings)
        self.compaction = Compaction(self.journal, self.shelf, settings, clock)
        self._thread = threading.Thread(target=self.compaction.run, name="compaction", daemon=True)
        self._thread.start()

    @property
    def dropped_by_retention(self) -> int:
        """How many frames were deleted for their age or the history's size."""
        return self.journal.dropped_by_retention + self.shelf.dropped_by_retention

    def submit(self, batch: Batch) -> Future[Appended]:
        """Return a future that is done once the batch is durable. Raises HistoryBusy, HistoryUnavailable."""
        return self.journal.submit(batch)

    def replay(self, since_s: float, frames_max: int) -> Iterator[Recorded]:
        """Yield the frames received at ``since_s`` or later, but for the late; of too many, the newest. See History."""
        return self._reader.replay(since_s, frames_max)

    def query(self, nodes: Sequence[str], start_s: float, end_s: float) -> Iterator[Recorded]:
        """Yield the nodes' frames (all if empty) whose corrected time is in the range; see History."""
        return self._parts(
            nodes,
            start_s,
            end_s,
            lambda segment: self.shelf.frames(segment, nodes, start_s, end_s),
            lambda chunks: self._reader.frames(chunks, nodes, start_s, end_s),
        )

    def runs(
        self, metric: MetricSpec, nodes: Sequence[str], start_s: float, end_s: float, job: str | None
    ) -> Iterator[Run]:
        """Yield the metric's values in the range; see History."""

        def of_chunks(chunks: Sequence[Chunk]) -> Iterator[Run]:
            for frame, _, offset_s in self._reader.frames(chunks, nodes, start_s, end_s):
                if job is None or speaks_of(frame, job):
                    yield from runs_of(frame, frame.time_s + offset_s, metric)

        return self._parts(
            nodes,
            start_s,
            end_s,
            lambda segment: self.shelf.runs(segment, metric, nodes, start_s, end_s, job),
            of_chunks,
        )

    def count(self, nodes: Sequence[str], start_s: float, end_s: float, limit: int) -> int:
        """Return how many frames ``query`` would read, counting little further than ``limit``."""
        with self._reader.pinned():
            plan = self._plan(nodes, start_s, end_s)
            total = self._reader.count(plan.chunks, nodes, start_s, end_s)
            for segment in plan.segments:
                if total > limit:
                    break
                total += self.shelf.count(segment, nodes, start_s, end_s)
        return total

    def streams(self) -> list[StreamInfo]:
        """Return every stream that the history knows."""
        return self.journal.streams()

    def problem(self) -> str | None:
        """Return why frames cannot be made durable at the moment, or None."""
        return self.journal.problem()

    def close(self) -> None:
        """Make durable what was submitted, then release the files."""
        self.compaction.stop()
        self._thread.join()
        self.journal.close()

    def _plan(self, nodes: Sequence[str], start_s: float, end_s: float) -> _Plan:
        return self._reader.read_together(
            lambda reader: _Plan(
                self.shelf.holding(reader, nodes, start_s, end_s),
                self._reader.unsealed(reader, nodes, start_s, end_s),
            )
        )

    def _parts(
        self,
        nodes: Sequence[str],
        start_s: float,
        end_s: float,
        of_segment: Callable[[Shelved], Iterator[T]],
        of_chunks: Callable[[Sequence[Chunk]], Iterator[T]],
    ) -> Iterator[T]:
        with self._reader.pinned():
            plan = self._plan(nodes, start_s, end_s)
            for segment in sorted(plan.segments, key=lambda one: (max(one.first_s, start_s), one.first_node)):
                yield from of_segment(segment)
            yield from of_chunks(plan.chunks)
