"""Medians and trimmed means of arrays with missing values: many at once, with one sort and no loop over series."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.types import Floats, Integers

TRIM_RATIO = 0.2  # cut off at each end before a mean: robust, and nearly as efficient


def median_over_rows(values: Floats) -> Floats:
    """Return each column's median over the observed rows of (rows, columns): (columns,), NaN where none was."""
    ordered = np.sort(values, axis=0)  # NaN goes last
    if len(ordered) and np.isfinite(ordered[0]).all() and np.isfinite(ordered[-1]).all():  # the usual case: no holes
        middle: Floats = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
        return middle
    count = np.isfinite(values).sum(axis=0)
    return _middle(ordered, count, axis=0)


def median_of(known: Floats) -> float:
    """Return the median of (n,) finite values, as ``np.median`` does; NaN if empty."""
    if not len(known):
        return float("nan")
    low, high = (len(known) - 1) // 2, len(known) // 2
    ordered = np.partition(known, (low, high)) if low != high else np.partition(known, low)
    return float((ordered[low] + ordered[high]) / 2)


def median_of_others(values: Floats, least: int) -> Floats:
    """Return for each value of (rows, columns) the median of its row without it.

    NaN if the value itself was not observed or fewer than ``least`` others of the row were.
    """
    order = np.argsort(values, axis=1)
    ordered = np.take_along_axis(values, order, axis=1)
    if values.shape[1] > least and np.isfinite(ordered[:, [0, -1]]).all():  # the usual case: no holes
        rank = np.arange(values.shape[1])
        low, high = (len(rank) - 2) // 2, (len(rank) - 1) // 2
        without: Floats = (ordered[:, low + (low >= rank)] + ordered[:, high + (high >= rank)]) / 2
        placed = np.empty_like(without)
        np.put_along_axis(placed, order, without, axis=1)
        return placed
    count = np.isfinite(values).sum(axis=1, keepdims=True)  # (rows, 1)
    rank = np.arange(values.shape[1])[None, :]
    others = count - 1
    low, high = (others - 1) // 2, others // 2
    # Without the value of rank r, values of rank above r move down by one.
    lower = np.take_along_axis(ordered, np.clip(low + (low >= rank), 0, values.shape[1] - 1), axis=1)
    upper = np.take_along_axis(ordered, np.clip(high + (high >= rank), 0, values.shape[1] - 1), axis=1)
    median = np.where((rank < count) & (others >= least), (lower + upper) / 2, np.nan)
    result = np.empty_like(median)
    np.put_along_axis(result, order, median, axis=1)
    return result


def quantile_over_rows(values: Floats, q: float) -> Floats:
    """Return each column's lower q-quantile over the observed rows: (columns,), NaN where none was."""
    ordered = np.sort(values, axis=0)
    count = np.isfinite(values).sum(axis=0)
    at = np.clip((q * (count - 1)).astype(np.intp), 0, None)
    picked = np.take_along_axis(ordered, at[None, :], axis=0)[0]
    return np.where(count > 0, picked, np.nan)


def _middle(ordered: Floats, count: Integers, axis: int) -> Floats:
    low: NDArray[Any] = np.expand_dims(np.clip((count - 1) // 2, 0, None), axis)
    high: NDArray[Any] = np.expand_dims(np.clip(count // 2, 0, ordered.shape[axis] - 1), axis)
    lower = np.take_along_axis(ordered, low, axis).squeeze(axis)
    upper = np.take_along_axis(ordered, high, axis).squeeze(axis)
    return np.where(count > 0, (lower + upper) / 2, np.nan)


def trimmed_means(values: Floats) -> Floats:
    """Return each column's mean without its lowest and highest share: (columns,), NaN if nothing was observed."""
    count = np.isfinite(values).sum(axis=0)
    cut = (TRIM_RATIO * count).astype(np.intp)
    sums = np.vstack([np.zeros(values.shape[1]), np.nancumsum(np.sort(values, axis=0), axis=0, dtype=np.float64)])
    columns = np.arange(values.shape[1])
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((sums[count - cut, columns] - sums[cut, columns]) / (count - 2 * cut))
