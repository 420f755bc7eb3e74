"""Summarizes a metric's values per bucket: minimum, maximum, mean, first, last, count, and a counter's increase.

All of these combine: the summary of an hour follows from those of its minutes exactly as from the values themselves.
NaN values count as not observed and are ignored everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from eagle_eye.schema.metrics import MetricKind

BITS_MAX = 2.0**53  # integers up to here are exact; larger values are no bit masks

Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]


class Summary(NamedTuple):
    """Summaries of buckets, in arrays of equal length; NaN means that there is no such number.

    ``counts`` are numbers of observations; where it is 0 the others are NaN. For a bit mask, ``low`` holds the bits
    that were always set and ``high`` those ever set; invalid masks (negative, fractional, beyond 2**53) count in
    neither. ``mean`` is that of a gauge or a mask. ``increase`` is a counter's growth between first and last value;
    where it fell it was reset, and its new value is the growth since then. The mean of values with infinities is +inf,
    and their increase is NaN.
    """

    counts: Integers
    low: Floats
    high: Floats
    mean: Floats
    first: Floats
    last: Floats
    increase: Floats


class BucketSeries(NamedTuple):
    """Part of one series: a metric of a device, a link or (-1) a node, in buckets that begin at ``times_s``.

    ``began_s`` is the time of each bucket's first value, to the second; it orders parts of the same bucket.
    """

    node: str
    key: int | str
    times_s: Floats
    summary: Summary
    began_s: Floats


def summarize(values: np.ndarray[Any, Any], starts: Integers, kind: MetricKind, missing: int | None = None) -> Summary:
    """Return the summary of each bucket: values ``starts[i]`` to before ``starts[i + 1]``, in order of time.

    No bucket is empty. ``missing`` is the number of NaN values, if known.
    """
    if missing is None:
        missing = int(np.count_nonzero(np.isnan(values)))
    if missing == 0:
        return _summarize(values, starts, np.diff(starts, append=len(values)), kind)
    seen = np.flatnonzero(~np.isnan(values))
    bounds = np.searchsorted(seen, np.append(starts, len(values)))
    counts = np.diff(bounds)
    some = counts > 0
    found = _nothing(len(starts))
    if some.any():
        for whole, part in zip(found, _summarize(values[seen], bounds[:-1][some], counts[some], kind), strict=True):
            whole[some] = part
    return found


def combine(parts: Summary, starts: Integers, kind: MetricKind) -> Summary:
    """Return one summary for each group of parts, ``starts[i]`` to before ``starts[i + 1]``, in order of time.

    Every part has observations. The parts of a group do not overlap in time.
    """
    count = np.add.reduceat(parts.counts, starts)
    ends = np.append(starts[1:], len(parts.counts)) - 1
    first, last = parts.first[starts], parts.last[ends]
    if kind is MetricKind.MASK:
        low, high = _bits(parts.low, np.bitwise_and, starts), _bits(parts.high, np.bitwise_or, starts)
    else:
        low, high = np.minimum.reduceat(parts.low, starts), np.maximum.reduceat(parts.high, starts)
    mean = increase = np.full(len(starts), np.nan)
    with np.errstate(invalid="ignore", over="ignore"):
        if kind in (MetricKind.GAUGE, MetricKind.MASK):
            mean = _mean(np.add.reduceat(parts.mean * parts.counts, starts), count)
        if kind is MetricKind.COUNTER:
            between = _growth(parts.last[:-1], parts.first[1:])
            increase = np.add.reduceat(parts.increase, starts) + _within(between, starts, len(parts.counts))
            increase = _finite(increase, low, high)
    return Summary(count, low, high, mean, first, last, increase)


def taken(summary: Summary, rows: np.ndarray[Any, Any] | slice) -> Summary:
    """Return the buckets selected by ``rows`` (indexes, a mask or a slice)."""
    columns: list[Any] = [column[rows] for column in summary]
    return Summary(*columns)


def joined(summaries: Iterable[Summary]) -> Summary:
    """Return all buckets of the summaries, concatenated."""
    return Summary(*(np.concatenate(columns) for columns in zip(*summaries, strict=True)))


def _nothing(length: int) -> Summary:
    return Summary(np.zeros(length, dtype=np.int64), *(np.full(length, np.nan) for _ in range(6)))


def _summarize(values: np.ndarray[Any, Any], starts: Integers, counts: Integers, kind: MetricKind) -> Summary:
    """Return the summaries of values without NaN, ``counts`` of them in each bucket."""
    ends = np.append(starts[1:], len(values)) - 1
    first, last = values[starts].astype(np.float64), values[ends].astype(np.float64)
    mean = increase = np.full(len(starts), np.nan)
    with np.errstate(invalid="ignore", over="ignore"):
        if kind is MetricKind.MASK:
            low, high = _bits(values, np.bitwise_and, starts), _bits(values, np.bitwise_or, starts)
        else:
            low = np.minimum.reduceat(values, starts).astype(np.float64)
            high = np.maximum.reduceat(values, starts).astype(np.float64)
        if kind in (MetricKind.GAUGE, MetricKind.MASK):
            mean = _mean(np.add.reduceat(values, starts, dtype=np.float64), counts)
        elif kind is MetricKind.COUNTER:
            falls = np.flatnonzero(values[1:] < values[:-1]) + 1
            if np.isin(falls, starts).all():
                increase = last - first
            else:
                increase = _within(_growth(values[:-1], values[1:]), starts, len(values))
            increase = _finite(increase, low, high)
    return Summary(counts, low, high, mean, first, last, increase)


def _mean(sums: Floats, counts: Integers) -> Floats:
    """Return the means with a gauge's precision; +inf where infinities of both signs met, like all non-finite means."""
    means: Floats = (sums / counts).astype(np.float32).astype(np.float64)
    means[np.isnan(means)] = np.inf
    return means


def _finite(increase: Floats, low: Floats, high: Floats) -> Floats:
    """Return the increase; NaN where not all values were finite."""
    return np.where(np.isfinite(low) & np.isfinite(high), increase, np.nan)


def _growth(before: np.ndarray[Any, Any], after: np.ndarray[Any, Any]) -> Floats:
    return np.where(after < before, after, after - before)


def _within(steps: Floats, starts: Integers, length: int) -> Floats:
    """Return the sum of the steps within each group; step i leads from value i to value i + 1."""
    own = np.zeros(length)
    own[1:] = steps
    own[starts] = 0.0
    sums: Floats = np.add.reduceat(own, starts)
    return sums


def _bits(values: np.ndarray[Any, Any], fold: Any, starts: Integers) -> Floats:
    """Return the bits of each group's values folded; NaN where none of them is a bit mask."""
    good = (values >= 0) & (values < BITS_MAX) & (values == np.floor(values))
    neutral = -1 if fold is np.bitwise_and else 0
    bits = np.full(len(values), neutral, dtype=np.int64)
    bits[good] = values[good].astype(np.int64)
    folded: Floats = fold.reduceat(bits, starts).astype(np.float64)
    folded[~np.logical_or.reduceat(good, starts)] = np.nan
    return folded
