"""Finds which of many error counters have grown, when and by how much, by reading only a few rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eagle_eye.detectors.types import Floats, Integers

EDGE_LINES = 3  # rows at the window's ends searched for a value: rows arrive late
GLITCH_COUNT = 1e6  # no working error counter grows by more between two rows: its source changed


class Rise(NamedTuple):
    """A counter's growth between two rows in which it was observed: the later row, and by how much."""

    line: int
    amount: float


def grown(values: Floats) -> Integers:
    """Return the columns of (rows, columns) whose newest value is above their values in the window's past."""
    if len(values) < 2:
        return np.zeros(0, dtype=np.intp)
    now = np.fmax.reduce(values[-EDGE_LINES:], axis=0)
    then = np.fmin(np.fmin.reduce(values[:EDGE_LINES], axis=0), values[len(values) // 2])
    with np.errstate(invalid="ignore"):
        return np.flatnonzero(now > then)


def rises(column: Floats) -> list[Rise]:
    """Return when one counter (rows,) grew and stayed up, oldest first; a decrease is a restart of its source."""
    known = np.flatnonzero(np.isfinite(column))
    values = np.asarray(column, dtype=np.float64)[known]
    change = np.diff(values)
    lowest_after = np.minimum.accumulate(values[::-1])[::-1][1:]  # a glitch falls back below its start
    stayed = (change > 0) & (change < GLITCH_COUNT) & (lowest_after > values[:-1])
    return [Rise(int(known[at + 1]), float(change[at])) for at in np.flatnonzero(stayed).tolist()]
