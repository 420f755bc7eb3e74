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

CELLS_MAX = 512 * 1024 * 1024  # values that one grid may hold: a larger fleet is remembered for a shorter time
LINES_MIN = 48  # what detectors need at least
COLUMNS_FIRST = 8


class _Column:
    """One metric's array. Its row r is the grid's line ``base + r``: each moves to the front in its own time.

    Arrays hold some lines more than ``depth``, each a different number: when one is full its newest lines move to the
    front, so that a view of the past is always one slice, and never do all arrays move in the same moment.
    """

    __slots__ = ("array", "base")

    def __init__(self, array: Floats, base: int) -> None:
        self.array = array
        self.base = base


class Grid:
    """Values of many metrics for a growing set of columns (series or nodes), line by line."""

    def __init__(self, interval_s: float, depth: int) -> None:
        self.interval_s = interval_s
        self._depth = depth
        self._times = _Column(np.full(_capacity(depth, 0), np.nan), 0)
        self._end = 0  # one past the newest line; lines are numbered from the grid's beginning
        self._columns = 0
        self._metrics: dict[str, _Column] = {}
        self.late_total = 0  # rows older than the oldest line kept

    @property
    def columns(self) -> int:
        """How many columns there are."""
        return self._columns

    @property
    def depth(self) -> int:
        """How many lines are kept: as many as asked for, fewer where a fleet is too large for that."""
        return self._depth

    def add_columns(self, count: int) -> int:
        """Add ``count`` unobserved columns and return the index of the first."""
        first = self._columns
        self._columns += count
        for column in self._metrics.values():
            if self._columns > column.array.shape[1]:
                width = max(self._columns, 2 * column.array.shape[1])
                wide = np.full((len(column.array), width), np.nan, column.array.dtype)
                wide[:, : column.array.shape[1]] = column.array
                column.array = wide
        self._fit()
        return first

    def line(self, time_s: float) -> int | None:
        """Return the number of the line for a row that ended at ``time_s``; None when that is too long ago.

        A number returned is valid until the next call.
        """
        tolerance = self.interval_s / 2
        known = self.times()
        if len(known) == 0 or time_s > known[-1] + tolerance:
            self._end += 1
            self._row(self._times)[...] = time_s
            return self._end - 1
        if time_s < known[0] - tolerance and len(known) >= self._depth:
            self.late_total += 1
            return None
        after = int(np.searchsorted(known, time_s))
        near = [i for i in (after - 1, after) if 0 <= i < len(known)]
        nearest = min(near, key=lambda i: abs(float(known[i]) - time_s))
        if abs(float(known[nearest]) - time_s) <= tolerance:
            return self._start() + nearest
        return self._insert(after, time_s)

    def write(self, line: int, name: str, columns: NDArray[np.intp], values: Floats) -> None:
        """Set metric ``name`` of ``columns`` in a line."""
        column = self._metrics.get(name)
        if column is None:
            dtype = np.float64 if catalogue.BY_NAME[name].exact else np.float32
            width = max(self._columns, COLUMNS_FIRST)
            lines = _capacity(self._depth, len(self._metrics) + 1)
            column = _Column(np.full((lines, width), np.nan, dtype), self._start())
            self._metrics[name] = column
            self._fit()
        self._reach(column)
        if line >= column.base:
            column.array[line - column.base, columns] = values

    def times(self) -> Floats:
        """Return the newest lines' times, oldest first: (T,)."""
        return self._view(self._times)

    def view(self, name: str) -> Floats:
        """Return the newest lines of a metric: (T, columns). KeyError when nobody ever sent it."""
        return self._view(self._metrics[name])[:, : self._columns]

    def names(self) -> tuple[str, ...]:
        """Return the metrics seen so far."""
        return tuple(self._metrics)

    def latest(self, name: str) -> Floats:
        """Return each column's newest observed value within the last four lines: (columns,), NaN: none."""
        result = np.full(self._columns, np.nan)
        for row in self.view(name)[-4:]:
            np.copyto(result, row, where=~np.isnan(row))
        return result

    def _start(self) -> int:
        return max(self._end - self._depth, 0)

    def _view(self, column: _Column) -> Floats:
        self._reach(column)
        view = column.array[self._start() - column.base : self._end - column.base].view()
        view.flags.writeable = False
        return view

    def _row(self, column: _Column) -> Floats:
        self._reach(column)
        return column.array[self._end - 1 - column.base : self._end - column.base]

    def _reach(self, column: _Column) -> None:
        """Make room in an array up to the newest line, and fill what it has not seen with NaN."""
        array, start = column.array, self._start()
        if self._end - column.base <= len(array):
            return
        kept = array[max(start - column.base, 0) :]
        array[: len(kept)] = kept.copy()
        array[len(kept) :] = np.nan
        column.base = max(start, column.base)

    def _fit(self) -> None:
        """Keep fewer lines where so many columns would take too much memory."""
        width = max((column.array.shape[1] for column in self._metrics.values()), default=0)
        lines = CELLS_MAX // max(width * len(self._metrics), 1)
        if lines >= _capacity(self._depth, len(self._metrics)) or self._depth <= LINES_MIN:
            return
        self._depth = max(int(lines / 1.5), LINES_MIN)
        for place, column in enumerate(self._metrics.values(), start=1):
            kept = self._view(column)
            array = np.full((_capacity(self._depth, place), column.array.shape[1]), np.nan, column.array.dtype)
            array[: len(kept)] = kept
            column.array, column.base = array, self._start()

    def _insert(self, at: int, time_s: float) -> int:
        """Open a line between two others: a row that arrived late, of a moment when nobody else was heard."""
        line = self._start() + at
        self._end += 1
        for column in (self._times, *self._metrics.values()):
            self._reach(column)
            row = line - column.base
            if row < 0:
                continue
            column.array[row + 1 : self._end - column.base] = column.array[row : self._end - 1 - column.base].copy()
            column.array[row] = np.nan
        self._times.array[line - self._times.base] = time_s
        return line


def _capacity(depth: int, place: int) -> int:
    """Return how many lines an array holds: ``depth`` and some more, another number for each metric's place."""
    slack = max(depth // 4, 16)
    return depth + slack + (5 * place) % slack
