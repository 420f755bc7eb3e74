"""Whether a job that makes no step computes something else: an evaluation that nobody announced."""

from __future__ import annotations

from eagle_eye.detectors.signs.progress import PAUSE_FLOORS, STARTING, Progress
from eagle_eye.detectors.signs.without_hook import WORK_METRICS, computing, idle_since_s
from eagle_eye.detectors.types import Window

ROWS_AT_WORK = 3  # rows of a standstill before it shows whether GPUs still compute


def pausing_at_work(window: Window, state: Progress) -> bool:
    """Whether most GPUs that are heard go on computing, for no longer than any pause lasts.

    What holds a synchronous job up leaves all others waiting for it. False where nobody reports what GPUs do.
    """
    if state.standstill_s >= PAUSE_FLOORS * state.ripe_s or not any(m in window.device for m in WORK_METRICS):
        return False
    if state.phase == STARTING:
        return computing(window) is True  # there was no work before with which to compare
    standing = int((window.times_s > state.advanced_s).sum())
    return standing >= ROWS_AT_WORK and idle_since_s(window) is None
