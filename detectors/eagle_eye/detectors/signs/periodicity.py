"""The period of a job that reports no steps, estimated from its GPU and network activity.

Where steps are longer than rows, a mean over a partial step depends on when it was sampled, not on the job's speed.
"""

from __future__ import annotations

import math

import numpy as np

from eagle_eye.detectors.signs.medians import median_of, median_over_rows
from eagle_eye.detectors.types import Floats

ROWS_MIN, ROWS_MAX = 12, 1_200
REPEATS_MIN = 3.0  # periods that the observed time must contain
LIKENESS_MIN = 0.5  # correlation at a lag of one period...
DIP_MIN = 0.3  # ...and its drop in between: a slow drift also resembles itself
NEARLY = 0.85  # of the highest correlation, from which on the shortest period is taken
GAP_INTERVALS = 1.5  # between two rows, beyond which some are missing


def rhythm_s(level: Floats, times_s: Floats) -> float | None:
    """Return the period of a counter's rows, (rows,) at ``times_s``; None if there is none.

    By autocorrelation. The period is one step or a few, either of which contains whole steps; at least two rows.
    """
    known = np.isfinite(level)
    level, times_s = level[known][-ROWS_MAX:], times_s[known][-ROWS_MAX:]
    if len(level) < ROWS_MIN:
        return None
    row_s = median_of(np.diff(times_s))
    places = np.round((times_s - times_s[0]) / row_s).astype(np.intp) if row_s > 0 else np.zeros(0, dtype=np.intp)
    if len(places) == 0 or places[-1] >= 2 * ROWS_MAX:
        return None
    seen, shown = np.zeros(places[-1] + 1), np.zeros(places[-1] + 1)
    seen[places], shown[places] = 1.0, level - level.mean()
    last = int(len(seen) / REPEATS_MIN)
    pairs = np.correlate(seen, seen, "full")[len(seen) - 1 :][: last + 2]
    alike = np.correlate(shown, shown, "full")[len(seen) - 1 :][: last + 2] / np.maximum(pairs, 1.0)
    if not alike[0] > 0:
        return None
    alike /= alike[0]
    lags = np.arange(2, len(alike) - 1)
    dips = np.minimum.accumulate(alike)[lags]
    peak = (alike[lags] >= alike[lags - 1]) & (alike[lags] >= alike[lags + 1]) & (pairs[lags] >= ROWS_MIN / 2)
    lags = lags[peak & (alike[lags] >= LIKENESS_MIN) & (alike[lags] - dips >= DIP_MIN)]
    if len(lags) == 0:
        return None
    lag = int(lags[alike[lags] >= NEARLY * alike[lags].max()][0])
    before, top, after = alike[lag - 1], alike[lag], alike[lag + 1]
    bend = before - 2 * top + after
    return float(row_s * (lag + (0.5 * (before - after) / bend if bend < 0 else 0.0)))


def stretches(values: Floats, times_s: Floats, length_s: float) -> Floats:
    """Return the mean of each whole interval of this length, (stretches, columns), of values (rows, columns).

    A row covers the time since the one before. Where rows are missing a new interval begins; a missing value is assumed
    to equal the others of its row.
    """
    if len(times_s) < 2:
        return np.zeros((0, values.shape[1]))
    row_s = median_of(np.diff(times_s))
    usual = median_over_rows(values.T)[:, None]
    filled = np.where(np.isfinite(values), values, np.where(np.isfinite(usual), usual, 1.0))
    breaks = np.flatnonzero(np.diff(times_s) > GAP_INTERVALS * row_s) + 1
    found = []
    for rows in np.split(np.arange(len(times_s)), breaks):
        edges_s = np.concatenate([[times_s[rows[0]] - row_s], times_s[rows]])
        count = math.floor((edges_s[-1] - edges_s[0]) / length_s + 1e-9)
        total = np.vstack([np.zeros((1, values.shape[1])), np.cumsum(filled[rows] * np.diff(edges_s)[:, None], axis=0)])
        at_s = edges_s[0] + length_s * np.arange(count + 1)
        line = np.clip(np.searchsorted(edges_s, at_s, side="right") - 1, 0, len(rows) - 1)
        share = ((at_s - edges_s[line]) / (edges_s[line + 1] - edges_s[line]))[:, None]
        found.append(np.diff(total[line] + share * (total[line + 1] - total[line]), axis=0) / length_s)
    return np.concatenate(found)
