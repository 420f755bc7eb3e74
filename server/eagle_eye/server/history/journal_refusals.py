"""Why the journal currently refuses frames; logs when that begins and ends."""

from __future__ import annotations

import logging

from eagle_eye.server.model.clock import Clock

OVER_S = 10.0  # without a failure; otherwise a disk with room for small frames only would fill the log

_log = logging.getLogger(__name__)


class Refusals:
    """For the writer thread; ``reason`` may be read by any thread and is None while frames are accepted."""

    def __init__(self, clock: Clock) -> None:
        self.reason: str | None = None
        self._clock = clock
        self._began_s: float | None = None
        self._failed_s = 0.0
        self._frames = 0

    def failed(self, reason: str, frames: int) -> None:
        """Record that so many frames were refused."""
        self.reason = reason
        self._failed_s = self._clock.monotonic_s()
        self._frames += frames
        if self._began_s is None:
            self._began_s = self._failed_s
            _log.error("frames are refused, and agents keep them: %s", reason)

    def worked(self) -> None:
        """Record that frames were written."""
        self.reason = None

    def look(self) -> None:
        """Log that the refusals ended, once they have."""
        if self._began_s is None or self.reason is not None:
            return
        if self._clock.monotonic_s() - self._failed_s < OVER_S:
            return
        lasted_s = round(self._failed_s - self._began_s, 1)
        _log.warning(
            "frames are taken again: %d were refused within %.1f s, and agents send them again", self._frames, lasted_s
        )
        self._began_s = None
        self._frames = 0
