"""Finds non-finite numbers: since when, on which ranks, and whether one node was first.

Shared by the detectors of a non-finite loss and of silent corruption, so that both report at the same moment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.peers import latest
from eagle_eye.detectors.types import Floats, Window

SCREEN_ROWS = 4  # newest rows in which something must be broken; a job that recovered is healthy
DEPTH_ROWS = 64  # how far back the onset is searched
# How long to wait for the rows of all ranks that cover the onset, at least so many seconds: without them nobody knows
# who was first, and a busy host sends late.
SETTLE_INTERVALS, SETTLE_FLOOR_S = 3.0, 10.0
LATE_INTERVALS = 1.5  # from the end of a step to that of the row that shows it, also where a busy host sends late
MOST_RATIO = 0.5  # of the ranks that report a loss: then it affects the job


@dataclass(frozen=True, slots=True)
class BrokenNumbers:
    """The values that are currently not finite.

    ``loss`` (S,) and ``norm`` (S,) mark the ranks whose newest loss or reduced gradient norm is not finite; ``spoke``
    and ``spoke_norm`` count the ranks that report one. ``onset_s`` is the end of the row in which the first of them
    broke, ``sound_until_s`` a time before which no parameter was spoiled. ``settled``: the rows of all ranks that cover
    the onset have arrived, or have had time to.
    """

    loss: NDArray[np.bool_]
    norm: NDArray[np.bool_]
    spoke: int
    spoke_norm: int
    onset_s: float
    sound_until_s: float
    settled: bool

    @property
    def lost(self) -> bool:
        """Whether the loss is not finite on most of the ranks that report one."""
        return bool(self.loss.sum() >= max(MOST_RATIO * self.spoke, 1))


def broken_numbers(window: Window) -> BrokenNumbers | None:
    """Return what is not finite in the newest rows; None if nothing is."""
    loss, norm = window.device.get("train_loss"), window.device.get("train_grad_norm")
    seen = [values for values in (loss, norm) if values is not None]
    if not any(np.isposinf(values[-SCREEN_ROWS:]).any() for values in seen):
        return None
    count = len(window.series)
    newest_loss = latest(loss, SCREEN_ROWS) if loss is not None else np.full(count, np.nan)
    newest_norm = latest(norm, SCREEN_ROWS) if norm is not None else np.full(count, np.nan)
    # The loss takes precedence: a gradient norm that overflows while the loss stays finite is a skipped step.
    deciding = loss if loss is not None and np.isposinf(newest_loss).any() else norm
    onset = 0
    if deciding is not None:
        lines = np.flatnonzero(np.isposinf(deciding[-DEPTH_ROWS:]).any(axis=1))
        onset = max(len(deciding) - DEPTH_ROWS, 0) + int(lines[0]) if len(lines) else len(window.times_s) - 1
    onset_s = float(window.times_s[onset])
    return BrokenNumbers(
        loss=np.isposinf(newest_loss),
        norm=np.isposinf(newest_norm),
        spoke=int((~np.isnan(newest_loss)).sum()),
        spoke_norm=int((~np.isnan(newest_norm)).sum()),
        onset_s=onset_s,
        sound_until_s=_sound_until_s(window, "train_loss" if deciding is loss else "train_grad_norm", onset_s),
        settled=_settled(window, onset, onset_s),
    )


def sound_until_s(window: Window, times_s: Floats, line: int) -> float:
    """Return a time before which no parameter was spoiled, of a loss that is off since a line of steps.

    A loss shows what the gradients of the step before made of the parameters, however long steps are.
    """
    return float(times_s[max(line - 1, 0)]) - LATE_INTERVALS * window.interval_s


def _sound_until_s(window: Window, metric: str, onset_s: float) -> float:
    lines, unknown_s = window.steps.values.get(metric), onset_s - LATE_INTERVALS * window.interval_s
    if lines is None:
        return unknown_s
    broken = np.flatnonzero(np.isposinf(lines[-DEPTH_ROWS:]).any(axis=1))
    if not len(broken):
        return unknown_s
    first = max(len(lines) - DEPTH_ROWS, 0) + int(broken[0])
    return min(unknown_s, sound_until_s(window, window.steps.times_s, first))


def first_broken(window: Window) -> list[int]:
    """Return the columns of the ranks whose gradient before the reduction was the first that was not finite.

    By step if the ranks' reports are aligned by step, else by row, where only a single node counts. [] if no rank was
    first, or none can be singled out.
    """
    local = window.steps.values.get("train_local_grad_norm")
    if local is not None:
        lines = np.flatnonzero(np.isposinf(local[-DEPTH_ROWS:]).any(axis=1))
        if len(lines):
            row = local[-DEPTH_ROWS:][lines[0]]
            return _of_one_node(window, np.isposinf(row)) if np.isfinite(row).any() else []
    rows = window.device.get("train_local_grad_norm")
    if rows is None:
        return []
    broken: NDArray[np.bool_] = np.isposinf(rows[-DEPTH_ROWS:])
    return _of_one_node(window, np.asarray(broken.any(axis=0)))


def _of_one_node(window: Window, columns: NDArray[np.bool_]) -> list[int]:
    found = np.flatnonzero(columns)
    return [int(i) for i in found] if len(np.unique(window.node_of[found])) == 1 else []


def _settled(window: Window, onset: int, onset_s: float) -> bool:
    if window.now_s - onset_s > max(SETTLE_INTERVALS * window.interval_s, SETTLE_FLOOR_S):
        return True
    after: NDArray[np.bool_] = np.zeros(len(window.series), dtype=np.bool_)
    for values in window.device.values():
        later: Floats = values[onset + 1 :]
        after |= np.isfinite(later).any(axis=0)
    return bool(after.all())
