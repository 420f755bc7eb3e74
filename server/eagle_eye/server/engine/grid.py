"""In-memory columns: one plane per metric over a common grid of times.

Rows of different agents that end within half an interval of each other share one line of the grid, so agents' clock
ticks need not be aligned. The newest ``depth`` lines are kept.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.types import Floats
from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.metrics import Scope

Columns = NDArray[np.intp]

LINES_MIN = 48  # the minimum for detectors
COLUMNS_FIRST = 8
MAPPED_BYTES_MIN = 1 << 20  # smaller arrays use the allocator


class _Planes:
    """The metrics of one precision: (metrics, capacity, columns), each plane with its own base.

    Row r of plane p is the grid's line ``base[p] + r``. A plane holds some lines more than ``depth``; when it is full
    its newest lines move to the front, so that a view of the past is always one slice. Planes begin at different
    offsets, so they never all move at the same time. Planes that were never written take no memory, and rows take it
    only when their line begins: until then they are neither written nor read.
    """

    def __init__(self, names: Sequence[str], dtype: Any) -> None:
        self.names = tuple(names)
        self.dtype = dtype
        self.place = {name: at for at, name in enumerate(names)}
        self.used = np.zeros(len(names), dtype=np.bool_)
        self.base = np.zeros(len(names), dtype=np.intp)
        self.cells: Floats = np.empty((len(names), 0, 0), dtype)
        self.sealed = _sealed(self.cells[:])  # the same, read-only
        self.begun_rows = np.zeros(len(names), dtype=np.intp)  # the first row of each plane that holds nothing yet
        self.full = 0  # the first line for which some plane has no room
        self.begun = 0  # the first line that all planes reach back to
        self.ready = 0  # the first line that some plane has not begun
        self.planes_used: tuple[int, ...] = ()

    @property
    def capacity(self) -> int:
        """Number of lines in a plane."""
        return int(self.cells.shape[1])

    @property
    def bytes_per_line(self) -> int:
        """Size of a line in bytes."""
        return len(self.planes_used) * int(self.cells.shape[2]) * int(self.cells.itemsize)

    def resize(self, capacity: int, width: int, start: int, end: int) -> None:
        """Resize, keeping lines ``start`` to ``end`` of the planes in use."""
        self.prepare(end)
        cells = _untouched((len(self.names), capacity, width), self.dtype)
        for plane in np.flatnonzero(self.used):
            kept = self.cells[plane, max(start - self.base[plane], 0) : end - self.base[plane]]
            first = max(start, int(self.base[plane]))
            offset = _stagger(int(plane), capacity - (end - first))
            cells[plane, offset : offset + len(kept), : kept.shape[1]] = kept
            cells[plane, offset : offset + len(kept), kept.shape[1] :] = np.nan
            self.base[plane] = first - offset
            self.begun_rows[plane] = offset + len(kept)
        self.cells, self.sealed = cells, _sealed(cells[:])
        self.measure()

    def measure(self) -> None:
        """Update the range of lines for which all planes in use have room."""
        base = self.base[self.used]
        self.full = int(base.min()) + self.capacity if len(base) else 0
        self.begun = int(base.max()) if len(base) else 0
        self.ready = int((base + self.begun_rows[self.used]).min()) if len(base) else 0

    def begin(self, plane: int, start: int) -> None:
        """Make a plane usable from a line on."""
        self.used[plane] = True
        self.planes_used = tuple(np.flatnonzero(self.used).tolist())
        offset = _stagger(plane, self.capacity // 5)
        self.base[plane] = start - offset
        self.begun_rows[plane] = offset
        self.measure()

    def prepare(self, end: int) -> None:
        """Mark the lines before ``end`` that have not begun as unobserved."""
        if end <= self.ready:
            return
        planes = np.flatnonzero(self.used)
        rows = np.minimum(end - self.base[planes], self.capacity)
        behind = rows - self.begun_rows[planes]
        if behind.max(initial=0) == 1:  # the usual case: one more line
            fresh = behind == 1
            self.cells[planes[fresh], rows[fresh] - 1] = np.nan
        else:
            for plane, row in zip(planes.tolist(), rows.tolist(), strict=True):
                self.cells[plane, self.begun_rows[plane] : row] = np.nan
        self.begun_rows[planes] = np.maximum(rows, self.begun_rows[planes])
        self.measure()

    def reach(self, plane: int, start: int, end: int) -> None:
        """Make room in a plane up to line ``end``."""
        base = int(self.base[plane])
        if end - base <= self.capacity:
            return
        cells = self.cells[plane]
        kept = cells[max(start - base, 0) : self.begun_rows[plane]]
        first = max(start, base)
        cells[: len(kept)] = kept.copy()
        self.base[plane] = first
        self.begun_rows[plane] = len(kept)


class Grid:
    """Values of one scope's metrics for a growing set of columns (series, nodes or links), line by line."""

    def __init__(self, scope: Scope, interval_s: float, depth: int) -> None:
        self.interval_s = interval_s
        self._depth = depth
        self._times: NDArray[np.float64] = np.full(2 * depth + 16, np.nan)
        self._first = 0  # the first line in ``_times``; lines are numbered from the start of the grid
        self._end = 0  # one past the newest line
        self._newest_s, self._before_s = -math.inf, -math.inf  # when the newest line ended, and the one before
        self._columns = 0
        names = catalogue.names(scope)
        self._exact = _Planes([n for n in names if catalogue.BY_NAME[n].exact], np.float64)
        self._plain = _Planes([n for n in names if not catalogue.BY_NAME[n].exact], np.float32)
        self._routes: dict[tuple[str, ...], tuple[tuple[_Planes, NDArray[np.intp], NDArray[np.intp]], ...]] = {}
        self.late_total = 0  # rows older than the oldest line kept

    @property
    def columns(self) -> int:
        """Number of columns."""
        return self._columns

    @property
    def depth(self) -> int:
        """Number of lines kept: as many as requested, fewer if the fleet is too large for that."""
        return self._depth

    def add_columns(self, count: int) -> int:
        """Add ``count`` unobserved columns and return the index of the first."""
        first = self._columns
        self._columns += count
        width = self._plain.cells.shape[2]
        if self._columns > width:
            self._fit(max(self._columns, 2 * width, COLUMNS_FIRST))
        return first

    def line(self, time_s: float, rows: int = 1) -> int | None:
        """Return the line number for rows that ended at ``time_s``; None, and counted, if that is too long ago.

        The number is valid until the next call.
        """
        tolerance = self.interval_s / 2
        if time_s > self._newest_s + tolerance:
            return self._append(time_s)
        if time_s >= self._newest_s - tolerance and time_s > (self._newest_s + self._before_s) / 2:
            return self._end - 1  # the usual case: the line being filled
        known = self.times()
        if time_s < known[0] - tolerance and len(known) >= self._depth:
            self.late_total += rows
            return None
        after = int(np.searchsorted(known, time_s))
        near = [i for i in (after - 1, after) if 0 <= i < len(known)]
        nearest = min(near, key=lambda i: abs(float(known[i]) - time_s))
        if abs(float(known[nearest]) - time_s) <= tolerance:
            return self._start() + nearest
        return self._insert(after, time_s)

    def write(self, line: int, metrics: Sequence[str], columns: slice | Columns, values: Floats) -> None:
        """Set metrics of some columns in a line, no column twice; ``values`` is (metrics, columns).

        KeyError for a metric of another scope.
        """
        for planes, places, rows in self._route(tuple(metrics)):
            if line >= planes.full:
                for plane in places.tolist():
                    planes.reach(plane, self._start(), self._end)
                planes.measure()
            planes.prepare(line + 1)
            at = line - planes.base[places]
            if not isinstance(columns, slice):  # many nodes at once: plane by plane is faster than one combined index
                for plane, place, row in zip(places.tolist(), at.tolist(), rows.tolist(), strict=True):
                    if place >= 0:
                        planes.cells[plane, place][columns] = values[row]
            elif line >= planes.begun:
                planes.cells[places, at, columns] = values[rows]
            else:
                kept = at >= 0
                planes.cells[places[kept], at[kept], columns] = values[rows[kept]]

    def times(self) -> Floats:
        """Return the newest lines' times, oldest first: (T,)."""
        return _sealed(self._times[self._start() - self._first : self._end - self._first])

    def view(self, name: str) -> Floats:
        """Return the newest lines of a metric: (T, columns). KeyError if it was never sent."""
        planes = self._plain if name in self._plain.place else self._exact
        plane = planes.place[name]
        if not planes.used[plane]:
            raise KeyError(name)
        if self._end > planes.full:
            planes.reach(plane, self._start(), self._end)
            planes.measure()
        planes.prepare(self._end)
        base = int(planes.base[plane])
        start = max(self._start() - base, 0)
        return planes.sealed[plane, start : self._end - base, : self._columns]

    def views(self) -> dict[str, Floats]:
        """Return ``view`` of every metric seen so far, by name, in one pass: faster for many small jobs."""
        found: dict[str, Floats] = {}
        start, end, columns = self._start(), self._end, self._columns
        for planes in (self._exact, self._plain):
            if end > planes.full:
                for plane in planes.planes_used:
                    planes.reach(plane, start, end)
                planes.measure()
            planes.prepare(end)
            bases = planes.base.tolist()
            for plane in planes.planes_used:
                base = bases[plane]
                found[planes.names[plane]] = planes.sealed[plane, max(start - base, 0) : end - base, :columns]
        return found

    def names(self) -> tuple[str, ...]:
        """Return the metrics seen so far."""
        return tuple(planes.names[plane] for planes in (self._exact, self._plain) for plane in planes.planes_used)

    def latest(self, name: str, since_s: float = -np.inf) -> Floats:
        """Return each column's newest value in the last four lines, from ``since_s`` on: (columns,), NaN: none."""
        result = np.full(self._columns, np.nan)
        for time_s, row in zip(self.times()[-4:], self.view(name)[-4:], strict=True):
            if time_s >= since_s:
                np.copyto(result, row, where=~np.isnan(row))
        return result

    def _start(self) -> int:
        return max(self._end - self._depth, 0)

    def _append(self, time_s: float) -> int:
        if self._end - self._first == len(self._times):
            kept = self._times[self._start() - self._first :].copy()
            self._times[: len(kept)] = kept
            self._first = self._start()
        self._times[self._end - self._first] = time_s
        self._end += 1
        self._before_s, self._newest_s = self._newest_s, time_s
        return self._end - 1

    def _route(self, metrics: tuple[str, ...]) -> tuple[tuple[_Planes, NDArray[np.intp], NDArray[np.intp]], ...]:
        """Return for each precision the planes of a block's metrics, and the block's rows."""
        route = self._routes.get(metrics)
        if route is None:
            found = []
            known = {*self._exact.names, *self._plain.names}
            if not known.issuperset(metrics):
                raise KeyError(next(m for m in metrics if m not in known))
            for planes in (self._exact, self._plain):
                rows = np.array([i for i, m in enumerate(metrics) if m in planes.place], dtype=np.intp)
                places = np.array([planes.place[metrics[i]] for i in rows], dtype=np.intp)
                if len(rows):
                    for plane in places[~planes.used[places]].tolist():
                        planes.begin(plane, self._start())
                    found.append((planes, places, rows))
            route = self._routes[metrics] = tuple(found)
        return route

    def limit(self, lines: int) -> None:
        """Keep at most this many lines from now on, though never fewer than detectors need; the newest stay."""
        depth = min(self._depth, max(lines, LINES_MIN))
        if depth < self._depth:
            self._depth = depth
            self._fit(self._plain.cells.shape[2])

    @property
    def bytes_per_line(self) -> int:
        """Size of each line in bytes."""
        return self._plain.bytes_per_line + self._exact.bytes_per_line

    def _fit(self, width: int) -> None:
        """Resize to a width, and the number of lines to keep."""
        for kind in (self._exact, self._plain):
            if kind.cells.shape[1:] != (_capacity(self._depth), width):
                kind.resize(_capacity(self._depth), width, self._start(), self._end)

    def _insert(self, at: int, time_s: float) -> int:
        """Insert a line between two others, for a late row of a time without other rows."""
        line = self._start() + at
        self._append(float(self._times[self._end - 1 - self._first]))
        row = line - self._first
        self._times[row + 1 : self._end - self._first] = self._times[row : self._end - 1 - self._first].copy()
        self._times[row] = time_s
        self._before_s = float(self._times[self._end - 2 - self._first])
        for planes in (self._exact, self._plain):
            for plane in np.flatnonzero(planes.used).tolist():
                planes.reach(plane, self._start(), self._end)
                planes.measure()
                planes.prepare(self._end)
                row = line - int(planes.base[plane])
                if row >= 0:
                    cells = planes.cells[plane]
                    cells[row + 1 : self._end - planes.base[plane]] = cells[
                        row : self._end - 1 - planes.base[plane]
                    ].copy()
                    cells[row] = np.nan
        return line


def _capacity(depth: int) -> int:
    return depth + max(depth // 4, 16)


def _untouched(shape: tuple[int, ...], dtype: Any) -> Floats:
    """Return an array that takes memory only as it is written, in small pages.

    NumPy requests huge pages, one of which would be taken by the first rows of each plane: too many in a large fleet.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < MAPPED_BYTES_MIN:
        return np.empty(shape, dtype)
    memory = mmap.mmap(-1, size)
    with contextlib.suppress(AttributeError, OSError):  # kernels without huge pages need not decline them
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)


def _stagger(plane: int, room: int) -> int:
    """Return a plane's offset within its spare room: different for each, so that they fill up at different times."""
    return (7 * plane) % room if room > 0 else 0


def _sealed(view: Floats) -> Floats:
    """Make a fresh view read-only."""
    view.flags.writeable = False
    return view
