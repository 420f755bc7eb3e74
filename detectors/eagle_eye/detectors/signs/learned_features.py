"""Computes the features of the learned model: how each node of a window differs from its comparable peers.

Training and detection share this code, so a model sees the same numbers in both. Everything is relative to the peers at
the same moment: what changes for the whole job, a switch or a room cancels out. Three features per metric:

- level: the mean over the newest span without its highest and lowest row, minus the peers' median level;
- change: the level minus the mean over the past before the span, minus the peers' median change, as far as it leads
  away from the peers: a past deviation that has ended is not odd;
- spread: the logarithm of the standard deviation in the span over the peers' median one.

The first two are in grains: the metric's own grain, or 1% of the peers' median level if that is more. If the peers
differ by more than a grain at that moment, the unit is their robust standard deviation: half a room that is capped, or
a burst on a switch, makes no node odd. A node with several devices is as odd as its oddest device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.medians import median_over_rows
from eagle_eye.detectors.signs.peers import SIGMA_PER_MAD, group_members
from eagle_eye.detectors.types import Blind, Floats, Integers, Window

FEATURES = ("level", "change", "spread")
GRAIN_RATIO = 0.01  # of the peers' level: healthy identical nodes agree no better than this
ROWS_SPAN_MIN, ROWS_PAST_MIN = 4, 4  # fewer rows have no meaningful spread
PAST_RATIO_MIN = 0.5  # of the past that rows must cover
ROWS_SPAN_MAX, ROWS_PAST_MAX = 12, 6  # evenly spaced if there are more: enough for a mean, at bounded cost
LEAST_SIGMA = np.array([1.0, 1.0, 0.3], np.float32)  # of peers, in a feature's unit: a smaller spread counts as this
TRIMMED = 2  # rows excluded from a mean
PEERS_MIN = 3  # in a group, itself included
PEERS_SAMPLED = 257  # of a large group, enough for its median
CELLS_MAX = 1 << 19  # values processed at a time, so that they stay in the CPU cache


class Metric(NamedTuple):
    """One metric of a model; ``grain`` is the smallest meaningful difference in its unit."""

    name: str
    per_device: bool
    grain: float
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The part of a window examined: the newest ``span_s`` against the ``past_s`` before it."""

    metrics: tuple[Metric, ...]
    span_s: float
    past_s: float

    @property
    def width(self) -> int:
        """Number of features per node."""
        return len(self.metrics) * len(FEATURES)


class ScopeSeries(NamedTuple):
    """The level and change of one scope's metrics, (metrics, columns) each; ``grain`` is the unit of differences."""

    level: Floats
    peers: Floats
    grain: Floats


class NodeFeatures(NamedTuple):
    """The features of all nodes of a window: (N, metrics, 3), NaN if not observed or without peers.

    ``device`` and ``node`` are the values they were computed from, in the order of the view's metrics of that scope.
    """

    values: Floats
    device: ScopeSeries
    node: ScopeSeries


def look(window: Window, view: View, until_s: float) -> NodeFeatures:
    """Return the features of all nodes as of ``until_s``.

    A metric that is not reported is NaN throughout. Raises Blind if the window has too few rows.
    """
    device = [m for m in view.metrics if m.per_device]
    node = [m for m in view.metrics if not m.per_device]
    values = np.full((len(window.nodes), len(view.metrics), len(FEATURES)), np.nan, np.float32)
    first_series = _first_series(window)
    roles_of_nodes = np.where(first_series >= 0, window.role_of[first_series] if len(window.series) else 0, -1)
    of_device, device_course = _scope(window.device, window.times_s, device, view, until_s, window.role_of)
    of_node, node_course = _scope(window.node, window.node_times_s, node, view, until_s, roles_of_nodes)
    at_device = [i for i, m in enumerate(view.metrics) if m.per_device]
    at_node = [i for i, m in enumerate(view.metrics) if not m.per_device]
    if device:
        values[:, at_device] = oddest_of_each(of_device, window.node_of, len(window.nodes))
    if node:
        values[:, at_node] = of_node.transpose(2, 1, 0)
    return NodeFeatures(values, device_course, node_course)


def oddest_of_each(values: Floats, owner: Integers, owners: int) -> Floats:
    """Return for each owner of columns the one furthest from zero: (3, metrics, columns) to (owners, metrics, 3)."""
    result = np.full((owners, values.shape[1], values.shape[0]), np.nan, np.float32)
    if values.shape[2] == 0:
        return result
    order = np.argsort(owner, kind="stable")
    owner = owner[order]
    starts = np.flatnonzero(np.diff(owner, prepend=owner[0] - 1))
    arranged = values[:, :, order] if (np.diff(order) != 1).any() else values
    each = len(owner) // len(starts)
    if np.array_equal(starts, np.arange(0, len(owner), each)):
        # The usual case of equally many columns per owner: whole slices, which is many times as fast.
        high, low = arranged[:, :, ::each].copy(), arranged[:, :, ::each].copy()
        for place in range(1, each):
            np.fmax(high, arranged[:, :, place::each], out=high)
            np.fmin(low, arranged[:, :, place::each], out=low)
    else:
        high = np.fmax.reduceat(arranged, starts, axis=2)
        low = np.fmin.reduceat(arranged, starts, axis=2)
    result[owner[starts]] = np.where(high >= -low, high, low).transpose(2, 1, 0)
    return result


def _first_series(window: Window) -> Integers:
    """Return each node's first device row, -1 for none: its role is used to compare the node's own metrics."""
    first = np.full(len(window.nodes), -1, dtype=np.intp)
    first[window.node_of[::-1]] = np.arange(len(window.series) - 1, -1, -1)
    return first


def _scope(
    arrays: Mapping[str, Floats],
    times_s: Floats,
    metrics: list[Metric],
    view: View,
    until_s: float,
    roles: Integers,
) -> tuple[Floats, ScopeSeries]:
    """Return the features of one scope's columns, (3, metrics, columns), and the values they were computed from."""
    columns = len(roles)
    course = np.full((len(FEATURES), len(metrics), columns), np.nan, np.float32)  # level, change, deviation
    present = [(i, values) for i, m in enumerate(metrics) if (values := arrays.get(m.name)) is not None]
    if present and columns:
        span, past = _rows(times_s, view, until_s)
        at = [i for i, _ in present]
        width = max(CELLS_MAX // (len(present) * (len(span) + len(past))), 1)
        for start in range(0, columns, width):
            part = slice(start, min(start + width, columns))
            newest = np.stack([values[span, part] for _, values in present]).astype(np.float32, copy=False)
            before = np.stack([values[past, part] for _, values in present]).astype(np.float32, copy=False)
            course[:, at, part] = _course(newest, before)
    medians = _peers(course.reshape(-1, columns), roles).reshape(course.shape)
    floor = np.array([m.grain for m in metrics], np.float32)[:, None]
    grain = np.fmax(floor, GRAIN_RATIO * np.abs(medians[0]))
    with np.errstate(invalid="ignore", divide="ignore"):
        features = (course - medians) / grain
        away = np.sign(features[0]) * np.minimum(np.abs(features[0]), np.abs(features[1]))
        features[1] = np.where(features[0] * features[1] < 0, 0.0, away)
        features[2] = np.log((course[2] + grain) / (medians[2] + grain))
        sigma = SIGMA_PER_MAD * _peers(np.abs(features).reshape(-1, columns), roles).reshape(course.shape)
        wider = np.fmax(sigma / LEAST_SIGMA[:, None, None], 1.0)
        features /= wider
    return features, ScopeSeries(course[0], medians[0], grain * wider[0])


def _rows(times_s: Floats, view: View, until_s: float) -> tuple[Integers, Integers]:
    """Return the lines of the span and of the past. Raises Blind."""
    grace_s = 1e-6 * view.span_s
    edges_s = (until_s - view.span_s - view.past_s, until_s - view.span_s, until_s)
    first, middle, last = (int(np.searchsorted(times_s, edge_s + grace_s, side="right")) for edge_s in edges_s)
    enough = last - middle >= ROWS_SPAN_MIN and middle - first >= ROWS_PAST_MIN
    if not enough or times_s[first] > edges_s[0] + (1 - PAST_RATIO_MIN) * view.past_s:
        raise Blind(
            f"{last - middle} rows of the last {view.span_s:.0f} s and {middle - first} of the {view.past_s:.0f} s"
            f" before; the model needs {ROWS_SPAN_MIN}, {ROWS_PAST_MIN} and half of that time"
        )
    return _some(middle, last, ROWS_SPAN_MAX), _some(first, middle, ROWS_PAST_MAX)


def _some(start: int, stop: int, most: int) -> Integers:
    count = min(stop - start, most)
    return stop - 1 - (np.arange(count - 1, -1, -1) * (stop - start)) // count


def _course(newest: Floats, before: Floats) -> Floats:
    """Return level, change and standard deviation: (metrics, rows, columns) twice to (3, metrics, columns)."""
    level, deviation = _trimmed(newest)
    past, _ = _trimmed(before)
    return np.stack([level, level - past, deviation])


def _trimmed(values: Floats) -> tuple[Floats, Floats]:
    """Return mean and standard deviation over the rows without the highest and the lowest: one burst is no level.

    NaN if fewer than half of the rows, or fewer than three, were observed.
    """
    known = np.isfinite(values)
    count = np.full((values.shape[0], values.shape[2]), values.shape[1])
    if not known.all():
        count = known.sum(axis=1)
        values = np.where(known, values, np.nan)
    enough = (2 * count >= values.shape[1]) & (count > TRIMMED)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        left = np.where(enough, count - TRIMMED, np.nan).astype(np.float32)
        mean = (_sum(values, known) - np.fmax.reduce(values, axis=1) - np.fmin.reduce(values, axis=1)) / left
        away = (values - mean[:, None]) ** 2
        # The two excluded rows are the furthest on each side.
        ends = (np.fmax.reduce(values, axis=1) - mean) ** 2 + (np.fmin.reduce(values, axis=1) - mean) ** 2
        return mean, np.sqrt(np.maximum(_sum(away, known) - ends, 0.0) / left)


def _sum(values: Floats, known: NDArray[np.bool_]) -> Floats:
    total: Floats = values.sum(axis=1) if known.all() else np.where(known, values, 0.0).sum(axis=1)
    return total


def _peers(values: Floats, groups: Integers) -> Floats:
    """Return each column's median over its group: (lines, columns); NaN in groups that are too small."""
    result: NDArray[np.float32] = np.full(values.shape, np.nan, np.float32)
    for members in group_members(groups):
        if len(members) >= PEERS_MIN and groups[members[0]] >= 0:
            chosen = members[:: len(members) // PEERS_SAMPLED + 1]
            result[:, members] = median_over_rows(values[:, chosen].T)[:, None]
    return result
