"""Converts rows to steps: ranks' reports aligned by training step, and the job's own curve by step.

Rows of different nodes end at different moments and nodes' clocks differ, while step numbers match across nodes. Rows
are processed once they are complete (a little late); each rank's mean over the steps it finished since its last row is
written to the lines of just these steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.medians import median_of
from eagle_eye.detectors.signs.peers import group_members, median_of_mates
from eagle_eye.detectors.types import Curve, Floats, Integers, Steps

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
LINES_MIN = 32
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

    def take(self, time_s: float, row: Mapping[str, Floats], roles: Integers) -> None:
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
        self._depth_max = min(self._depth_max, max(lines, LINES_MIN))
        if self._depth_max < self._depth:
            self._depth = self._depth_max
            start, capacity = max(self._lines - self._depth, 0), _capacity(self._depth)
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
        room = min(max(2 * self._course_lines, COURSE_FIRST), _capacity(self._course_kept))
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
            self._depth = int(np.clip(CELLS_MAX / max(columns * len(STEP_METRICS), 1), LINES_MIN, self._depth_max))
            capacity = _capacity(self._depth)
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


def _capacity(depth: int) -> int:
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
