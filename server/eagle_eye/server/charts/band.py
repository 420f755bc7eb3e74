"""Converts series of a metric to a chart: the accused's values and the band of its peers. Pure.

NaN means not observed, which is never the same as 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from eagle_eye.schema.metrics import MetricKind, MetricSpec, Scope
from eagle_eye.server.charts.drawing import Drawing
from eagle_eye.server.charts.peer_selection import Cast
from eagle_eye.server.history.steps import SeriesKey, SeriesSteps, Statistic

LOW, HIGH = 5.0, 95.0  # percentiles that bound the band
BAND_MIN = 3  # minimum number of peers for a band
SILENT_STEPS_MIN = 2  # shorter gaps come from the sampling

Floats = np.ndarray[Any, np.dtype[np.float64]]


class Band(NamedTuple):
    """A chart. All columns have one value for each step; ``seen`` counts the peers' series observed in it."""

    accused: Floats
    low: Floats
    median: Floats
    high: Floats
    seen: Floats
    accused_series: int
    peer_series: int
    not_finite: int  # non-finite values of peers, which are excluded from the band


def statistic_of(drawing: Drawing) -> Statistic:
    """Return the statistic of a step that is drawn."""
    if drawing.form == "growth":
        return "increase"
    if drawing.form == "bits":
        return "max"
    return "mean" if drawing.metric.kind is MetricKind.GAUGE else "last"


def band(series: Mapping[SeriesKey, SeriesSteps], steps: int, drawing: Drawing, cast: Cast) -> Band:
    """Return the accused's values (the mean of its series) and the peers' median and percentiles in each step.

    Only peers' series that do comparable work count. Without other nodes the accused node's other devices are the
    peers.
    """
    keys = list(series)
    values = matrix(series, steps)
    values = _formed(values, drawing)
    own, others = _sides(keys, drawing.metric, cast)
    peers = values[others]
    infinite = np.isinf(peers)
    peers = np.where(infinite, np.nan, peers)
    low, median, high = percentiles(peers)
    return Band(
        mean(values[own]), low, median, high, np.isfinite(peers).sum(axis=0), len(own), len(others), int(infinite.sum())
    )


def matrix(series: Mapping[SeriesKey, SeriesSteps], steps: int) -> Floats:
    """Return the series as rows (S, T), NaN where a step has no value."""
    values = np.full((len(series), steps), np.nan)
    for line, found in enumerate(series.values()):
        at = np.asarray(found.steps, dtype=np.int64)
        inside = (at >= 0) & (at < steps)
        values[line, at[inside]] = np.asarray(found.values)[inside]
    return values


def percentiles(values: Floats) -> tuple[Floats, Floats, Floats]:
    """Return each column's low percentile, median and high percentile; NaN with too few values for a band, or none."""
    seen = np.isfinite(values).sum(axis=0)
    low, median, high = (np.full(values.shape[1], np.nan) for _ in range(3))
    some = seen > 0
    if some.any():
        low[some], median[some], high[some] = np.nanpercentile(values[:, some], (LOW, 50.0, HIGH), axis=0)
        low[seen < BAND_MIN] = high[seen < BAND_MIN] = np.nan
    return low, median, high


def mean(values: Floats) -> Floats:
    """Return each column's mean over observed values; NaN where there are none."""
    known = ~np.isnan(values)
    count = known.sum(axis=0)
    with np.errstate(invalid="ignore"):
        total = np.where(known, values, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def begun(found: Band) -> int:
    """Return the number of leading steps without any observation: the attempt had not begun."""
    seen = ~np.isnan(found.accused) | (found.seen > 0)
    return int(np.argmax(seen)) if seen.any() else 0


def without(found: Band, steps: int) -> Band:
    """Return the band without its first ``steps`` steps."""
    columns = (found.accused, found.low, found.median, found.high, found.seen)
    accused, low, median, high, seen = (column[steps:] for column in columns)
    return found._replace(accused=accused, low=low, median=median, high=high, seen=seen)


def silences(found: Band) -> list[tuple[int, int]]:
    """Return the ranges of steps (first and last) in which peers were observed but the accused was not."""
    if not found.accused_series or not found.peer_series:
        return []
    missing = np.isnan(found.accused) & (found.seen > 0)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], missing.astype(np.int8), [0]])))
    pairs = zip(edges[::2].tolist(), (edges[1::2] - 1).tolist(), strict=True)
    return [(first, last) for first, last in pairs if last - first + 1 >= SILENT_STEPS_MIN]


def _sides(keys: list[SeriesKey], metric: MetricSpec, cast: Cast) -> tuple[list[int], list[int]]:
    """Return the rows of the accused and those of the peers."""
    own: list[int] = []
    others: list[int] = []
    beside: list[int] = []
    for line, (node, key) in enumerate(keys):
        by_device = metric.scope is Scope.DEVICE and isinstance(key, int)
        if node in cast.accused:
            mine = not by_device or cast.device is None or key == cast.device
            (own if mine else beside).append(line)
        elif not by_device or cast.comparable(node, int(key)):
            others.append(line)
    return own, others or beside


def _formed(values: Floats, drawing: Drawing) -> Floats:
    if drawing.form == "growth":
        known = ~np.isnan(values)
        grown = np.cumsum(np.where(known, values, 0.0), axis=1)
        return np.where(known, grown, np.nan)
    if drawing.form == "bits":
        masks = np.where(np.isfinite(values), values, 0.0).astype(np.int64)
        return np.where(np.isnan(values), np.nan, (masks & drawing.mask != 0).astype(np.float64))
    if drawing.form == "behind" and values.size:
        highest = np.max(np.where(np.isfinite(values), values, -np.inf), axis=0)
        front = np.maximum.accumulate(highest)
        return np.where(np.isfinite(front), front - values, np.nan)
    return values
