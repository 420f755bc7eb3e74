"""Decides when to compact the journal, runs the compactor, and applies its results."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from eagle_eye.server.history.journal import Journal
from eagle_eye.server.history.journal_schema import BYTES_IN_USE, OLDEST_UNSEALED, UNSEALED
from eagle_eye.server.history.segments.facts import STRETCH_BYTES_MAX, Remade, Sealed, Step, no_step
from eagle_eye.server.history.segments.processes import environment
from eagle_eye.server.history.segments.segment_store import SegmentStore
from eagle_eye.server.history.settings import HistorySettings
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import HistoryUnavailable
from eagle_eye.server.telemetry.endings import how_it_ended

LOOK_S = 10.0  # how often to check whether compaction is due
SEGMENT_BYTES = STRETCH_BYTES_MAX * 3 // 4  # of a group's frames make a segment, however recent they are
NEARLY_RATIO = 0.5  # of that, or of segment_s: such groups are compacted along with those that are due
UNSEALED_BYTES_MAX = 8 << 30  # of frames in no segment: beyond this, all of them become segments
UNSEALED_SHARE = 4  # and never more than this fraction of retention_bytes
STALLED_S = 300.0  # a compactor without output for this long is killed; a stretch takes seconds
FAILED_WAIT_S = 60.0  # after a failure; each attempt costs CPU
REMADE_MAX = 20  # raw segments per process: between two processes, journal compaction that is due runs first
PACKAGE = "eagle_eye.server.history.segments"
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
        while not self._stop.wait(LOOK_S):
            try:
                self.look()
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

    def look(self) -> None:
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
        self._run("remaking", arguments, msgspec.json.Decoder(Remade), self._take_minutes)

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
            self._failed(f"the {module} {how_it_ended(code, said)}")

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None  # noqa: S101 - for the type checker
        watchdog = threading.Timer(STALLED_S, process.kill)
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
        self._not_before_s = self._clock.monotonic_s() + FAILED_WAIT_S
        _log.error(
            "the journal could not be compacted, or minutes not be made; nothing is lost, and it is tried again: %s",
            reason,
        )
