"""The server's only source of time; all other modules receive a Clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for records, monotonic time for durations; a test's clock moves only on request."""

    def now_s(self) -> float:
        """Return Unix seconds."""
        ...

    def monotonic_s(self) -> float:
        """Return seconds since some fixed moment; never decreases."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        """Return Unix seconds."""
        return time.time()

    def monotonic_s(self) -> float:
        """Return seconds since some fixed moment; never decreases."""
        return time.monotonic()
