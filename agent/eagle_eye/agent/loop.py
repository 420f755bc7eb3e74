"""The agent's main loop: at each tick run every collector, make a frame, hand it on."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Protocol

from msgspec import structs

from eagle_eye.agent.clock import Clock, ClockBase, Wake
from eagle_eye.agent.collector import CollectorRunner, Drops, Observed, TickFrame, gathered
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import EVENTS_MAX, FRAME_BYTES_MAX, KEYS_MAX, RANKS_MAX, TEXT_CHARS_MAX, Rank
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.rows import VERSION, RowTemplate, RowWriter, Tail, silences, speaking, table
from eagle_eye.schema.service import NotifySocket, watchdog_s

WATCHDOG_RATIO = 1 / 3  # of the manager's deadline: two notifications may be late
STARTING_EVERY_S = 10.0  # how often a slow start asks for more time,
EXTEND_S = 60.0  # and how much
STATUS_EVERY_S = 10.0
STATUS_CHARS_MAX = 300


class ServiceManager:
    """What systemd knows of the agent; a notification that failed is sent again at the next opportunity.

    ``every_s`` is the longest time between calls of ``alive``; infinite without a watchdog.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        monotonic_s: Callable[[], float] = time.monotonic,
        pid: int | None = None,
    ) -> None:
        """``pid`` is this process's; the watchdog's deadline may be meant for another process (WATCHDOG_PID)."""
        self._socket = NotifySocket(environ, _log)
        self._monotonic_s = monotonic_s
        self._watchdog_s = watchdog_s(environ, os.getpid() if pid is None else pid)
        self._ready = False
        self._alive_s = -math.inf
        self._status_s = -math.inf
        self._status = ""

    @property
    def every_s(self) -> float:
        """How often a watchdog notification is due, seconds."""
        if not self._socket.listens:
            return math.inf
        starting_s = math.inf if self._ready else STARTING_EVERY_S
        return min(starting_s, WATCHDOG_RATIO * self._watchdog_s)

    def alive(self) -> None:
        """Send a watchdog notification when due; before the first frame, also ask for more start time."""
        now_s = self._monotonic_s()
        if now_s - self._alive_s < 0.9 * self.every_s:
            return
        lines = [] if self._ready else [f"EXTEND_TIMEOUT_USEC={EXTEND_S * 1e6:.0f}"]
        if math.isfinite(self._watchdog_s):
            lines.append("WATCHDOG=1")
        if self._socket.send(*lines):
            self._alive_s = now_s

    def ticked(self, tick: TickFrame) -> None:
        """Note a frame. The first one makes the service ready."""
        now_s = self._monotonic_s()
        status = status_of(tick)
        if not self._ready:
            lines = ["READY=1", f"STATUS={status}"]
        elif status != self._status and now_s - self._status_s >= STATUS_EVERY_S:
            lines = [f"STATUS={status}"]
        else:
            lines = []
        if lines and self._socket.send(*lines):
            self._ready, self._status, self._status_s = True, status, now_s
        self.alive()

    def stopping(self, reason: str) -> None:
        """Notify that the loop has ended."""
        self._socket.send("STOPPING=1", f"STATUS=stopping: {_one_line(reason)}")


def status_of(tick: TickFrame) -> str:
    """Return one line on the agent's state: which collectors fail, and why."""
    asked = [standing for standing in tick.collectors if standing.supported]
    failing = [f"{standing.name} {standing.state}" for standing in asked if not standing.ok]
    line = f"{len(asked) - len(failing)} of {len(asked)} collectors ok"
    return _one_line("; ".join((line, *failing)))


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text[:STATUS_CHARS_MAX])


ANSWER_RATIO = 0.8  # collectors have this fraction of the interval to answer
ANSWER_S_MAX = 5.0
ANSWER_ONCE_S = 15.0  # a single frame may wait: a driver without persistence mode needs seconds per GPU
URGENT_EVERY_S = 0.1  # ranks die in groups: what follows the first is batched for this long

_log = logging.getLogger("eagle_eye.agent")


class Sink(Protocol):
    """Takes frames."""

    def append(self, make: Callable[[str, int], bytes]) -> int | None:
        """Append the frame that ``make(stream, sequence)`` encodes."""
        ...


@dataclass(frozen=True)
class LoopSettings:
    """What a loop's frames say of themselves: the node's name, its job, "" for the ranks' own, and the interval."""

    node: str
    job: str = ""
    interval_s: float = 1.0


@dataclass(frozen=True)
class LoopSources:
    """Where a loop's frames come from.

    ``runners`` are asked at each tick; ``happened`` returns ranks and events without rows, for frames outside the
    ticks. ``wake`` is set by the source of such events, and by the loop's ``stop``.
    """

    runners: Sequence[CollectorRunner]
    happened: Callable[[], Observed]
    wake: Wake


@dataclass(frozen=True)
class LoopListeners:
    """Who hears of a loop's frames.

    ``handed_on(urgent)`` is called for each frame. ``shown`` gets each tick after its frame was handed on; it must not
    block. ``service`` gets its watchdog signal only from the loop itself, so a hung loop is noticed; None: no manager
    listens.
    """

    handed_on: Callable[[bool], None] = lambda _urgent: None
    shown: Callable[[TickFrame], None] = lambda _tick: None
    service: ServiceManager | None = None


NO_LISTENERS = LoopListeners()


class Loop:
    """Makes a frame at each multiple of the interval, and one at once when a process exits.

    Ticks are at the wall clock's multiples but waited for on the monotonic clock; a clock jump or a stopped process
    loses the missed ticks and causes no burst.
    """

    def __init__(
        self,
        settings: LoopSettings,
        sources: LoopSources,
        sink: Sink,
        drops: Drops,
        clock: Clock,
        listeners: LoopListeners = NO_LISTENERS,
        base: ClockBase | None = None,
    ) -> None:
        """``base`` None: the loop creates its own."""
        self._base = base or ClockBase(clock, boot_id())
        self._node = settings.node
        self._job = settings.job
        self._interval_s = settings.interval_s
        self._answer_s = min(ANSWER_S_MAX, ANSWER_RATIO * settings.interval_s)
        self._runners = sources.runners
        self._happened = sources.happened
        self._sink = sink
        self._drops = drops
        self._clock = clock
        self._wake = sources.wake
        self._handed_on = listeners.handed_on
        self._shown = listeners.shown
        self._service = listeners.service or ServiceManager({})
        self._writer = RowWriter()
        self._frames = 0
        self._version = agent_version()
        self._stop_reason = ""
        self._events = [Event(clock.now_s(), "agent_start", attributes={"version": self._version})]
        self._tick_s = clock.monotonic_s()

    def stop(self, reason: str) -> None:
        """End the loop after one last frame; safe in a signal handler."""
        self._stop_reason = reason
        self._wake.set()

    def run(self) -> None:
        """Run until stopped."""
        self._take_first_sample(self._answer_s)
        while not self._stop_reason:
            self._wait_for_tick()
            if not self._stop_reason:
                self._tick(self._answer_s)
        self._service.stopping(self._stop_reason)
        self._events.append(Event(self._clock.now_s(), "agent_stop", attributes={"reason": self._stop_reason}))
        self._emit_happened()

    def run_once(self) -> None:
        """Make one frame, at the first tick that leaves time for rates to be computed."""
        self._take_first_sample(ANSWER_ONCE_S)
        begin_s = self._clock.monotonic_s()
        self._wait_for_tick()
        if self._clock.monotonic_s() - begin_s < 0.5 * self._interval_s:
            self._wait_for_tick()
        self._tick(ANSWER_ONCE_S)

    def _take_first_sample(self, answer_s: float) -> None:
        """Take the first sample for rates; events so far go into the first frame."""
        self._ask()
        self._events += self._gather(answer_s).events

    def _wait_for_tick(self) -> None:
        due_s = self._clock.monotonic_s() + self._until_tick_s()
        urgent_s = 0.0
        while not self._stop_reason:
            self._service.alive()
            now_s = self._clock.monotonic_s()
            if now_s >= due_s:
                return
            if not self._clock.wait(self._wake, min(due_s - now_s, self._service.every_s)) or self._stop_reason:
                continue
            self._wake.clear()
            now_s = self._clock.monotonic_s()
            if now_s < urgent_s:
                self._clock.wait(threading.Event(), min(urgent_s, due_s) - now_s)
            if self._clock.monotonic_s() < due_s:
                self._emit_happened()
                urgent_s = self._clock.monotonic_s() + URGENT_EVERY_S

    def _until_tick_s(self) -> float:
        """Return the seconds to the next multiple of the interval; one that is practically now is skipped."""
        rest_s = self._interval_s - self._clock.now_s() % self._interval_s
        return rest_s if rest_s > 0.1 * self._interval_s else rest_s + self._interval_s

    def _tick(self, answer_s: float) -> None:
        self._ask()
        now_s, base_s = self._clock.now_s(), self._base.read()
        # The tick's own time, a multiple of the interval, unless the clock has jumped away from it.
        multiple_s = round(now_s / self._interval_s) * self._interval_s
        time_s = multiple_s if abs(now_s - multiple_s) < 0.25 * self._interval_s else now_s
        seen = self._gather(answer_s)
        monotonic_s = self._clock.monotonic_s()
        elapsed_s, self._tick_s = monotonic_s - self._tick_s, monotonic_s
        usual = abs(elapsed_s - self._interval_s) < 0.5 * self._interval_s
        interval_s = self._interval_s if usual else elapsed_s
        seen.events[:] = self._base.events(seen.events)
        events = tuple(self._events + seen.events)
        self._emit(time_s, base_s, interval_s, seen, urgent=False)
        # From a list: a tuple built from a generator ends in a free list of 2,000 that CPython does not reuse for the
        # next.
        collectors = tuple([runner.standing() for runner in self._runners])
        tick = TickFrame(time_s, interval_s, seen, events, collectors, self._frames)
        self._shown(tick)
        self._service.ticked(tick)

    def _ask(self) -> None:
        now_s = self._clock.now_s()
        for runner in self._runners:
            runner.start_collection(now_s)

    def _gather(self, answer_s: float) -> Observed:
        return gathered(self._runners, self._clock.monotonic_s() + answer_s, self._clock.monotonic_s)

    def _emit_happened(self) -> None:
        """Hand on ranks and events without rows; the rows' interval continues."""
        since_tick_s = self._clock.monotonic_s() - self._tick_s
        seen = self._happened()
        now_s, base_s = self._clock.now_s(), self._base.read()
        seen.events[:] = self._base.events(seen.events)
        self._emit(now_s, base_s, since_tick_s, seen, urgent=True)

    def _emit(self, time_s: float, base_s: float, interval_s: float, seen: Observed, *, urgent: bool) -> None:
        interval_s = max(interval_s, 1e-3)
        events, ranks = self._events + seen.events, seen.ranks
        self._drops.count("events_over_limit", len(events) - EVENTS_MAX)
        self._drops.count("ranks_over_limit", len(ranks) - RANKS_MAX)
        self._events = []
        kept = ranks[:RANKS_MAX]
        found: tuple[tuple[Scope, Mapping[int, dict[str, float]] | Mapping[str, dict[str, float]]], ...] = (
            (Scope.DEVICE, {key: row for key, row in seen.devices.items() if 0 <= key < KEYS_MAX}),
            (Scope.NODE, {-1: seen.node} if seen.node else {}),
            (Scope.LINK, seen.links),
        )
        tables = [table(scope, rows) for scope, rows in found if rows]
        template = RowTemplate(
            version=VERSION,
            node=self._node,
            boot_id=self._base.boot_id,
            stream="",
            interval_s=interval_s,
            agent_version=self._version,
            job=self._job or _only_job(kept),
            ranks=speaking(kept),
            blocks=[block for block, _ in tables],
            collectors={runner.collector.name: runner.state[:TEXT_CHARS_MAX] for runner in self._runners},
            dropped={},
            clock_base_s=base_s,
        )
        numbers = b"".join([numbers for _, numbers in tables])
        tail = Tail(events[:EVENTS_MAX], silences(kept))
        self._sink.append(partial(self._encode, template, time_s, numbers, tail))
        self._frames += 1
        self._handed_on(urgent)

    def _encode(
        self, template: RowTemplate, time_s: float, numbers: bytes, tail: Tail, stream: str, sequence: int
    ) -> bytes:
        """Return the sample in at most FRAME_BYTES_MAX, with as many of its events as fit."""
        while True:
            template = structs.replace(template, stream=stream, dropped=self._drops.snapshot())
            raw = self._writer.write(template, sequence, time_s, numbers, tail)
            kept = len(tail.events)
            if len(raw) <= FRAME_BYTES_MAX or not kept:
                return raw
            self._drops.count("events_oversized", kept - kept // 2)
            tail = Tail(tail.events[: kept // 2], tail.silent_s)


def _only_job(ranks: Sequence[Rank]) -> str | None:
    jobs = {rank.job for rank in ranks}
    return jobs.pop() if len(jobs) == 1 else None


def boot_id() -> str:
    """Return the kernel's id of this boot; a generated one where the kernel gives none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return str(uuid.uuid4())


def agent_version() -> str:
    """Return the installed version."""
    try:
        return metadata.version("eagle-eye")
    except metadata.PackageNotFoundError:
        return "unknown"
