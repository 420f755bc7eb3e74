"""In-memory columns: one plane per metric, over a common grid of times, or aligned by training step.

Rows of different agents that end within half an interval of each other share one line of the grid, so agents' clock
ticks need not be aligned. The newest ``depth`` lines are kept.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.medians import median_of
from eagle_eye.detectors.signs.peers import group_members, median_of_mates
from eagle_eye.detectors.types import Curve, Floats, Integers, Steps
from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.metrics import Scope

# Converts rows to steps: ranks' reports aligned by training step, and the job's own curve by step.
#
# Rows of different nodes end at different moments and nodes' clocks differ, while step numbers match across nodes. Rows
# are processed once they are complete (a little late); each rank's mean over the steps it finished since its last row
# is written to the lines of just these steps.

# Metrics that a rank reports per step. The first group is kept for each rank, the second also in the job's curve.
STEP_METRICS = (
    "train_compute_seconds",
    "train_data_wait_seconds",
    "nccl_collective_seconds",
    "nccl_reduce_scatter_seconds",
    "train_step_seconds",
    "train_work_units",
    "train_local_grad_norm",
    "train_parameter_checksum",
    "train_loss",
    "train_grad_norm",
    "train_tokens_per_second",
)
CURVE_METRICS = (
    "train_step_seconds",
    "train_loss",
    "train_grad_norm",
    "train_tokens_per_second",
    "train_compute_seconds",
    "train_data_wait_seconds",
    "nccl_collective_seconds",
)
LINES_KEPT = 256  # steps (or groups of steps) for which each rank's values are kept
CURVE_KEPT, CURVE_MIN = 8_192, 1_024  # and the job's medians; fewer with very many jobs, but at least CURVE_MIN
COURSE_FIRST = 256  # initial capacity in medians
CURVE_LINE_BYTES = 8 * (2 + len(CURVE_METRICS))
CELLS_MAX = 128 * 1024 * 1024  # initial values in memory per job: fewer lines for more ranks
STEP_LINES_MIN = 32
BACKFILL_MAX = 8  # lines that one row may fill: a row after a long gap says little about each of them
PACE_ROWS = 2  # rows with progress before the number of steps per row is known
SETTLED_LINES = 1  # the newest line may still lack ranks


class StepGrid:
    """One attempt's steps, fed with rows of the time grid in order; ``steps`` and ``curve`` are the detectors' view.

    ``before`` is the curve so far of an attempt of which nothing else was kept.
    """

    def __init__(self, before: Curve | None = None) -> None:
        self._before = before
        self._columns = 0
        self._depth = self._depth_max = LINES_KEPT
        self._width: float = 0.0  # steps per line; 0: not known yet
        self._waiting: list[tuple[float, dict[str, Floats]]] = []
        self._number: NDArray[np.float64] = np.zeros(0)
        self._times_s: NDArray[np.float64] = np.zeros(0)
        self._arrays: dict[str, Floats] = {}
        self._relative: Floats = np.zeros((0, 0), np.float32)
        self._lines = 0
        self._settled = 0  # lines before this one are in the relative values and the curve
        self._last: NDArray[np.float64] = np.zeros(0)  # each rank's newest step
        self._rows_per_step: list[float] = []
        self._course: NDArray[np.float64] = np.empty((2 + len(CURVE_METRICS), 0))
        self._course_kept, self._course_lines = CURVE_KEPT, 0
        self._on_course: set[str] = set()
        self._members_of: Integers | None = None
        self._members_are: list[Integers] = []

    def add_row(self, time_s: float, row: Mapping[str, Floats], roles: Integers) -> None:
        """Process one complete row of the time grid: each metric's values (S,), NaN if not observed."""
        reported = row.get("train_step")
        if reported is None:
            return
        steps = np.where(np.isfinite(reported), reported, np.nan).astype(np.float64)
        if len(steps) != self._columns:
            self._widen(len(steps))
        values = {m: np.array(row[m]) for m in STEP_METRICS if m in row}
        values["train_step"] = steps
        if self._width == 0.0:
            self._waiting.append((time_s, values))
            self._learn_width(steps)
            if self._width == 0.0:
                return
            waiting, self._waiting = self._waiting, []
            self._last[:] = np.nan
            for earlier_s, earlier in waiting:
                self._place(earlier_s, earlier)
        else:
            self._place(time_s, values)
        self._settle(roles)

    def completed_by(self, steps: Floats) -> bool:
        """Whether these newest reports (S,), NaN for none, complete an incomplete step and begin no new one."""
        if len(steps) != len(self._last):
            return False
        reached = np.where(np.isnan(steps), self._last, steps)
        return bool((reached == reached[0]).all() and (self._last < reached[0]).any())

    def steps(self) -> Steps:
        """Return the settled steps: (K,) and (K, S), views."""
        start = max(self._settled - self._depth, 0)
        return Steps(
            number=self._number[start : self._settled],
            times_s=self._times_s[start : self._settled],
            values={name: array[start : self._settled] for name, array in self._arrays.items()},
            relative_compute=self._relative[start : self._settled],
        )

    def curve(self) -> Curve:
        """Return the job's curve: views."""
        if self._before is not None and self._course_lines == 0:
            return self._before
        course = self._course[:, max(self._course_lines - self._course_kept, 0) : self._course_lines]
        return Curve(
            number=course[0],
            times_s=course[1],
            values={name: course[2 + place] for place, name in enumerate(CURVE_METRICS) if name in self._on_course},
        )

    @property
    def bytes_per_line(self) -> int:
        """Memory per line of steps in bytes, over everything kept."""
        return sum(array.itemsize for array in (self._relative, *self._arrays.values())) * self._columns

    def limit(self, lines: int, curve_lines: int) -> None:
        """Keep at most this many lines of each from now on, but never too few to judge by; the newest stay."""
        self._depth_max = min(self._depth_max, max(lines, STEP_LINES_MIN))
        if self._depth_max < self._depth:
            self._depth = self._depth_max
            start, capacity = max(self._lines - self._depth, 0), _step_lines_allocated(self._depth)
            self._number = _newest(self._number, start, self._lines, capacity)
            self._times_s = _newest(self._times_s, start, self._lines, capacity)
            self._relative = _newest(self._relative, start, self._lines, capacity)
            self._arrays = {n: _newest(a, start, self._lines, capacity) for n, a in self._arrays.items()}
            self._settled, self._lines = max(self._settled - start, 0), self._lines - start
        kept = min(self._course_kept, max(curve_lines, CURVE_MIN))
        if kept < self._course_kept:
            newest = self._course[:, max(self._course_lines - kept, 0) : self._course_lines]
            self._course, self._course_kept, self._course_lines = newest.copy(), kept, newest.shape[1]

    def _note_course(self, line: int) -> None:
        """Add a line's medians over the ranks to the job's curve."""
        if self._course_lines == self._course.shape[1]:
            self._make_room()
        column = self._course[:, self._course_lines]
        column[:] = np.nan
        column[0], column[1] = self._number[line], self._times_s[line]
        for place, name in enumerate(CURVE_METRICS):
            values = self._arrays.get(name)
            if values is not None:
                known = values[line][~np.isnan(values[line])]
                if len(known):
                    column[2 + place] = median_of(known)
                    self._on_course.add(name)
        self._course_lines += 1

    def _make_room(self) -> None:
        """Grow the job's curve by doubling, up to its limit: most jobs are short."""
        kept = self._course[:, -self._course_kept :]
        self._course_lines = kept.shape[1]
        room = min(max(2 * self._course_lines, COURSE_FIRST), _step_lines_allocated(self._course_kept))
        self._course = np.empty((len(kept), room))
        self._course[:, : self._course_lines] = kept

    def _learn_width(self, steps: Floats) -> None:
        """Learn from the first rows how many steps one row covers: a line holds as many, at least one."""
        before = self._last.copy()
        self._last = np.fmax(before, steps)
        grown = (steps - before)[np.isfinite(steps) & np.isfinite(before)]
        grown = grown[grown > 0]
        if len(grown):
            self._rows_per_step.append(float(np.median(grown)))
        if len(self._rows_per_step) >= PACE_ROWS:
            self._width = max(1.0, float(np.round(np.median(self._rows_per_step))))

    def _place(self, time_s: float, values: Mapping[str, Floats]) -> None:
        steps = values["train_step"]
        self._notice_rollback(steps)
        fresh = np.isfinite(steps) & ~(steps <= self._last)  # a rank's first row counts: its last is NaN
        if not fresh.any():
            return
        last = np.floor(steps / self._width)
        first = np.where(np.isfinite(self._last), np.minimum(np.floor(self._last / self._width) + 1, last), last)
        newest = float(last[fresh].max())
        for number in np.arange(max(float(first[fresh].min()), newest - BACKFILL_MAX + 1), newest + 1):
            ranks = fresh & (first <= number) & (number <= last)
            if ranks.any():
                line = self._line((number + 1) * self._width - 1 if self._width > 1 else number, time_s)
                if line is not None:
                    for name in STEP_METRICS:
                        if name in values:
                            np.copyto(self._array(name)[line], values[name], where=ranks)
        np.copyto(self._last, steps, where=fresh)

    def _notice_rollback(self, steps: Floats) -> None:
        """Start again when most ranks went back to an earlier step: an unannounced restart."""
        known = np.isfinite(steps) & np.isfinite(self._last)
        if known.any() and 2 * int((steps < self._last)[known].sum()) > int(known.sum()):
            self._last[:] = np.nan
            self._lines = self._settled = 0
            for array in (self._number, self._times_s, self._relative, *self._arrays.values()):
                array[...] = np.nan

    def _line(self, number: float, time_s: float) -> int | None:
        """Return the line of a step, None if already settled; steps that were never seen have no line."""
        for line in range(self._lines - 1, self._settled - 1, -1):
            if self._number[line] == number:
                return line
        if self._lines and number < self._number[self._lines - 1]:
            return None
        if self._lines == len(self._number):
            self._shift()
        self._number[self._lines], self._times_s[self._lines] = number, time_s
        self._lines += 1
        return self._lines - 1

    def _settle(self, roles: Integers) -> None:
        """Compute the values relative to peers for the lines that are complete."""
        while self._settled < self._lines - SETTLED_LINES or self._complete():
            line = self._settled
            compute = self._arrays.get("train_compute_seconds")
            if compute is not None:
                own = per_work(compute[line], self._arrays, line)
                with np.errstate(invalid="ignore", divide="ignore"):
                    self._relative[line] = own / median_of_mates(own, self._members(roles))
            self._note_course(line)
            self._settled += 1

    def _members(self, roles: Integers) -> list[Integers]:
        """Return the roles' ranks, recomputed only for other roles."""
        if roles is not self._members_of:
            self._members_of, self._members_are = roles, group_members(roles)
        return self._members_are

    def _complete(self) -> bool:
        """Whether every rank has reported all steps of the oldest unsettled line."""
        return bool(self._settled < self._lines and (self._last >= self._number[self._settled]).all())

    def _array(self, name: str) -> Floats:
        array = self._arrays.get(name)
        if array is None:
            dtype = np.float64 if name == "train_parameter_checksum" else np.float32
            array = np.full((len(self._number), self._columns), np.nan, dtype)
            self._arrays[name] = array
        return array

    def _widen(self, columns: int) -> None:
        extra = columns - self._columns
        self._columns = columns
        self._last = np.concatenate([self._last, np.full(extra, np.nan)])
        if self._lines == 0:
            self._depth = int(np.clip(CELLS_MAX / max(columns * len(STEP_METRICS), 1), STEP_LINES_MIN, self._depth_max))
            capacity = _step_lines_allocated(self._depth)
            self._number, self._times_s = np.full(capacity, np.nan), np.full(capacity, np.nan)
            self._arrays.clear()
            self._relative = np.full((capacity, columns), np.nan, np.float32)
            self._waiting = [(t, {m: _wider(v, columns) for m, v in row.items()}) for t, row in self._waiting]
            return
        self._relative = _wider(self._relative, columns)
        self._arrays = {name: _wider(array, columns) for name, array in self._arrays.items()}

    def _shift(self) -> None:
        start = self._lines - self._depth
        for array in (self._number, self._times_s, self._relative, *self._arrays.values()):
            array[: self._depth] = array[start : self._lines].copy()
            array[self._depth :] = np.nan
        self._settled -= start
        self._lines = self._depth


def _step_lines_allocated(depth: int) -> int:
    return depth + depth // 4


def _newest(array: Any, start: int, end: int, capacity: int) -> Any:
    fresh = np.full((capacity, *array.shape[1:]), np.nan, array.dtype)
    fresh[: end - start] = array[start:end]
    return fresh


def per_work(compute: Floats, arrays: Mapping[str, Floats], line: int) -> Floats:
    """Return compute times divided by the work of the step, if the training code reports it."""
    work = arrays.get("train_work_units")
    if work is None:
        return compute
    units = work[line]
    known = np.isfinite(units) & (units > 0)
    if not known.any():
        return compute
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(known, compute / units, np.nan)


def _wider(array: Any, columns: int) -> Any:
    wide = np.full((*array.shape[:-1], columns), np.nan, array.dtype)
    wide[..., : array.shape[-1]] = array
    return wide


Columns = NDArray[np.intp]

GRID_LINES_MIN = 48  # the minimum for detectors
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
        depth = min(self._depth, max(lines, GRID_LINES_MIN))
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
            if kind.cells.shape[1:] != (_lines_allocated(self._depth), width):
                kind.resize(_lines_allocated(self._depth), width, self._start(), self._end)

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


def _lines_allocated(depth: int) -> int:
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
