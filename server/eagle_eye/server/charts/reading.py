"""Reads a metric of some nodes from the history, with a limit on the work. Touches: the history."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from eagle_eye.schema.metrics import MetricSpec
from eagle_eye.server.charts.peer_selection import picked
from eagle_eye.server.charts.windows import Stretch, stretch
from eagle_eye.server.history.history import History, QueryPart, Run
from eagle_eye.server.history.segments.downsampling import BucketSeries, Floats
from eagle_eye.server.history.steps import SeriesKey, SeriesSteps, Statistic, TooManySeries, in_steps
from eagle_eye.server.model.errors import HistoryMoved, Refusal

FRAMES_MAX = 20_000  # for one chart: about a second of work
SERIES_MAX = 4_096
SPARSE = 1.5  # steps between values beyond which the steps are too short for the source
TURN_S = 10.0  # how long a chart waits for its turn


class ReadValues(NamedTuple):
    """The values read. ``nodes`` are those of the second group that fitted the limit.

    ``stretch`` has longer steps than requested if the values are further apart; ``spans`` are the bucket lengths used.
    """

    stretch: Stretch
    series: dict[SeriesKey, SeriesSteps]
    nodes: tuple[str, ...]
    spans: list[QueryPart]


class Turns:
    """Limits the number of concurrent charts, which share the interpreter with ingestion."""

    def __init__(self, count: int = 2) -> None:
        self._free = threading.BoundedSemaphore(count)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Hold a turn. Raises Refusal 503 when none is free in time."""
        if not self._free.acquire(timeout=TURN_S):
            raise Refusal(503, "busy", f"no chart could be drawn within {TURN_S:g} s", {"Retry-After": "5"})
        try:
            yield
        finally:
            self._free.release()


def read(
    history: History,
    metric: MetricSpec,
    statistic: Statistic,
    nodes: tuple[Sequence[str], Sequence[str]],
    wanted: Stretch,
    job: str | None,
    frames_max: int = FRAMES_MAX,
) -> ReadValues:
    """Return the metric of two groups of nodes: all of the first, and of the second as many as the limit allows.

    Without a first group one node is read even if it has more than ``frames_max``. Raises Refusal 400 if that exceeds
    FRAMES_MAX, or the first group ``frames_max``; HistoryUnavailable.
    """
    always, others = nodes
    for last in (False, False, True):
        try:
            return _read(history, metric, statistic, (tuple(always), tuple(others)), wanted, job, frames_max)
        except TooManySeries:
            raise Refusal(400, "too_much", f"more than {SERIES_MAX} series lie in the range") from None
        except HistoryMoved:  # something was found broken; the rest answers
            if last:
                raise
    raise AssertionError  # for the type checker


def _read(
    history: History,
    metric: MetricSpec,
    statistic: Statistic,
    nodes: tuple[tuple[str, ...], tuple[str, ...]],
    wanted: Stretch,
    job: str | None,
    frames_max: int,
) -> ReadValues:
    always, others = nodes
    while True:
        if not always and not others:
            return ReadValues(wanted, {}, (), [])
        names = (*always, *others)
        end_s = np.nextafter(wanted.end_s, 0.0)
        with history.courses(metric, names, wanted.start_s, end_s, job, wanted.step_s, frames_max) as reading:
            if reading.frames > frames_max and len(others) > (0 if always else 1):
                # Counting stops soon after the limit, so this removes rather too many than too few.
                fitting = max(1, len(others) * frames_max // reading.frames)
                others = picked(others, min(fitting, len(others) // 2))
                continue
            most = frames_max if always else max(frames_max, FRAMES_MAX)
            if reading.frames > most:
                raise Refusal(400, "too_much", f"more than {most} frames lie in the range; shorten it")
            courses = _gathered(reading.courses)
            coarse = max([_spacing_s(courses), *(float(span.bucket_s) for span in reading.spans)])
            shown = wanted
            if coarse > SPARSE * wanted.step_s:
                shown = stretch(wanted.start_s, wanted.end_s, wanted.steps, coarse)
            series = in_steps(courses, metric, statistic, shown.start_s, shown.step_s, SERIES_MAX)
            return ReadValues(shown, series, others, reading.spans)


def _gathered(courses: Iterable[Run | BucketSeries]) -> list[Run | BucketSeries]:
    """Merge all runs of a series into one: for frames in no segment each value is a run."""
    found: list[Run | BucketSeries] = []
    times_s: dict[SeriesKey, list[Floats]] = defaultdict(list)
    values: dict[SeriesKey, list[Floats]] = defaultdict(list)
    for course in courses:
        if isinstance(course, BucketSeries):
            found.append(course)
        else:
            times_s[course.node, course.key].append(course.times_s)
            values[course.node, course.key].append(course.values)
    for (node, key), parts in times_s.items():
        whole = np.concatenate(parts)
        order = np.argsort(whole, kind="stable")
        found.append(Run(node, key, whole[order], np.concatenate(values[node, key])[order]))
    return found


def _spacing_s(courses: Sequence[Run | BucketSeries]) -> float:
    """Return the typical distance of a series' values, 0 if unknown."""
    gaps: list[float] = []
    last: dict[SeriesKey, float] = {}
    for course in courses[:SERIES_MAX]:
        key = (course.node, course.key)
        before = last.get(key)
        times_s = course.times_s if before is None else np.concatenate([[before], course.times_s])
        if len(times_s) > 1:
            gaps.append(float(np.median(np.diff(times_s))))
        last[key] = float(course.times_s[-1])
    return float(np.median(gaps)) if gaps else 0.0
