"""Aggregates a metric's values and buckets into one value per step of a query. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np

from eagle_eye.schema.metrics import MetricKind, MetricSpec
from eagle_eye.server.history.history import Run
from eagle_eye.server.history.segments.downsampling import (
    BucketSeries,
    Floats,
    Summary,
    combine,
    joined,
    summarize,
    taken,
)

Statistic = Literal["last", "min", "max", "mean", "increase"]
SeriesKey = tuple[str, int | str]  # a node, and a device, a link or (-1) itself

_KINDS = {
    "mean": (MetricKind.GAUGE, MetricKind.MASK),
    "increase": (MetricKind.COUNTER,),
}

ROWS_MAX = 4_096  # buckets of a series in memory: beyond this, those of a step are combined


class TooManySeries(Exception):
    """There are more series than allowed."""


class SeriesSteps(NamedTuple):
    """One series: the steps that have a value, counted from 0, and the values."""

    steps: list[int]
    values: list[float]


class _Parts(NamedTuple):
    """What is known of one series: for each part its time, its step and its summary."""

    times_s: list[Floats]
    steps: list[Floats]
    summaries: list[Summary]

    def add(self, times_s: Floats, steps: Floats, summary: Summary) -> None:
        """Add some parts."""
        self.times_s.append(times_s)
        self.steps.append(steps)
        self.summaries.append(summary)

    def length(self) -> int:
        """Return how many parts there are."""
        return sum(map(len, self.steps))

    def together(self, kind: MetricKind) -> tuple[Floats, Floats, Summary]:
        """Return one combined part for each step, in order."""
        steps, times_s = np.concatenate(self.steps), np.concatenate(self.times_s)
        order = np.lexsort((times_s, steps))
        steps, times_s = steps[order], times_s[order]
        starts = np.flatnonzero(np.append(True, steps[1:] != steps[:-1]))
        return times_s[starts], steps[starts], combine(taken(joined(self.summaries), order), starts, kind)


def has(statistic: Statistic, metric: MetricSpec) -> bool:
    """Return whether the statistic applies to the metric: no mean of a counter, no increase of a gauge."""
    return metric.kind in _KINDS.get(statistic, tuple(MetricKind))


def in_steps(
    courses: Iterable[Run | BucketSeries],
    metric: MetricSpec,
    statistic: Statistic,
    start_s: float,
    step_s: float,
    series_max: int,
) -> dict[SeriesKey, SeriesSteps]:
    """Return the statistic of each series in each step (counted from ``start_s``) that has an observation.

    A bucket belongs to the step in which it begins. A counter's increase in a step is relative to the last value before
    it. Raises TooManySeries.
    """
    found: dict[SeriesKey, _Parts] = {}
    for course in courses:
        parts = found.setdefault((course.node, course.key), _Parts([], [], []))
        if len(found) > series_max:
            raise TooManySeries
        steps = np.floor((course.times_s - start_s) / step_s)
        if isinstance(course, BucketSeries):
            parts.add(course.began_s, steps, course.summary)
            if parts.length() > ROWS_MAX:
                began_s, of_steps, summary = parts.together(metric.kind)
                found[course.node, course.key] = _Parts([began_s], [of_steps], [summary])
        else:
            starts = np.flatnonzero(np.append(True, steps[1:] != steps[:-1]))
            parts.add(course.times_s[starts], steps[starts], summarize(course.values, starts, metric.kind, 0))
    return {key: _of_series(parts, metric.kind, statistic) for key, parts in found.items()}


def _of_series(parts: _Parts, kind: MetricKind, statistic: Statistic) -> SeriesSteps:
    _, steps, summary = parts.together(kind)
    values = {"min": summary.low, "max": summary.high}.get(statistic)
    if values is None:
        values = getattr(summary, statistic)
    if statistic == "increase":
        with np.errstate(invalid="ignore"):
            before, first = summary.last[:-1], summary.first[1:]
            values = values + np.append(0.0, np.where(first < before, first, first - before))
    seen = ~np.isnan(values)
    return SeriesSteps(steps[seen].astype(np.int64).tolist(), values[seen].tolist())
