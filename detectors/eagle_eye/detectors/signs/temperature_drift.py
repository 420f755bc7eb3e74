"""Finds devices that have grown hotter than their own past and their peers, at the same power."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from eagle_eye.detectors.signs.peers import latest, standing
from eagle_eye.detectors.types import Floats, Window

# A temperature and the level above which a rise matters: slowdown begins at 83 to 87 degrees on current parts, HBM's at
# 95 (typical vendor values). A rise that ends below these is ignored.
LEVELS = (("gpu_temperature_celsius", 78.0), ("gpu_memory_temperature_celsius", 90.0))
PAST_S = 600.0  # the own past is older than this
NOW_S = 120.0  # for which it must have been hotter
RISE = 10.0  # degrees over its own past...
PEERS_RISE = 4.0  # ...while the peers rose by at most this: else it is the room
ABOVE_PEERS = 8.0  # degrees; healthy neighbours in one chassis differ by five
SIGMAS = 6.0
SPREAD = 1.0  # degrees: the smallest spread assumed between healthy peers
LINES_MIN = 4  # rows in the newest NOW_S and in the past each
POWER_RATIO = 1.05  # more power makes more heat and is no sign
SUSPECTS_MAX = 64


class Drift(NamedTuple):
    """A device hotter than its own past; degrees Celsius. ``level`` is its minimum in the newest rows."""

    column: int
    metric: str
    since_s: float
    level: float
    before: float
    peers_median: float
    threshold: float


def drifts(window: Window) -> Iterator[Drift]:
    """Yield the devices whose temperature drifts towards its limit; none in the first ten minutes of a window."""
    past_end = int(np.searchsorted(window.times_s, window.now_s - PAST_S, side="right"))
    now_start = int(np.searchsorted(window.times_s, window.now_s - NOW_S, side="right"))
    if past_end < LINES_MIN or len(window.times_s) - now_start < min(LINES_MIN, NOW_S / window.interval_s):
        return
    for metric, level in LEVELS:
        values = window.device.get(metric)
        if values is None:
            continue
        now, then = latest(values, 3), values[past_end // 2]
        with np.errstate(invalid="ignore"):
            suspects = np.flatnonzero((now - then > RISE) & (now > level))
        if len(suspects) == 0:
            continue
        where = standing(now, window.role_of, floor=SPREAD)
        for column in suspects[:SUSPECTS_MAX].tolist():
            if where.distance[column] >= SIGMAS:  # False where it has no peers
                drift = _closer(window, metric, level, column, past_end, now_start, float(where.median[column]))
                if drift is not None:
                    yield drift


def _closer(
    window: Window, metric: str, least: float, column: int, past_end: int, now_start: int, median: float
) -> Drift | None:
    values = window.device[metric]
    past, now = _known(values[:past_end, column]), _known(values[now_start:, column])
    peers = (window.role_of == window.role_of[column]) & (np.arange(len(window.series)) != column)
    peers_past = _known(values[past_end // 2, peers])
    if len(past) < 2 or len(now) < 2 or len(peers_past) == 0:
        return None
    level, before = float(np.min(now)), float(np.median(past))
    threshold = max(before + RISE, least, median + ABOVE_PEERS)
    if level < threshold or median - float(np.median(peers_past)) > PEERS_RISE:
        return None
    power = window.device.get("gpu_power_watts")
    if power is not None:
        then, drawn = _known(power[:past_end, column]), _known(power[now_start:, column])
        if len(then) and len(drawn) and np.median(drawn) > POWER_RATIO * np.median(then):
            return None
    return Drift(column, metric, float(window.times_s[past_end - 1]), level, before, median, threshold)


def _known(values: Floats) -> Floats:
    return values[np.isfinite(values)]
