"""Finds devices whose hardware values are gone while their neighbours, or at least their node, still report."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eagle_eye.detectors.types import Floats, Integers, Window

GONE_LINES = 2  # consecutive rows without any of a device's values, in which its neighbours had some
NEWEST_LINES = 3  # rows examined one by one: most devices are in them
NEAR_LINES = 32  # rows examined for all devices; for those gone for longer...
SAMPLED_LINES = 16  # ...this many, evenly spaced, show which ever had values...
GONE_MAX = 64  # ...and this many are examined closely
MOST_RATIO = 0.5  # of the job's devices: if more have no values, the devices are not the cause
HARDWARE_PREFIX = "gpu_"
METRICS_MAX = 8  # examined: a device without values in any of them reports nothing
NODE_METRICS_MAX = 4


class Vanished(NamedTuple):
    """A device row without hardware values: its column, since when, and whether its whole node has none."""

    column: int
    since_s: float
    whole_node: bool


def vanished(window: Window) -> list[Vanished]:
    """Return the devices whose values are gone, in column order; [] also if most of the job's are.

    A device is compared with its neighbours' newest row, which arrives with its own; a node with its own row.
    """
    metrics = [window.device[name] for name in sorted(window.device) if name.startswith(HARDWARE_PREFIX)][:METRICS_MAX]
    top = len(window.times_s) - 1
    if not metrics or top < GONE_LINES:
        return []
    last = _last_lines(metrics)
    if (last > top - GONE_LINES).all():
        return []
    newest_of = np.full(len(window.nodes), -1, dtype=np.intp)
    np.maximum.at(newest_of, window.node_of, last)
    alone = np.flatnonzero((last >= 0) & (newest_of[window.node_of] - last >= GONE_LINES))
    nodes = np.flatnonzero((newest_of >= 0) & (top - newest_of >= GONE_LINES))
    if len(nodes) > MOST_RATIO * len(window.nodes) or len(alone) > MOST_RATIO * len(window.series):
        return []
    found = [Vanished(column, float(window.times_s[last[column]]), False) for column in alone.tolist()]
    for node in nodes.tolist():
        if _node_line(window, node) - newest_of[node] >= GONE_LINES:
            since_s = float(window.times_s[newest_of[node]])
            own = np.flatnonzero((window.node_of == node) & (last == newest_of[node]))
            found += [Vanished(column, since_s, True) for column in own.tolist()]
    return sorted(found)


def _last_lines(metrics: list[Floats]) -> Integers:
    """Return the newest row in which each column had a value: (columns,), -1 if never."""
    last = np.full(metrics[0].shape[1], -1, dtype=np.intp)
    left: Integers = np.arange(len(last))
    end = len(metrics[0])
    for line in range(end - 1, max(end - 1 - NEWEST_LINES, -1), -1):
        for values in metrics:
            seen = ~np.isnan(values[line] if len(left) == len(last) else values[line, left])
            last[left[seen]] = line
            left = left[~seen]
            if len(left) == 0:
                return last
    near = max(end - NEAR_LINES, 0)
    left = _find(metrics, near, max(end - NEWEST_LINES, near), left, last)
    if len(left):
        chosen = np.unique(np.linspace(0, end - 1, SAMPLED_LINES).astype(np.intp))
        had = np.zeros(len(left), dtype=np.bool_)
        for values in metrics:
            had |= np.isfinite(values[chosen][:, left]).any(axis=0)
        left = left[had][:GONE_MAX]
    end = near
    while end > 0 and len(left):
        start = max(end - NEAR_LINES, 0)
        left, end = _find(metrics, start, end, left, last), start
    return last


def _find(metrics: list[Floats], start: int, end: int, left: Integers, last: Integers) -> Integers:
    """Record in ``last`` the newest of some rows in which columns of ``left`` had a value; return those without."""
    shown = np.zeros((end - start, len(left)), dtype=np.bool_)
    for values in metrics:
        shown |= ~np.isnan(values[start:end, left])
    hit = shown.any(axis=0)
    if hit.any():
        last[left[hit]] = end - 1 - np.argmax(shown[::-1, hit], axis=0)
    return left[~hit]


def _node_line(window: Window, node: int) -> int:
    """Return the newest device row that is no newer than a node's own row, -1 if there is none."""
    own = [values[-NEAR_LINES:, node] for values in list(window.node.values())[:NODE_METRICS_MAX]]
    seen = np.zeros(min(len(window.node_times_s), NEAR_LINES), dtype=np.bool_)
    for column in own:
        seen |= ~np.isnan(column)
    if not seen.any():
        return -1
    heard_s = float(window.node_times_s[-len(seen) :][seen][-1])
    return int(np.searchsorted(window.times_s, heard_s + window.interval_s / 2)) - 1
