"""Detects that a job without steps is computing something else: an unannounced evaluation."""

from __future__ import annotations

from eagle_eye.detectors.signs.collective_counts import WAITING_RATIO, waiting_ratio
from eagle_eye.detectors.signs.progress import PAUSE_FLOORS, STARTING, Progress
from eagle_eye.detectors.signs.without_hook import WORK_METRICS, computing, moves, work
from eagle_eye.detectors.types import Window

ROWS_AT_WORK = 3  # rows of a standstill before it shows whether GPUs still compute


def pausing_at_work(window: Window, state: Progress) -> bool:
    """Whether most reporting GPUs go on computing, for no longer than any pause lasts.

    A rank that holds a synchronous job up leaves all others waiting. Power and memory alone say little, since waiting
    kernels keep both up: in that case ranks that report being inside a collective take precedence. False if GPU
    activity is not reported.
    """
    if state.standstill_s >= PAUSE_FLOORS * state.ripe_s or not any(m in window.device for m in WORK_METRICS):
        return False
    if state.phase == STARTING:
        return computing(window) is True  # there was no earlier work to compare with
    standing = int((window.times_s > state.advanced_s).sum())
    if standing < ROWS_AT_WORK:
        return False
    seen = work(window)
    if seen is not None and seen.idle_s > 0 and not seen.by_wires:
        return False
    if moves(window, state.advanced_s):
        return True
    inside = waiting_ratio(window)
    return inside < WAITING_RATIO if inside is not None else seen is None or seen.idle_s == 0
