"""Memory limits shared by all jobs: a larger fleet keeps a shorter history. Pure."""

from __future__ import annotations

import sys
from collections.abc import Collection

from eagle_eye.server.engine.job_track import JobTrack
from eagle_eye.server.engine.step_grid import CURVE_LINE_BYTES

WINDOW_BYTES_MAX = 5 << 29  # of all jobs' rows in view: a larger fleet keeps a shorter time
STEP_BYTES_MAX = 1 << 30  # of all ranks' steps: a larger fleet keeps fewer
CURVE_BYTES_MAX = 1 << 29  # of all jobs' curves
SPARE = 1.25  # allocated beyond what is kept


class Memory:
    """The limits per job; they only ever decrease."""

    def __init__(self) -> None:
        self._lines = sys.maxsize  # of each job's rows...
        self._steps = self._curve = sys.maxsize  # ...of its ranks' steps, and of its own course

    def limit(self, track: JobTrack) -> None:
        """Apply the limits to a job."""
        track.limit(self._lines)
        track.limit_steps(self._steps, self._curve)

    def bound(self, tracks: Collection[JobTrack]) -> None:
        """Make all jobs fit."""
        per_line = sum(track.bytes_per_line for track in tracks)
        lines = int(WINDOW_BYTES_MAX / SPARE) // max(per_line, 1)
        if lines < self._lines:
            # Lower than needed, so that a fleet that grows node by node is not resized for each.
            self._lines = lines - lines // 8
            for track in tracks:
                track.limit(self._lines)
        per_step = sum(track.bytes_per_step for track in tracks)
        steps = int(STEP_BYTES_MAX / SPARE) // max(per_step, 1)
        curve = int(CURVE_BYTES_MAX / SPARE) // (CURVE_LINE_BYTES * max(len(tracks), 1))
        if steps < self._steps or curve < self._curve:
            self._steps = steps - steps // 8 if steps < self._steps else self._steps
            self._curve = curve - curve // 8 if curve < self._curve else self._curve
            for track in tracks:
                track.limit_steps(self._steps, self._curve)
