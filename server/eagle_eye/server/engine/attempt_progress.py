"""Training progress of one attempt: its first and latest step, and when the latest step finished. Pure."""

from __future__ import annotations

import math

from eagle_eye.server.model.records import Job

LASTING_STATES = frozenset({"running", "suspended"})  # in which a job's processes live on


class Advance:
    """The steps of one attempt: ``first_step`` (NaN: none), ``highest_step`` (-1: none).

    ``advanced_s`` is the end of the interval in which the last step finished, or the start of the attempt before any
    did. An attempt that its scheduler stops and runs again is treated as just started (``started_s``): no step is due
    yet, and its first may be one that was made before.
    """

    def __init__(self, started_s: float) -> None:
        self.started_s = self.advanced_s = started_s
        self.first_step, self.highest_step = math.nan, -1.0
        self._stopped = self._ended = False
        self._left_at_step = math.nan  # repeated by rows of ranks that have ended

    def take_word(self, job: Job) -> bool:
        """Apply a scheduler's or launcher's report of whether the attempt runs; return whether it began anew.

        Then its processes are new ones: only a suspended job's go on.
        """
        stopped, self._stopped = self._stopped, job.state != "running"
        self._ended = self._ended or job.state not in LASTING_STATES
        if not stopped or self._stopped:
            return False
        anew, self._ended = self._ended, False
        self.started_s = max(self.started_s, job.updated_s)
        self.advanced_s = max(self.advanced_s, job.updated_s)
        if self.highest_step >= 0:
            self._left_at_step = self.highest_step
        self.first_step, self.highest_step = math.nan, -1.0
        return anew

    def is_news(self, step: float) -> bool:
        """Whether no rank has finished the step before."""
        return step > self.highest_step and (self.highest_step >= 0 or step != self._left_at_step)

    def take(self, time_s: float, lowest: float, highest: float) -> None:
        """Record the lowest and highest newly finished step that ranks report at a time."""
        if self.highest_step < 0:
            self.first_step = lowest
        self.highest_step = highest
        self.advanced_s = max(self.advanced_s, time_s)  # a clock that was set back reports earlier times
