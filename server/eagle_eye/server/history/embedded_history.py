"""The single-server History: a journal of recent frames and segments of older ones, read as one.

Before it: when the journal is compacted into segments, by which process, and what becomes of its results. After it: the
history's health on ``/metrics``.
"""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.schema.metrics import PROMETHEUS_PREFIX, MetricSpec
from eagle_eye.server.history.history import (
    BucketSeries,
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
from eagle_eye.server.history.journal_reader import BYTES_IN_USE, OLDEST_UNSEALED, UNSEALED, Chunk
from eagle_eye.server.history.processes import environment
from eagle_eye.server.history.resolution import choose, gaps, left_of
from eagle_eye.server.history.segment_store import FolderRemoval, SegmentEntry, SegmentStore, levels_holding
from eagle_eye.server.history.segment_tables import (
    RAW_FOLDER,
    STRETCH_BYTES_MAX,
    Remade,
    Sealed,
    Step,
    no_step,
    shard_of,
)
from eagle_eye.server.history.settings import HistorySettings
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import HistoryMoved, HistoryUnavailable, how_it_ended
from eagle_eye.server.telemetry.counters import metric_name

COMPACTION_LOOK_S = 10.0  # how often to check whether compaction is due
SEGMENT_BYTES = STRETCH_BYTES_MAX * 3 // 4  # of a group's frames make a segment, however recent they are
NEARLY_RATIO = 0.5  # of that, or of segment_s: such groups are compacted along with those that are due
UNSEALED_BYTES_MAX = 8 << 30  # of frames in no segment: beyond this, all of them become segments
UNSEALED_SHARE = 4  # and never more than this fraction of retention_bytes
COMPACTOR_STALLED_S = 300.0  # a compactor without output for this long is killed; a stretch takes seconds
COMPACTION_FAILED_WAIT_S = 60.0  # after a failure; each attempt costs CPU
REMADE_MAX = 20  # raw segments per process: between two processes, journal compaction that is due runs first
PACKAGE = "eagle_eye.server.history"
COMMAND = (sys.executable, "-m")

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Compaction:
    """Runs the compactor and replaces journal chunks by the segments it writes. ``run`` is for a thread of its own."""

    def __init__(
        self,
        journal: Journal,
        segment_store: SegmentStore,
        settings: HistorySettings,
        clock: Clock,
        command: Sequence[str] = (),
        step: Step = no_step,
    ) -> None:
        self._journal = journal
        self._segments = segment_store
        self._settings = settings
        self._clock = clock
        self._command = command
        self._step = step
        self._stop = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._not_before_s = float("-inf")
        self._compacting = threading.Lock()  # two at once would write each stretch twice
        self.failures = 0

    def run(self) -> None:
        """Compact and run retention whenever due, until ``stop``."""
        while not self._stop.wait(COMPACTION_LOOK_S):
            try:
                self.compact_if_due()
            except HistoryUnavailable as error:
                self._failed(str(error))
            except Exception:  # noqa: BLE001 - a bug must not end compaction for ever, or the journal grows
                _log.exception("compaction failed and is tried again")
                self._failed("a bug")

    def stop(self) -> None:
        """Make ``run`` return soon; a stretch in progress is written again next time."""
        self._stop.set()
        process = self._process
        if process is not None:
            process.kill()

    def compact_if_due(self) -> None:
        """Compact if a stretch is due, else build missing minutes; then run retention. Raises HistoryUnavailable."""
        if self._clock.monotonic_s() >= self._not_before_s:
            if due := self._due():
                self.compact(due)
            elif names := self._segments.levels.without_minutes(self._clock.now_s()):
                self.remake(names[:REMADE_MAX])
        self._segments.retain(self._clock.now_s())

    def compact(self, shards: Sequence[int] = ()) -> None:
        """Compact these groups' part of the journal (all if empty) into segments. Raises HistoryUnavailable."""
        with self._compacting:
            (through,) = self._journal.reader.read("SELECT max(id) FROM chunks", ())[0]
            if through is not None:
                arguments = [str(self._journal.path), str(self._segments.folder), str(through), *map(str, shards)]
                self._run("compactor", arguments, msgspec.json.Decoder(Sealed), self._take)

    def remake(self, names: Sequence[str]) -> None:
        """Build the minutes of raw segments that have none. Raises HistoryUnavailable."""
        arguments = [str(self._segments.folder.parent), *names]
        self._run("minutes", arguments, msgspec.json.Decoder(Remade), self._take_minutes)

    def _run(
        self, module: str, arguments: list[str], decoder: msgspec.json.Decoder[T], take: Callable[[T], None]
    ) -> None:
        if self._stop.is_set():
            return
        with subprocess.Popen(
            [*(self._command or (*COMMAND, f"{PACKAGE}.{module}")), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
        ) as process:
            self._process = process
            if self._stop.is_set():
                process.kill()
            assert process.stdout is not None  # noqa: S101 - for the type checker
            assert process.stderr is not None  # noqa: S101
            try:
                while line := self._line(process):
                    take(decoder.decode(line))
                said = process.stderr.read(2_000).decode(errors="replace").strip()
                code = process.wait()
            finally:
                self._process = None
                process.kill()
        if code != 0 and not self._stop.is_set():
            self._failed(f"the process of {module}.py {how_it_ended(code, said)}")

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None  # noqa: S101 - for the type checker
        watchdog = threading.Timer(COMPACTOR_STALLED_S, process.kill)
        watchdog.start()
        try:
            return process.stdout.readline()
        finally:
            watchdog.cancel()

    def _take_minutes(self, remade: Remade) -> None:
        if remade.minutes is None:
            self._segments.set_aside(remade.name, remade.reason)
        self._step("heard")
        self._segments.levels.put(remade)
        self._step("put")

    def _take(self, sealed: Sealed) -> None:
        def put(writer: sqlite3.Connection) -> None:
            self._segments.add(writer, sealed.segments, sealed.minutes)
            writer.execute(
                "INSERT INTO shards (shard, sealed_id) VALUES (?, ?)"
                " ON CONFLICT (shard) DO UPDATE SET sealed_id = excluded.sealed_id",
                (sealed.shard, sealed.through),
            )

        self._step("heard")
        try:
            self._journal.change(put).result()
        except HistoryUnavailable:
            self._segments.discard(sealed.segments)
            raise
        self._segments.measure()
        self._segments.levels.measure()
        self._step("put")

    def _due(self) -> list[int]:
        """Return the node groups to compact: if any is due, also those that soon will be; [] if none is due.

        Groups are compacted together, since starting a process costs half a second of CPU.
        """
        read, now_s = self._journal.reader.read, self._clock.now_s()
        ((oldest_s,),) = read(OLDEST_UNSEALED, ())
        ((in_use,),) = read(BYTES_IN_USE, ())
        size_max = min(UNSEALED_BYTES_MAX, self._settings.retention_bytes // UNSEALED_SHARE)
        if oldest_s is None or (now_s - oldest_s < self._settings.segment_s and in_use < min(SEGMENT_BYTES, size_max)):
            return []
        groups = read(f"SELECT shard, sum(size), min(received_s) FROM ({UNSEALED}) GROUP BY shard", ())  # noqa: S608
        if sum(size for _, size, _ in groups) >= size_max:
            return [shard for shard, _, _ in groups]
        full = {
            shard: max(size / SEGMENT_BYTES, (now_s - received_s) / self._settings.segment_s)
            for shard, size, received_s in groups
        }
        return [shard for shard, ratio in full.items() if ratio >= NEARLY_RATIO] if max(full.values()) >= 1 else []

    def _failed(self, reason: str) -> None:
        self.failures += 1
        self._not_before_s = self._clock.monotonic_s() + COMPACTION_FAILED_WAIT_S
        _log.error(
            "the journal could not be compacted, or minutes not be made; nothing is lost, and it is tried again: %s",
            reason,
        )


HISTORY_FILE = "history.db"
HISTORY_FOLDER = "history"
IN_TIME_S = 120.0  # how far the newest frame of on-time data may lag behind its receipt: exporters are slow


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
                    levels_holding(reader, nodes, start_s, end_s),
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
            return gaps(raw, levels_holding(reader, nodes, start_s, end_s) if levels else [], start_s, end_s)

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


class HistoryCollector(Collector):
    """The history's health, read when scraped. ``segments`` returns their number and total bytes."""

    def __init__(
        self,
        waiting_bytes: Callable[[], int],
        dropped: Callable[[], int],
        ok: Callable[[], bool],
        segments: Callable[[], tuple[int, int]],
        set_aside: Callable[[], int],
        failures: Callable[[], int],
    ) -> None:
        self._waiting_bytes = waiting_bytes
        self._dropped = dropped
        self._ok = ok
        self._segments = segments
        self._set_aside = set_aside
        self._failures = failures

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        yield GaugeMetricFamily(
            metric_name("history_waiting_bytes"), "Frames that wait for the disk.", value=self._waiting_bytes()
        )
        yield CounterMetricFamily(
            metric_name("history_retired_frames"), "Frames deleted for their age or the size.", value=self._dropped()
        )
        yield GaugeMetricFamily(metric_name("history_ok"), "1 when frames can be made durable.", value=self._ok())
        segments, size = self._segments()
        yield GaugeMetricFamily(metric_name("history_segments"), "Segments of the history on disk.", value=segments)
        yield GaugeMetricFamily(metric_name("history_segment_bytes"), "Their size.", value=size)
        yield CounterMetricFamily(
            metric_name("history_set_aside_segments"),
            "Segments found broken and read no more.",
            value=self._set_aside(),
        )
        yield CounterMetricFamily(
            metric_name("history_compaction_failures"),
            "Times that the journal could not be made into segments; it keeps its frames.",
            value=self._failures(),
        )


class LevelsCollector(Collector):
    """The size of each level, and what was lost of it."""

    def __init__(self, segment_store: SegmentStore) -> None:
        self._segments = segment_store

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        segments = _gauge("level_segments", "Segments of a level on disk.")
        size = _gauge("level_bytes", "Their size.")
        oldest = _gauge("level_oldest_timestamp_seconds", "Where the oldest of them begins.")
        for level, kept in self._segments.kept().items():
            segments.add_metric([level], kept.segments)
            size.add_metric([level], kept.bytes)
            if kept.oldest_s is not None:
                oldest.add_metric([level], kept.oldest_s)
        yield from (segments, size, oldest)
        for name, text, value in (
            (
                "retired_unsummarized_frames",
                "Frames deleted of which nothing was downsampled.",
                self._segments.dropped_as_they_were,
            ),
            (
                "set_aside_level_segments",
                "Downsampled segments found broken; they are made anew where that can be.",
                self._segments.levels.set_aside_total,
            ),
        ):
            yield CounterMetricFamily(f"{PROMETHEUS_PREFIX}history_{name}", text, value=value)


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PROMETHEUS_PREFIX}history_{name}", text, labels=["level"])
