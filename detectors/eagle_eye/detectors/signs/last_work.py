"""Tells until when a job whose step is overdue did something else: computed, moved data, or entered collectives.

What explains that no step finishes does not count as standing still. While most GPUs compute, nobody stands still. What
a few ranks or the hosts do holds all others up, and only how long it lasts tells it from a hang: it is forgiven once it
is over, when the next step is due as after any other step.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.collective_counts import COMPLETED, ENQUEUED
from eagle_eye.detectors.signs.medians import median_over_rows
from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.signs.without_hook import COMPUTING_TENSOR_RATIO, WAITING_RATIO
from eagle_eye.detectors.types import Floats, Window

TENSOR, POWER = "gpu_tensor_active_ratio", "gpu_power_watts"
# Data that hosts move, and the increase that counts as busy.
FLOWS = (
    ("node_disk_write_bytes_per_second", 1e8),
    ("node_disk_read_bytes_per_second", 1e8),
    ("node_network_tx_bytes_per_second", 1e8),
)
GROWTH_RATIO = 2.0  # and at least this many times the earlier level
ROWS_BEFORE = 30

Flags = NDArray[np.bool_]


@once
def worked_until_s(window: Window, overdue_s: float, patience_s: float) -> float:
    """Return until when something explains that no step finishes, as far as it lasted beyond ``overdue_s``; -inf: none.

    After ``patience_s`` only most GPUs' computing still explains anything.
    """
    if not len(window.times_s) or window.times_s[-1] <= overdue_s:
        return -math.inf
    rows = window.times_s > overdue_s
    computed_s, compute = _last(window.times_s[rows], *_computing(window, rows))
    computed_s = computed_s[~np.isnan(computed_s)]
    until_s = _of_most(computed_s)
    if window.times_s[-1] - max(overdue_s, until_s) >= patience_s:
        return until_s
    if not compute.any():
        until_s = float(np.max(computed_s, initial=until_s))
    return max(until_s, _moved_data_until_s(window, overdue_s), _entered_s(window, rows))


def _computing(window: Window, rows: Flags) -> tuple[Flags, Floats]:
    """Return in which of these rows each GPU computes: (rows, S), and the readings that show it, NaN where none does.

    Where tensor cores are not observed, a GPU that draws power computes if its rank is outside of any collective.
    """
    power, tensor = window.device.get(POWER), window.device.get(TENSOR)
    readings = np.full((int(rows.sum()), len(window.series)), np.nan) if tensor is None else tensor[rows]
    computing = readings >= COMPUTING_TENSOR_RATIO
    unseen = ~np.isfinite(readings).any(axis=0)
    enqueued, completed = window.device.get(ENQUEUED), window.device.get(COMPLETED)
    if power is None or enqueued is None or completed is None or not unseen.any():
        return computing, readings
    drawn = power[rows]
    with np.errstate(invalid="ignore"):
        outside = enqueued[rows] <= completed[rows]
        works = outside & (drawn >= WAITING_RATIO * np.fmax.reduce(power, axis=0))
    return np.where(unseen, works, computing), np.where(unseen, drawn, readings)


def _last(times_s: Floats, active: Flags, readings: Floats) -> tuple[Floats, Flags]:
    """Return when each column was last active: (columns,), -inf never, NaN not observed; and which still are.

    A source that repeats its last reading says nothing.
    """
    known = np.isfinite(readings)
    before = np.maximum.accumulate(np.where(known, np.arange(len(readings))[:, None], -1), axis=0)
    before = np.vstack([np.full((1, readings.shape[1]), -1), before[:-1]])
    repeated = (before >= 0) & (readings == np.take_along_axis(readings, np.maximum(before, 0), axis=0))
    shown = active & known & ~repeated
    last = len(shown) - 1 - shown[::-1].argmax(axis=0)
    last_s = np.where(shown.any(axis=0), times_s[last], np.where(known.any(axis=0), -math.inf, np.nan))
    newest = len(known) - 1 - known[::-1].argmax(axis=0)
    return last_s, known.any(axis=0) & active[newest, np.arange(active.shape[1])]


def _of_most(times_s: Floats) -> float:
    """Return until when at least half were active; -inf if half never were."""
    return float(np.sort(times_s)[len(times_s) // 2]) if len(times_s) else -math.inf


def _moved_data_until_s(window: Window, overdue_s: float) -> float:
    """Return until when most hosts read or wrote far more than before, as in a checkpoint; -inf if they still do."""
    rows = window.node_times_s > overdue_s
    if not rows.any():
        return -math.inf
    until_s = np.full(len(window.nodes), np.nan)
    moving = np.zeros(len(window.nodes), dtype=np.bool_)
    for metric, least in FLOWS:
        values = window.node.get(metric)
        if values is None:
            continue
        before = values[~rows][-ROWS_BEFORE:]
        usual = np.nan_to_num(median_over_rows(before)) if len(before) else np.zeros(len(window.nodes))
        with np.errstate(invalid="ignore"):
            busy = (values[rows] - usual > least) & (values[rows] > GROWTH_RATIO * usual)
        last_s, still = _last(window.node_times_s[rows], busy, values[rows])
        until_s, moving = np.fmax(until_s, last_s), moving | still
    until_s = until_s[~np.isnan(until_s)]
    return -math.inf if 2 * int(moving.sum()) >= max(len(until_s), 1) else _of_most(until_s)


def _entered_s(window: Window, rows: Flags) -> float:
    """Return when a rank last enqueued another collective; -inf if none has."""
    values = window.device.get(ENQUEUED)
    if values is None:
        return -math.inf
    counts = np.where(np.isfinite(values[rows]), values[rows], -math.inf)
    most = np.maximum.accumulate(np.vstack([np.fmax.reduce(values[~rows], initial=-math.inf), counts]), axis=0)
    grown = np.flatnonzero(((most[1:] > most[:-1]) & np.isfinite(most[:-1])).any(axis=1))
    return float(window.times_s[rows][grown[-1]]) if len(grown) else -math.inf
