"""A job's progress: step times, losses and throughput from its ranks' series, and its goodput. Pure.

NaN means not observed, or unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from eagle_eye.server.accounts import goodput
from eagle_eye.server.accounts.timeline import TimelineSpan
from eagle_eye.server.charts.band import Floats, matrix, percentiles
from eagle_eye.server.history.steps import SeriesKey, SeriesSteps

TRAILING_S = 600.0  # window of the goodput sum: as long as a restart including repeated steps
SPANS_MAX = 1_000


class Spread(NamedTuple):
    """A metric over the ranks in each step; ``seen`` counts the ranks, ``infinite`` the non-finite values."""

    low: Floats
    median: Floats
    high: Floats
    seen: Floats
    infinite: Floats


def spread(series: Mapping[SeriesKey, SeriesSteps], steps: int) -> Spread:
    """Return the median and the percentiles of the finite values."""
    values = matrix(series, steps)
    infinite = np.isinf(values)
    values = np.where(infinite, np.nan, values)
    return Spread(*percentiles(values), np.isfinite(values).sum(axis=0), infinite.sum(axis=0))


def total(series: Mapping[SeriesKey, SeriesSteps], steps: int, nodes_read: int, nodes: int) -> Floats:
    """Return the sum over all ranks: the mean of those read, times the maximum number present at once.

    A rank whose agent is late causes no dip. Where only some nodes were read the others are assumed equal to these.
    """
    values = matrix(series, steps)
    known = np.isfinite(values)
    count = known.sum(axis=0)
    if not count.any() or not nodes_read:
        return np.full(steps, np.nan)
    means = np.where(known, values, 0.0).sum(axis=0) / np.maximum(count, 1)
    return np.where(count > 0, means * float(count.max()) * max(nodes, nodes_read) / nodes_read, np.nan)


def goodput_course(spans: Sequence[TimelineSpan], times_s: Sequence[float], trailing_s: float = TRAILING_S) -> Floats:
    """Return the goodput ratio of at most ``trailing_s`` up to each moment; NaN where unknown."""
    found = np.full(len(times_s), np.nan)
    for at, time_s in enumerate(times_s):
        ratio = goodput.account(goodput.clipped(spans, time_s - trailing_s, time_s)).goodput_ratio
        if ratio is not None:
            found[at] = ratio
    return found


def fewer(spans: Sequence[TimelineSpan], most: int = SPANS_MAX) -> list[TimelineSpan]:
    """Return at most ``most`` spans, by merging the shortest into their predecessors."""
    kept = list(spans)
    if len(kept) <= most:
        return kept
    least_s = sorted((span.seconds for span in kept), reverse=True)[most - 1]
    found: list[TimelineSpan] = []
    for span in kept:
        if found and (span.seconds < least_s or len(found) >= most):
            found[-1] = found[-1]._replace(end_s=span.end_s)
        else:
            found.append(span)
    return found
