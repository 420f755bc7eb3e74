"""Downsampling: what is due is found here, done by another process, and put in its place here."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

import msgspec

from eagle_eye.server.history.journal import Journal
from eagle_eye.server.history.segments.backlog import Backlog, Due
from eagle_eye.server.history.segments.facts import Step, no_step
from eagle_eye.server.history.segments.levels import HOURS, MINUTES, Level, LevelFacts
from eagle_eye.server.history.segments.processes import environment
from eagle_eye.server.history.segments.segment_store import SegmentStore
from eagle_eye.server.history.segments.tasks import Downsample, TaskResult
from eagle_eye.server.history.settings import HistorySettings
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import HistoryUnavailable

LOOK_S = 15.0  # how often it is looked whether anything is due
# A worker that says nothing for this long is ended; a task takes seconds of CPU, at the lowest priority.
STALLED_S = 900.0
FAILED_WAIT_S = 60.0  # after a failure; each attempt costs CPU
ROOM_BYTES = 1 << 30  # with less free on the disk nothing is downsampled: frames come first
TASKS_MAX = 200  # of one process: what it has learnt and allocated is given back now and then
COMMAND = (sys.executable, "-m", "eagle_eye.server.history.segments.worker")

Perform = Callable[[Downsample], TaskResult]
_log = logging.getLogger(__name__)


class _Ended(Exception):
    """The process ended without an answer, for a reason."""


class Upkeep:
    """Has segments downsampled when they are due. ``run`` is for a thread of its own."""

    def __init__(
        self,
        journal: Journal,
        segment_store: SegmentStore,
        settings: HistorySettings,
        clock: Clock,
        command: Sequence[str] = COMMAND,
        step: Step = no_step,
    ) -> None:
        self._journal = journal
        self._shelf = segment_store
        self._settings = settings
        self._clock = clock
        self._command = command
        self._step = step
        self._backlog = Backlog(journal, segment_store, settings)
        self._stop = threading.Event()
        self._working = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._not_before_s = float("-inf")
        self._no_room = False
        self._ok = True
        self.failures = 0
        self.downsampled = 0

    @property
    def ok(self) -> bool:
        """Whether the last attempt succeeded and the disk has room for the next."""
        return self._ok and not self._no_room

    def run(self) -> None:
        """Do what is due, until ``stop``."""
        while not self._stop.wait(LOOK_S):
            try:
                self.look()
            except HistoryUnavailable as error:
                self._failed(str(error))
            except Exception:  # noqa: BLE001 - a bug must not end it for ever, or raw frames go as they are
                _log.exception("downsampling failed and is tried again")
                self._failed("a bug")

    def stop(self) -> None:
        """Have ``run`` return soon; a task under way is done again next time."""
        self._stop.set()
        process = self._process
        if process is not None:
            process.kill()

    def look(self) -> None:
        """Do what is due. Raises HistoryUnavailable."""
        if self._clock.monotonic_s() < self._not_before_s or not self._has_room():
            return
        with self._worker() as perform:
            try:
                self.work(perform)
                self._ok = True
            except _Ended as error:
                if not self._stop.is_set():
                    self._failed(str(error))

    def work(self, perform: Perform) -> None:
        """Have everything performed that is due, minutes before hours. Raises HistoryUnavailable."""
        with self._working:
            self._work(perform)

    def _work(self, perform: Perform) -> None:
        left = TASKS_MAX
        for level in (MINUTES, HOURS):
            for due in self._backlog.due(level, self._clock.now_s(), self._clock.monotonic_s()):
                if self._stop.is_set() or left == 0:
                    return
                left -= self._downsample(level, due, perform)

    def _downsample(self, level: Level, due: Due, perform: Perform) -> int:
        """Have one window downsampled; return how many tasks it took."""
        shard, start_s = due.place
        if not due.sources:
            self._backlog.done(level, due, self._clock.monotonic_s())
            return 0
        facts = LevelFacts(
            name=f"{int(start_s)}-{shard}-{token_hex(4)}",
            journal=self._backlog.journal_id,
            level=level.name,
            shard=shard,
            start_s=start_s,
            end_s=start_s + level.window_s,
            first_node="",
            last_node="",
            frames=0,
            present=0,
            rows=0,
            bytes=0,
        )
        existing = due.before.name if due.before is not None and due.adds else None
        task = Downsample(facts, due.sources, existing, due.anew_s if existing else ())
        with self._discarding(self._shelf.levels.folder(level) / facts.name):
            answer = perform(task)
            if answer.outcome == "broken":
                self._broken(level, task, answer)
                return 1
            if answer.outcome != "done":
                raise _Ended(f"{level.name} of {start_s:.0f}, nodes {shard}: {answer.reason}")
            self._step("heard")
            if self._shelf.levels.put(level, shard, start_s, due.through_id, due.before, answer.level_facts):
                self.downsampled += 1
                self._backlog.done(level, due, self._clock.monotonic_s())
            self._shelf.levels.measure()
            self._step("put")
        return 1

    def _broken(self, level: Level, task: Downsample, answer: TaskResult) -> None:
        """Set the broken segment aside: a source, or the window's own until now."""
        if answer.broken == task.existing:
            self._shelf.levels.set_aside(level, answer.broken, answer.reason)
        elif level is MINUTES:
            self._shelf.set_aside(answer.broken, answer.reason)
        else:
            self._shelf.levels.set_aside(MINUTES, answer.broken, answer.reason)

    @contextmanager
    def _discarding(self, folder: Path) -> Iterator[None]:
        """Remove the folder if the block raises: in no table, it would be found at the next start."""
        try:
            yield
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _has_room(self) -> bool:
        no_room = shutil.disk_usage(self._shelf.folder).free < ROOM_BYTES
        if no_room and not self._no_room:
            _log.warning("less than %d bytes are free: segments are not downsampled", ROOM_BYTES)
        self._no_room = no_room
        return not no_room

    @contextmanager
    def _worker(self) -> Iterator[Perform]:
        """Give a function that has a process perform tasks; it is started when the first one comes."""
        started: list[subprocess.Popen[bytes]] = []

        def perform(task: Downsample) -> TaskResult:
            if not started:
                started.append(self._start())
            return self._ask(started[0], task)

        try:
            yield perform
        finally:
            self._process = None
            for process in started:
                with suppress(OSError), process:
                    process.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        arguments = [*self._command, str(self._shelf.folder.parent)]
        process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
        )
        self._process = process
        if self._stop.is_set():
            process.kill()
        return process

    def _ask(self, process: subprocess.Popen[bytes], task: Downsample) -> TaskResult:
        assert process.stdin is not None  # noqa: S101 - for the type checker
        assert process.stdout is not None  # noqa: S101
        assert process.stderr is not None  # noqa: S101
        watchdog = threading.Timer(STALLED_S, process.kill)
        watchdog.start()
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(msgspec.json.encode(task) + b"\n")
                process.stdin.flush()
            line = process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line.endswith(b"\n"):
            process.kill()
            said = process.stderr.read(2_000).decode(errors="replace").strip()
            raise _Ended(f"the worker ended with {process.wait()}: {said or 'no reason given'}")
        return msgspec.json.decode(line, type=TaskResult)

    def _failed(self, reason: str) -> None:
        self.failures += 1
        self._ok = False
        self._not_before_s = self._clock.monotonic_s() + FAILED_WAIT_S
        _log.error("segments could not be downsampled; it is tried again: %s", reason)
