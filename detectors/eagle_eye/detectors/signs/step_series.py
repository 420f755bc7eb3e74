"""One of the job's own values by step: real observations of this attempt, newest last."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.types import Curve, Floats

REPEATS_RATIO = 0.5  # with more repetitions, the value is logged every few steps and repeated in between
CHANGES_MIN = 8  # with fewer changes in all, it is constant


class StepSeries(NamedTuple):
    """``line`` (n,) are the curve's lines that carry an observation, ``value`` (n,) the observations, all finite."""

    line: NDArray[np.intp]
    value: Floats


def course(curve: Curve, metric: str, newest: int) -> StepSeries:
    """Return the observations of a metric in the newest lines of a curve, since the last rollback of the job.

    Values that are not finite count as not observed. If a value is logged every few steps and repeated in between, the
    repetitions are not observations.
    """
    start = since_rollback(curve, newest)
    values = curve.values.get(metric)
    if values is None:
        return StepSeries(np.zeros(0, np.intp), np.zeros(0))
    line = start + np.flatnonzero(np.isfinite(values[start:]))
    value = np.asarray(values[line], dtype=np.float64)
    changed = value[1:] != value[:-1]
    changes = int(np.count_nonzero(changed))
    if changes >= CHANGES_MIN and len(changed) - changes > REPEATS_RATIO * len(changed):
        kept = np.concatenate([[True], changed])
        line, value = line[kept], value[kept]
    return StepSeries(line, value)


def since_rollback(curve: Curve, newest: int) -> int:
    """Return the first of the newest lines from which on step numbers only rise: earlier lines are of another run."""
    start = max(len(curve.number) - newest, 0)
    number = curve.number[start:]
    back = np.flatnonzero(number[1:] <= number[:-1])
    return start + int(back[-1]) + 1 if len(back) else start
