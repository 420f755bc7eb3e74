"""Statistics of the newest rows of many columns in a few passes, for screens that run at every tick."""

from __future__ import annotations

import math

import numpy as np

from eagle_eye.detectors.signs.medians import quantile_over_rows
from eagle_eye.detectors.signs.under_load import lines_within
from eagle_eye.detectors.types import Floats

HELD_LINES = 3  # consecutive rows that must show a sign: one or two are noise or a late report
PAST_LINES = 16  # past rows examined, evenly spaced
PAST_QUANTILE = 0.25  # low, so that lasting trouble becomes its own past only after three quarters of a window
GAP_LINES = 3  # consecutive ordinary rows that end an episode...
GAP_S = 10.0  # ...and they must cover this much


def lines_for(times_s: Floats, interval_s: float, seconds: float) -> int:
    """Return how many of the newest rows cover ``seconds``, and at least HELD_LINES readings of each node.

    Nodes that report at different moments fill more than one row per interval.
    """
    return max(HELD_LINES, lines_within(times_s, max(seconds, HELD_LINES * interval_s) - interval_s / 2))


def held(values: Floats) -> Floats:
    """Return the minimum of each column in the newest HELD_LINES rows: (columns,), NaN if unobserved."""
    least: Floats = np.fmin.reduce(values[-HELD_LINES:], axis=0)
    return least


def grown(values: Floats, lines: int) -> Floats:
    """Return by how much each counter grew over the newest ``lines`` rows: (columns,), NaN if not known.

    A counter that restarted at zero grew by its current value.
    """
    lines = min(lines, len(values) - 1)
    if lines < 1:
        return np.full(values.shape[1], np.nan)
    now = np.fmax.reduce(values[-min(HELD_LINES, lines) :], axis=0)
    then = values[-lines - 1]
    if np.isnan(then).any():  # a late row: use the next one
        then = np.fmin.reduce(values[-lines - 1 : -lines + 1 or None], axis=0)
    change: Floats = now - then
    if (change < 0).any():
        change = np.where(change < 0, now, change)
    return change


def rates(values: Floats, times_s: Floats, lines: int) -> Floats:
    """Return how fast each counter grew over the newest ``lines`` rows, per second: (columns,), NaN if not known."""
    lines = min(lines, len(values) - 1)
    return grown(values, lines) / (times_s[-1] - times_s[-lines - 1]) if lines > 0 else grown(values, lines)


def past(values: Floats, before: int) -> Floats:
    """Return each column's lower quartile over the rows before index ``before``: (columns,), NaN if there are none."""
    if before <= 0:
        return np.full(values.shape[1], np.nan)
    chosen = np.unique(np.linspace(0, before - 1, min(PAST_LINES, before)).astype(np.intp))
    return quantile_over_rows(values[chosen], PAST_QUANTILE)


def middle(values: Floats) -> float:
    """Return the median of the observed values, the upper one of two; NaN if there are none."""
    known = values[np.isfinite(values)]
    if len(known) == 0:
        return math.nan
    half = len(known) // 2
    return float(np.partition(known, half)[half])


def share_of_rows(signs: Floats) -> float:
    """Return the share of a column's observed rows that show a sign: 1.0 or 0.0 a row, NaN not observed."""
    known = signs[np.isfinite(signs)]
    return float(known.mean()) if len(known) else 0.0


def onset_line(signs: Floats, interval_s: float) -> int:
    """Return the row in which a sign (1.0, 0.0, NaN unknown) that holds until now began, ignoring short gaps."""
    gap = max(GAP_LINES, math.ceil(GAP_S / interval_s))
    first = len(signs)
    quiet = 0
    for line in range(len(signs) - 1, -1, -1):
        if signs[line] > 0:
            first, quiet = line, 0
        elif signs[line] == 0:
            quiet += 1
            if quiet >= gap:
                break
    return first
