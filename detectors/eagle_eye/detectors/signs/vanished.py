"""Finds devices whose values are gone while those of other devices go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.gpu_errors import at_once
from eagle_eye.detectors.signs.medians import median_over_rows
from eagle_eye.detectors.signs.silence import passed_silences_s
from eagle_eye.detectors.types import Floats, Integers, Window

MISSED = 3  # samples of a series' own interval
ROUNDING = 0.5  # samples: rows of one source differ by less, and lines of the grid by no more
LATE = 2.0  # own intervals without a value: one sample is certainly missing
PACE_LINES = 64  # rows up to the newest value, in which the own interval is seen
SAMPLES_MIN = 3  # in them: fewer show no interval
NEWEST_LINES = 3  # rows examined one by one: most devices are in them
NEAR_LINES = 32  # rows examined for all devices; for those gone for longer...
SAMPLED_LINES = 16  # ...this many, evenly spaced, show which ever had values...
GONE_MAX = 64  # ...and this many are examined closely
OTHERS_MAX = 64  # devices of other nodes examined
MOST_RATIO = 0.5  # of the job's devices: if more have no values, the devices are not the cause
HARDWARE_PREFIX = "gpu_"
METRICS_MAX = 8  # examined: a device without values in any of them reports nothing


class Vanished(NamedTuple):
    """A device row without values: its column, since when, and whether its whole node has none."""

    column: int
    since_s: float
    whole_node: bool


def vanished(window: Window) -> list[Vanished]:
    """Return the devices whose hardware values have vanished, as ``without_values``."""
    return without_values(window, _hardware_metrics(window))


def _hardware_metrics(window: Window) -> list[str]:
    return [name for name in sorted(window.device) if name.startswith(HARDWARE_PREFIX)][:METRICS_MAX]


def without_values(window: Window, names: Sequence[str]) -> list[Vanished]:
    """Return the devices without values of these metrics, in column order; [] also if most of the job's have none.

    A device has vanished when it has missed MISSED samples of its own interval while others went on: its neighbours,
    which are read with it, or, if its whole node has none, other nodes' devices, which are read at other moments. What
    a node reports besides may come from another source and shows only that the node is there.
    """
    metrics = [window.device[name] for name in names if name in window.device]
    if not metrics or len(window.times_s) <= MISSED:
        return []
    last = _last_lines(metrics)
    quiet = np.flatnonzero((last >= 0) & (last < len(window.times_s) - MISSED))
    if len(quiet) == 0:
        return []
    newest_of = np.full(len(window.nodes), -1, dtype=np.intp)
    np.maximum.at(newest_of, window.node_of, last)
    whole = newest_of[window.node_of[quiet]] == last[quiet]
    own_s = _own_intervals_s(window, metrics, quiet, last)
    alone = _without_neighbours(window, metrics, quiet[~whole], own_s[~whole], last)
    found = alone + _whole_nodes(window, metrics, quiet[whole], own_s[whole], last)
    nodes = {window.series[item.column].node for item in found}
    if len(alone) > MOST_RATIO * len(window.series) or at_once(window, dict.fromkeys(nodes, 0.0), 0.0):
        return []
    return sorted(found)


def may_vanish(window: Window, node: str, device: int, since_s: float) -> bool:
    """Whether a device has had no hardware values since a moment, unlike its neighbours: the next rows decide."""
    names = _hardware_metrics(window)
    rows = window.times_s > since_s
    own = np.array([series.node == node and series.device == device for series in window.series])
    if not names or not rows.any() or not own.any():
        return False
    seen = np.zeros(len(own), dtype=np.bool_)
    for name in names:
        seen |= np.isfinite(window.device[name][rows]).any(axis=0)
    beside = window.node_of == window.nodes.index(node)
    return bool(seen[beside].any()) and not seen[own].any()


def _own_intervals_s(window: Window, metrics: list[Floats], columns: Integers, last: Integers) -> Floats:
    """Return the usual time between two values of each column, at least a grid interval: (columns,), NaN unknown."""
    found = np.full(len(columns), np.nan)
    for line in np.unique(last[columns]).tolist():
        places = np.flatnonzero(last[columns] == line)
        start = max(line + 1 - PACE_LINES, 0)
        seen = _seen(metrics, slice(start, line + 1), columns[places])
        rows = np.where(seen, np.arange(len(seen))[:, None], -1)
        before = np.vstack([np.full(len(places), -1), np.maximum.accumulate(rows, axis=0)[:-1]])
        times_s = window.times_s[start : line + 1]
        gaps_s = np.where(seen & (before >= 0), times_s[:, None] - times_s[np.maximum(before, 0)], np.nan)
        enough = seen.sum(axis=0) >= SAMPLES_MIN
        found[places[enough]] = np.maximum(median_over_rows(gaps_s[:, enough]), window.interval_s)
    return found


def _without_neighbours(
    window: Window, metrics: list[Floats], columns: Integers, own_s: Floats, last: Integers
) -> list[Vanished]:
    """Return which columns have missed enough samples in rows that hold values of their neighbours."""
    found = []
    for column, interval_s in zip(columns.tolist(), own_s.tolist(), strict=True):
        beside = np.flatnonzero(window.node_of == window.node_of[column])
        missed = _went_on_s(window, metrics, beside, int(last[column]), interval_s) / interval_s
        if missed >= MISSED - ROUNDING:
            found.append(Vanished(column, float(window.times_s[last[column]]), whole_node=False))
    return found


def _whole_nodes(
    window: Window, metrics: list[Floats], columns: Integers, own_s: Floats, last: Integers
) -> list[Vanished]:
    """Return the columns of nodes none of whose devices has values, though the node is heard and others' go on."""
    since_s = window.times_s[last[columns]]
    with np.errstate(invalid="ignore"):
        late = window.times_s[-1] - since_s >= LATE * own_s
    behind = {window.series[column].node for column in columns[late].tolist()}
    if len(behind) > MOST_RATIO * len(window.nodes) or at_once(window, dict.fromkeys(behind, 0.0), 0.0):
        return []  # the way from the nodes to the server, or what asks them all
    with np.errstate(invalid="ignore"):
        due_s = since_s + MISSED * own_s + window.interval_s
        due = (window.times_s[-1] >= due_s) & (window.heard_s[window.node_of[columns]] >= due_s - window.interval_s)
    found = []
    for place in np.flatnonzero(due).tolist():
        column, interval_s = int(columns[place]), float(own_s[place])
        line, node = int(last[column]), int(window.node_of[column])
        others = np.flatnonzero((last > line) & (window.node_of != node))
        others = others[:: len(others) // OTHERS_MAX + 1]
        on_s = _went_on_s(window, metrics, others, line, interval_s)
        if on_s >= max(MISSED * interval_s + window.interval_s, passed_silences_s(window)[node]):
            found.append(Vanished(column, float(since_s[place]), whole_node=True))
    return found


def _went_on_s(window: Window, metrics: list[Floats], columns: Integers, line: int, interval_s: float) -> float:
    """Return for how long since a row some of the columns had values: a gap counts for no more than ``interval_s``."""
    shown = np.flatnonzero(_seen(metrics, slice(line + 1, None), columns).any(axis=1))
    times_s = np.append(window.times_s[line], window.times_s[line + 1 :][shown])
    return float(np.minimum(np.diff(times_s), interval_s).sum())


def _seen(metrics: list[Floats], rows: slice, columns: Integers) -> NDArray[np.bool_]:
    """Return where columns had values: (rows, columns)."""
    seen = ~np.isnan(metrics[0][rows, columns])
    for values in metrics[1:]:
        seen |= ~np.isnan(values[rows, columns])
    return seen


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
    shown = _seen(metrics, slice(start, end), left)
    hit = shown.any(axis=0)
    if hit.any():
        last[left[hit]] = end - 1 - np.argmax(shown[::-1, hit], axis=0)
    return left[~hit]
