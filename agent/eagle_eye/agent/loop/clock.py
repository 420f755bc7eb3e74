"""Time as an argument: the agent's loop and uplink ask a clock, tests hand in one of their own."""

from __future__ import annotations

import queue
import time
from typing import Protocol

_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # macOS, where agents are developed, has none


class Waitable(Protocol):
    """What one can wait for: a ``threading.Event``, a ``Wake``."""

    def is_set(self) -> bool:
        """Whether there is no need to wait."""
        ...

    def wait(self, timeout: float) -> bool:
        """Return whether it was set within ``timeout`` seconds."""
        ...


class Wake:
    """An event that a signal handler may set: an Event's lock may be held by the very thread that it interrupts."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Wake whoever waits, now or later."""
        if self._queue.empty():
            self._queue.put(None)

    def is_set(self) -> bool:
        """Whether it is set and nobody has waited for it since."""
        return not self._queue.empty()

    def wait(self, timeout: float) -> bool:
        """Return whether it was set within ``timeout`` seconds; it is no longer set then."""
        try:
            self._queue.get(timeout=timeout)
        except queue.Empty:
            return False
        return True

    def clear(self) -> None:
        """Forget that it was set."""
        while self.is_set():
            self.wait(0.0)


class Clock(Protocol):
    """The wall clock stamps, the monotonic clock schedules: the wall clock may jump, the other never does."""

    def now_s(self) -> float:
        """Unix seconds."""
        ...

    def monotonic_s(self) -> float:
        """Seconds since some moment; never goes back."""
        ...

    def since_boot_s(self) -> float:
        """Seconds since the machine's boot, those that it slept included; never set."""
        ...

    def wait(self, event: Waitable, timeout_s: float) -> bool:
        """Return whether the event was set within ``timeout_s``."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        """Unix seconds."""
        return time.time()

    def monotonic_s(self) -> float:
        """Seconds since some moment; never goes back."""
        return time.monotonic()

    def since_boot_s(self) -> float:
        """Seconds since the machine's boot, those that it slept included; never set."""
        return time.clock_gettime(_SINCE_BOOT)

    def wait(self, event: Waitable, timeout_s: float) -> bool:
        """Return whether the event was set within ``timeout_s``."""
        return event.wait(max(0.0, timeout_s))
