"""Tells whether a run of readings beyond a line is longer than those of healthy peers."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

CHANCE_MAX = 1e-5  # that a healthy series shows such a run: tested every two seconds for each series
MOSTLY_SHARE = 0.6  # of a series' readings beyond the line: then it is no healthy peer
GAP_READINGS = 1  # on the other side of the line, that end no run


def longer_than_peers(times: int, beyond: NDArray[np.bool_], seen: NDArray[np.bool_], *, ongoing: bool = False) -> bool:
    """Return whether healthy series show a run of ``times`` readings in fewer than CHANCE_MAX of looks.

    ``beyond`` and ``seen``, (T, peers), say which rows hold a peer's reading beyond the line, and a reading at all. Of
    runs with a geometric tail the longest among n readings has a probability of about 1/n, and one r times as long of
    n to the power of -r, whether readings depend on the ones before or not; where they do so strongly, n is less than
    the readings, and chance somewhat more frequent. Peers beyond the line in most readings do not count, as they may be
    faulty, too, nor, unless ``ongoing``, do runs that last to the newest reading.
    """
    high, known = (seen & beyond, seen.sum(axis=0)) if ongoing else ended_runs(beyond, seen)
    healthy = high.sum(axis=0) < MOSTLY_SHARE * np.maximum(known, 1)
    longest, readings = _longest(high[:, healthy]), int(known[healthy].sum())
    return times * math.log(max(readings, 2)) >= -math.log(CHANCE_MAX) * max(longest, 1)


def ended_runs(beyond: NDArray[np.bool_], seen: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], NDArray[np.intp]]:
    """Return each peer's readings beyond the line, in order and without a run that goes on, and how many were counted.

    Readings come first in each column, rows without one last: these end no run.
    """
    order = np.argsort(~seen, axis=0, kind="stable")
    read = np.take_along_axis(seen, order, axis=0)
    high = read & np.take_along_axis(beyond, order, axis=0)
    place = np.arange(len(high))[:, None]
    known = np.where(read & ~high, place + 1, 0).max(axis=0, initial=0)
    return high & (place < known), known


def _longest(high: NDArray[np.bool_]) -> int:
    """Return how many True the longest run in any column has; gaps of GAP_READINGS rows end none and do not count."""
    most, run, gap = (np.zeros(high.shape[1], dtype=np.intp) for _ in range(3))
    for row in high:
        gap = np.where(row, 0, gap + 1)
        run = np.where(gap > GAP_READINGS, 0, run + row)
        most = np.maximum(most, run)
    return int(most.max(initial=0))
