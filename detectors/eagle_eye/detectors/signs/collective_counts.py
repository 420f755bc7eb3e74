"""Counts collectives that ranks have enqueued and completed once these are at rest, and ranks waiting in one."""

from __future__ import annotations

import numpy as np

from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.signs.peers import latest, role_members
from eagle_eye.detectors.types import Floats, Window

ENQUEUED, COMPLETED = "nccl_sequence", "nccl_completed_sequence"
WAITING_RATIO = 0.5  # of the ranks, that must be inside a collective for the job to count as waiting
RECENT_LINES = 8  # rows that contain a rank's newest reports: nodes' rows interleave
RUN_AHEAD_MAX = 64.0  # collectives that hosts enqueue ahead of their GPUs; beyond, ranks count from different offsets
MINORITY_SHARE = 3  # if completions are not known, at most one in this many ranks can be the lagging one
REPORTS_AT_REST = 2  # newest reports between which a rank's collective sequence must not have moved


def waiting_ratio(window: Window) -> float | None:
    """Return the share of ranks with an outstanding collective that does not complete; None if no rank reports it."""
    enqueued, done = resting_count(window, ENQUEUED), resting_count(window, COMPLETED)
    known = np.isfinite(enqueued) & np.isfinite(done)
    return float((enqueued > done)[known].mean()) if known.any() else None


@once
def resting_count(window: Window, metric: str) -> Floats:
    """Return each rank's newest value if it is at rest: (S,), NaN if it still moves or is not known.

    Nodes' clocks differ, so a current row may describe a moment before the standstill: then it still moves.
    """
    values = window.device.get(metric)
    if values is None or len(values) < 2:
        return np.full(len(window.series), np.nan)
    if np.isfinite(values[-REPORTS_AT_REST:]).all():  # the usual case while two reports are examined
        return np.where(values[-1] == values[-REPORTS_AT_REST], values[-1], np.nan)
    newest = latest(values, RECENT_LINES)
    rows = values[-RECENT_LINES:][::-1]
    known = np.isfinite(rows)
    last_two = known & (np.cumsum(known, axis=0) <= REPORTS_AT_REST)
    moving = ((rows != newest) & last_two).any(axis=0) | (last_two.sum(axis=0) < REPORTS_AT_REST)
    return np.where(moving, np.nan, newest)


@once
def behind(window: Window) -> Floats:
    """Return by how many collectives each rank is behind the one that its role waits in: (S,), NaN unknown.

    Hosts run ahead of their GPUs by different amounts, so waiting ranks have not all enqueued the same number. The
    indicator is a rank with nothing outstanding while most others have something.
    """
    lag = np.full(len(window.series), np.nan)
    enqueued, completed = resting_count(window, ENQUEUED), resting_count(window, COMPLETED)
    known, ahead = np.isfinite(enqueued - completed), enqueued > completed
    if len(lag) and known.all() and ahead.all():
        lag[:] = 0.0  # all ranks wait
        return lag
    for members in role_members(window):
        own, done = enqueued[members], completed[members]
        if np.count_nonzero(known[members]) >= 2:
            if 2 * np.count_nonzero(ahead[members]) >= len(members):
                behind = np.where(own <= done, np.maximum(np.fmax.reduce(done) + 1 - own, 1.0), 0.0)
                lag[members] = np.where(known[members], behind, np.nan)
        elif np.count_nonzero(np.isfinite(own)) >= 2:
            least, most = np.fmin.reduce(own), np.fmax.reduce(own)
            if most - least <= RUN_AHEAD_MAX:
                lowest = own == least
                few = MINORITY_SHARE * np.count_nonzero(lowest) <= len(members)
                lag[members] = np.where(lowest & few, most - own, 0.0)
    return lag
