"""A metric's values of some time as a few numbers: least, greatest, mean, first, last, count, a counter's increase.

All of them combine: those of an hour follow from those of its minutes as they would from the values themselves. A value
that is NaN was not observed and counts nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from eagle_eye.schema.metrics import Kind

BITS_MAX = 2.0**53  # whole numbers up to here are exact; a bit mask beyond is none

Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]


class Summary(NamedTuple):
    """What became of each bucket, in arrays of one length; NaN: there is no such number.

    ``counts`` are of observations; with 0 the others are NaN. ``low`` and ``high`` of a bit mask are the bits that were
    always set and those that ever were; a mask that is none (negative, fractional, beyond 2**53) counts in neither.
    ``mean`` is that of a gauge or a mask. ``increase`` is what a counter grew by between first and last value; where it
    fell it was reset, and had grown by what it then had. A mean over +inf is +inf, and of what was not finite there is
    no increase.
    """

    counts: Integers
    low: Floats
    high: Floats
    mean: Floats
    first: Floats
    last: Floats
    increase: Floats


class BucketSeries(NamedTuple):
    """Some of one series: a metric of a device, a link or (-1) a node, in buckets that begin at ``times_s``.

    ``began_s`` is when the first value of each came, to the second: parts of one bucket are put in order by it.
    """

    node: str
    key: int | str
    times_s: Floats
    summary: Summary
    began_s: Floats


def summarize(values: np.ndarray[Any, Any], starts: Integers, kind: Kind, missing: int | None = None) -> Summary:
    """Return the summary of each bucket: values ``starts[i]`` to before ``starts[i + 1]``, in order of time.

    No bucket is empty. ``missing`` is how many of the values are NaN, where that is known.
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


def combine(parts: Summary, starts: Integers, kind: Kind) -> Summary:
    """Return one summary for each group of parts, ``starts[i]`` to before ``starts[i + 1]``, in order of time.

    Every part has observations. The parts of a group do not overlap in time.
    """
    count = np.add.reduceat(parts.counts, starts)
    ends = np.append(starts[1:], len(parts.counts)) - 1
    first, last = parts.first[starts], parts.last[ends]
    if kind is Kind.MASK:
        low, high = _bits(parts.low, np.bitwise_and, starts), _bits(parts.high, np.bitwise_or, starts)
    else:
        low, high = np.minimum.reduceat(parts.low, starts), np.maximum.reduceat(parts.high, starts)
    mean = increase = np.full(len(starts), np.nan)
    with np.errstate(invalid="ignore", over="ignore"):
        if kind in (Kind.GAUGE, Kind.MASK):
            mean = _mean(np.add.reduceat(parts.mean * parts.counts, starts), count)
        if kind is Kind.COUNTER:
            between = _growth(parts.last[:-1], parts.first[1:])
            increase = np.add.reduceat(parts.increase, starts) + _within(between, starts, len(parts.counts))
            increase = _finite(increase, low, high)
    return Summary(count, low, high, mean, first, last, increase)


def taken(summary: Summary, rows: np.ndarray[Any, Any] | slice) -> Summary:
    """Return the buckets that ``rows`` (places, a mask or a slice) names."""
    columns: list[Any] = [column[rows] for column in summary]
    return Summary(*columns)


def joined(summaries: Iterable[Summary]) -> Summary:
    """Return all buckets, one summary's after the other's."""
    return Summary(*(np.concatenate(columns) for columns in zip(*summaries, strict=True)))


def _nothing(length: int) -> Summary:
    return Summary(np.zeros(length, dtype=np.int64), *(np.full(length, np.nan) for _ in range(6)))


def _summarize(values: np.ndarray[Any, Any], starts: Integers, counts: Integers, kind: Kind) -> Summary:
    """Return the summary of values none of which is NaN, ``counts`` of them in each bucket."""
    ends = np.append(starts[1:], len(values)) - 1
    first, last = values[starts].astype(np.float64), values[ends].astype(np.float64)
    mean = increase = np.full(len(starts), np.nan)
    with np.errstate(invalid="ignore", over="ignore"):
        if kind is Kind.MASK:
            low, high = _bits(values, np.bitwise_and, starts), _bits(values, np.bitwise_or, starts)
        else:
            low = np.minimum.reduceat(values, starts).astype(np.float64)
            high = np.maximum.reduceat(values, starts).astype(np.float64)
        if kind in (Kind.GAUGE, Kind.MASK):
            mean = _mean(np.add.reduceat(values, starts, dtype=np.float64), counts)
        elif kind is Kind.COUNTER:
            falls = np.flatnonzero(values[1:] < values[:-1]) + 1
            if np.isin(falls, starts).all():
                increase = last - first
            else:
                increase = _within(_growth(values[:-1], values[1:]), starts, len(values))
            increase = _finite(increase, low, high)
    return Summary(counts, low, high, mean, first, last, increase)


def _mean(sums: Floats, counts: Integers) -> Floats:
    """Return the means in the digits of a gauge; +inf where infinities of both signs met, as all that is not finite."""
    means: Floats = (sums / counts).astype(np.float32).astype(np.float64)
    means[np.isnan(means)] = np.inf
    return means


def _finite(increase: Floats, low: Floats, high: Floats) -> Floats:
    """Return the increase; NaN where not all values were finite."""
    return np.where(np.isfinite(low) & np.isfinite(high), increase, np.nan)


def _growth(before: np.ndarray[Any, Any], after: np.ndarray[Any, Any]) -> Floats:
    return np.where(after < before, after, after - before)


def _within(steps: Floats, starts: Integers, length: int) -> Floats:
    """Return the sums of the steps between the values of one group, of which step i leads to value i + 1."""
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
