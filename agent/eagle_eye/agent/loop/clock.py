"""Injectable time: the agent's loop and uplink take a clock, so that tests can pass their own."""

from __future__ import annotations

import queue
import time
from typing import Protocol

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
