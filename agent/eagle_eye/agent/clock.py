"""Injectable time: the agent's loop and uplink take a clock, so that tests can pass their own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Frame

_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # macOS, where agents are developed, has none


class Waitable(Protocol):
    """Something to wait for: a ``threading.Event``, a ``Wake``."""

    def is_set(self) -> bool:
        """Whether waiting would return at once."""
        ...

    def wait(self, timeout: float) -> bool:
        """Return whether it was set within ``timeout`` seconds."""
        ...


class Wake:
    """An event that a signal handler may set: it might interrupt the thread that holds an Event's lock."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Wake the waiter, now or later."""
        if self._queue.empty():
            self._queue.put(None)

    def is_set(self) -> bool:
        """Whether it is set and not yet consumed by a wait."""
        return not self._queue.empty()

    def wait(self, timeout: float) -> bool:
        """Return whether it was set within ``timeout`` seconds; clears it."""
        try:
            self._queue.get(timeout=timeout)
        except queue.Empty:
            return False
        return True

    def clear(self) -> None:
        """Clear it."""
        while self.is_set():
            self.wait(0.0)


class Clock(Protocol):
    """The wall clock timestamps, the monotonic clock schedules: the wall clock may jump, the other never does."""

    def now_s(self) -> float:
        """Return Unix seconds."""
        ...

    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary moment; never goes back."""
        ...

    def since_boot_s(self) -> float:
        """Return seconds since boot, suspend included; never set."""
        ...

    def wait(self, event: Waitable, timeout_s: float) -> bool:
        """Return whether the event was set within ``timeout_s``."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        """Return Unix seconds."""
        return time.time()

    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary moment; never goes back."""
        return time.monotonic()

    def since_boot_s(self) -> float:
        """Return seconds since boot, suspend included; never set."""
        return time.clock_gettime(_SINCE_BOOT)

    def wait(self, event: Waitable, timeout_s: float) -> bool:
        """Return whether the event was set within ``timeout_s``."""
        return event.wait(max(0.0, timeout_s))


STEP_S = 0.25  # smaller differences come from the time taken to read two clocks
READ_S_MAX = 0.05  # a reading that took longer is inaccurate: it is repeated
READS_MAX = 5
EVENTS_S = 30.0  # how long after a step events dated before it may arrive
SLACK_S = 2.0

_log = logging.getLogger("eagle_eye.agent")


class ClockBase:
    """The wall clock minus the time since boot: constant until the clock is set. Thread-safe.

    ``boot_id`` is this boot's: frames of another boot cannot be re-dated.
    """

    def __init__(self, clock: Clock, boot_id: str) -> None:
        self.boot_id = boot_id
        self._clock = clock
        self._lock = threading.Lock()
        self._base_s = self._before_s = clock.now_s() - clock.since_boot_s()
        self._right_s = clock.since_boot_s()  # since boot: the clock was as before then...
        self._set_s = float("-inf")  # ...and was seen to be set then, as below
        self._was_right_s = self._right_s

    def read(self) -> float:
        """Return the current base; small differences are ignored."""
        with self._lock:
            for _ in range(READS_MAX):
                begin_s = self._clock.since_boot_s()
                base_s = self._clock.now_s() - begin_s
                if self._clock.since_boot_s() - begin_s <= READ_S_MAX:
                    break
            else:
                return self._base_s
            if abs(base_s - self._base_s) > STEP_S:
                _log.warning("the clock was set by %+.1f s; what waits is dated anew", base_s - self._base_s)
                self._before_s, self._was_right_s = self._base_s, self._right_s
                self._base_s, self._set_s = base_s, begin_s
            self._right_s = begin_s
            return self._base_s

    def dated(self, frame: Frame) -> Frame:
        """Return a frame dated by the current clock: frames sent together must agree on one clock."""
        base_s = self.read()
        if frame.base_s == base_s:
            return frame
        by_s = 0.0
        if frame.base_s is not None and frame.boot_id == self.boot_id and abs(base_s - frame.base_s) > STEP_S:
            by_s = base_s - frame.base_s
        return msgspec.structs.replace(
            frame,
            time_s=max(frame.time_s + by_s, 1e-3),
            events=[_moved(event, by_s) for event in frame.events],
            clock_base_s=base_s,
        )

    def events(self, events: Sequence[Event]) -> list[Event]:
        """Return just-seen events; those dated before the clock was set are re-dated by the current clock."""
        base_s, now_s = self.read(), self._clock.since_boot_s()
        if now_s - self._set_s > EVENTS_S:
            return list(events)
        return [self._event(event, base_s, now_s) for event in events]

    def _event(self, event: Event, base_s: float, now_s: float) -> Event:
        since_s = self._was_right_s - SLACK_S
        if since_s <= event.time_s - base_s <= now_s + SLACK_S:
            return event
        dated_before = since_s - EVENTS_S <= event.time_s - self._before_s <= self._set_s + SLACK_S
        return _moved(event, base_s - self._before_s) if dated_before else event


def _moved(event: Event, by_s: float) -> Event:
    return msgspec.structs.replace(event, time_s=max(event.time_s + by_s, 1e-3)) if by_s else event
