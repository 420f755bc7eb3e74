"""The columns in memory: one array per metric over a common grid of times.

Rows of different agents that end within half an interval of each other share one line of the grid, so
that agents need not agree on a clock tick. The newest ``depth`` lines are kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_eye.schema import metrics as catalogue

Floats = NDArray[np.floating[Any]]


class Grid:
    """Values of many metrics for a growing set of columns (series or nodes), line by line.

    Arrays hold ``depth`` lines and a quarter more: when they are full the newest ``depth`` lines move to
    the front, so that a view of the past is always one slice and never a copy.
    """

    def __init__(self, interval_s: float, depth: int) -> None:
        self.interval_s = interval_s
        self._depth = depth
        self._capacity = depth + max(depth // 4, 16)
        self._times = np.full(self._capacity, np.nan)
        self._lines = 0
        self._columns = 0
        self._arrays: dict[str, Floats] = {}
        self.late_total = 0  # rows older than the oldest line kept

    @property
    def columns(self) -> int:
        """How many columns there are."""
        return self._columns

    def add_columns(self, count: int) -> int:
        """Add ``count`` unobserved columns and return the index of the first."""
        first = self._columns
        self._columns += count
        for name, old in self._arrays.items():
            if self._columns > old.shape[1]:
                self._arrays[name] = self._widened(old)
        return first

    def line(self, time_s: float) -> int | None:
        """Return the index of the line for a row that ended at ``time_s``; None when that is too long ago.

        A line returned is valid until the next call.
        """
        tolerance = self.interval_s / 2
        if self._lines == 0 or time_s > self._times[self._lines - 1] + tolerance:
            if self._lines == self._capacity:
                self._shift()
            self._times[self._lines] = time_s
            self._lines += 1
            return self._lines - 1
        known = self._times[: self._lines]
        if time_s < known[0] - tolerance and self._lines >= self._depth:
            self.late_total += 1
            return None
        after = int(np.searchsorted(known, time_s))
        near = [i for i in (after - 1, after) if 0 <= i < self._lines]
        nearest = min(near, key=lambda i: abs(float(known[i]) - time_s))
        if abs(float(known[nearest]) - time_s) <= tolerance:
            return nearest
        return self._insert(after, time_s)

    def write(self, line: int, name: str, columns: NDArray[np.intp], values: Floats) -> None:
        """Set metric ``name`` of ``columns`` in a line."""
        array = self._arrays.get(name)
        if array is None:
            dtype = np.float64 if catalogue.BY_NAME[name].exact else np.float32
            array = np.full((self._capacity, max(self._columns, 8)), np.nan, dtype)
            self._arrays[name] = array
        array[line, columns] = values

    def times(self) -> Floats:
        """Return the newest lines' times, oldest first: (T,)."""
        return _sealed(self._times[self._start() : self._lines])

    def view(self, name: str) -> Floats:
        """Return the newest lines of a metric: (T, columns). KeyError when nobody ever sent it."""
        return _sealed(self._arrays[name][self._start() : self._lines, : self._columns])

    def names(self) -> tuple[str, ...]:
        """Return the metrics seen so far."""
        return tuple(self._arrays)

    def latest(self, name: str) -> Floats:
        """Return each column's newest observed value within the last four lines: (columns,), NaN: none."""
        recent = self._arrays[name][max(self._lines - 4, 0) : self._lines, : self._columns]
        result = np.full(self._columns, np.nan)
        for row in recent:
            np.copyto(result, row, where=~np.isnan(row))
        return result

    def _start(self) -> int:
        return max(self._lines - self._depth, 0)

    def _widened(self, old: Floats) -> Floats:
        wide = np.full((self._capacity, max(self._columns, 2 * old.shape[1])), np.nan, old.dtype)
        wide[:, : old.shape[1]] = old
        return wide

    def _shift(self) -> None:
        start = self._capacity - self._depth
        for array in (self._times, *self._arrays.values()):
            array[: self._depth] = array[start:].copy()
            array[self._depth :] = np.nan
        self._lines = self._depth

    def _insert(self, at: int, time_s: float) -> int:
        """Open a line between two others: a row that arrived late, of a moment when nobody else was heard."""
        if self._lines == self._capacity:
            self._shift()
            at = max(at - (self._capacity - self._depth), 0)
        for array in (self._times, *self._arrays.values()):
            array[at + 1 : self._lines + 1] = array[at : self._lines].copy()
            array[at] = np.nan
        self._times[at] = time_s
        self._lines += 1
        return at


def _sealed(view: Floats) -> Floats:
    view = view.view()
    view.flags.writeable = False
    return view
