"""Finds GPUs whose clock stays below their peers' under load, shared by thermal and power throttling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.medians import median_over_rows
from eagle_eye.detectors.signs.once import once, once_for_members
from eagle_eye.detectors.signs.peers import PEERS_MIN, SIGMA_PER_MAD, group_members
from eagle_eye.detectors.signs.readings import READINGS_MIN, read_anew, read_anew_each
from eagle_eye.detectors.signs.runs import CHANCE_MAX, ended_runs, longer_than_peers
from eagle_eye.detectors.signs.shared_cause import TOGETHER_ROWS, TOGETHER_S, Struck
from eagle_eye.detectors.signs.under_load import (
    ROWS_MIN,
    Rows,
    carried,
    comparable,
    lines_within,
    loaded_rows,
    middle,
    nodes_among,
    peers_of,
    require_training,
    rests,
    works,
)
from eagle_eye.detectors.types import Blind, Floats, Integers, Window

MILD_DEFICIT = 0.02  # of the peers' clock: examined, and counted as company for a worse one
CLEAR_DEFICIT = 0.03  # counts once it has lasted; healthy GPUs at one power limit differ by 1 to 2%
LARGE_DEFICIT = 0.10  # counts early: throttling at 85 C costs 5 to 10%, at 90 C 30 to 40% (vendor notes)
LARGE_LASTS_S = 10.0
CLEAR_LASTS_S = 60.0
SIGMA_FLOOR = 0.004  # of the clock: NVML's steps of 15 MHz at 1.7 GHz are 0.9% apart
DISTANCE_MIN = 4.0  # standard deviations of the peers, below which it counts as normal
SIGMA_PER_QUARTER = 3.14  # converts the quarter nearest to the median, of normal values, to sigma
SCREEN_ROWS = 4  # evenly spaced over the newest LARGE_LASTS_S
HISTORY_S, HISTORY_ROWS = 600.0, 600
LEVEL_ROWS = 32  # before a moment, whose mean is a node's level
IN_COMMON_SHARE = 1 / 3  # of a GPU's deficit that its whole node shows, where not that GPU alone fell
SAMPLED, SAMPLE_MIN = 8_192, 64  # of a large fleet's series, for the screen's medians; at least this many of each group
LARGE_GROUP_NODES = 8  # one node's GPUs do not move the median of such a group
SUSPECTS_MAX = 48  # examined closely in one pass, worst first
SMOOTHED = 5  # rows per running median for the onset: single rows are noise, and throttling itself flickers
COARSE_RATIO = 0.2  # of the rows that show anything new: below, values are coarse, not repeated
LOW_SHARE = 0.6  # of the rows since the onset that must be low
READINGS_SAMPLED = 64  # peers whose single readings show how often a healthy one is that low
ROWS_BEFORE_MIN = 8  # before the onset, to estimate it: later peers may have the same trouble


@dataclass(frozen=True, slots=True, eq=False)
class SlowClock:
    """One GPU whose clock is below its peers' now.

    ``deficit`` is 1 - own / peers, ``distance`` the same in robust standard deviations of the peers. ``rows`` are the
    newest rows under load since the onset, ``stretch`` all of them, ``peers`` the series it was compared with.
    ``earlier_deficit`` is its largest before the onset, over as many rows as are used for the present. ``chronic``: the
    window shows no time before the onset. ``lasting``: it has lasted long enough for its size.
    """

    index: int
    clock_hz: float
    peers_hz: float
    deficit: float
    distance: float
    earlier_deficit: float
    onset_s: float
    chronic: bool
    lasting: bool
    rows: Rows
    stretch: Rows
    peers: Integers


class _Grouping(NamedTuple):
    """Groups of comparable series: the group of each series (S,), and the columns used for each group's median.

    ``table`` (groups, M) holds the same columns if all groups are equally large.
    """

    group: Integers
    members: tuple[Integers | slice, ...]
    table: Integers | None


class _Reference(NamedTuple):
    """The reference for a GPU: peers, their median clock in each row, the relative spread of their levels."""

    peers: Integers
    clock: Floats
    sigma: float


@once
def slow_clocks(window: Window, metric: str = "gpu_sm_clock_hertz", least: float = MILD_DEFICIT) -> list[SlowClock]:
    """Return the GPUs whose clock is ``least`` or more below their peers', worst first.

    Raises Blind without clocks, and if the job is not under load, since idle clocks mean nothing. ``metric`` may be any
    that ranks of a role share under load, such as NVLink traffic.
    """
    clock = window.device.get(metric)
    if clock is None:
        raise Blind(f"nobody reports {metric}")
    require_training(window)
    if len(clock) < ROWS_MIN:
        return []
    groups = comparable(window)
    screened = _screen(window, clock, least)
    if not len(screened):
        return []
    rows = _rows_at_work(window)
    newest = rows[-max(2 * _readings(window), _readings(window) + lines_within(window.times_s, LARGE_LASTS_S)) :]
    company: dict[tuple[int, int], Integers] = {}
    glanced: dict[tuple[int, int], _Reference] = {}
    references: dict[tuple[int, int], _Reference] = {}
    found = []
    for index in screened:
        own = clock[:, index]
        if metric.endswith("_hertz"):
            own = np.where(own > 0, own, np.nan)  # a GPU at work has a clock: zero is a failed reading
        key = _company(window, groups, index, company)
        if key not in glanced:
            glanced[key] = _reference(window, clock, company[key], newest)
        if len(newest) < len(rows) and _refuted(window, own, newest, glanced[key]):
            continue
        if key not in references:
            references[key] = _reference(window, clock, company[key], rows)
        slow = _close_look(window, clock, own, index, rows, references[key])
        if slow is not None and slow.deficit >= least:
            found.append(slow)
    return sorted(found, key=lambda slow: -slow.deficit)


def _rows_at_work(window: Window) -> Rows:
    """Return the rows under load in the period examined. Raises Blind if the newest are not under load."""
    if not rests(window):
        rows = loaded_rows(window, min(lines_within(window.times_s, HISTORY_S), HISTORY_ROWS))
        if len(rows) and rows[-1] >= len(window.times_s) - ROWS_MIN:
            return rows
    raise Blind("the job is not under load: clocks cannot be compared")


def fell_together(window: Window, slow: SlowClock, metric: str = "gpu_sm_clock_hertz") -> list[Struck]:
    """Return the other nodes whose clocks fell at about the same time, even if they have recovered since.

    A rack's cap is lifted node by node: the last one that is still slow is not to blame. Single GPUs count, and all of
    a node together, beside their own past: a clock that varies by itself hides in one GPU what many of them show.
    """
    if slow.chronic:
        return []
    clock, groups = window.device[metric], _grouping(window)
    together_s = max(TOGETHER_S, TOGETHER_ROWS * window.interval_s)
    lines = lines_within(window.times_s, LARGE_LASTS_S)
    rows = loaded_rows(window, min(lines_within(window.times_s, HISTORY_S), HISTORY_ROWS))
    since_s = window.times_s[rows] - slow.onset_s
    before = rows[since_s <= -together_s][-lines:]
    if len(before) < ROWS_MIN:
        before = rows[since_s <= 0][:lines]
    around = rows[(since_s > -together_s) & (since_s <= together_s + LARGE_LASTS_S)]
    around = around[around > before[-1]] if len(before) else around
    blocks = [around[start : start + lines] for start in range(0, len(around) - lines + 1, lines)]
    if not len(before) or not blocks:
        return []
    least = max(MILD_DEFICIT, slow.deficit / 2)
    deficits = [_deficits(clock[block], groups) for block in blocks]
    low = [deficit >= least for deficit in deficits]
    # Low in two consecutive blocks is not noise; a recent onset has only one block.
    fell = low[-1] if len(low) == 1 else np.any([one & next_one for one, next_one in pairwise(low)], axis=0)
    fell |= low[-1] & (window.times_s[blocks[-1][0]] >= slow.onset_s) & (len(clock) - blocks[-1][-1] <= lines)
    sound = ~(_deficits(clock[before], groups) >= least)
    own = int(window.node_of[slow.index])
    deepest: dict[int, float] = {}
    for column in np.flatnonzero(fell & sound).tolist():
        node = int(window.node_of[column])
        depth = float(np.fmax.reduce([deficit[column] for deficit in deficits]))
        deepest[node] = max(deepest.get(node, 0.0), depth)
    at_first = rows[since_s <= -together_s][-LEVEL_ROWS:]
    whole = _node_deficits(window, clock, at_first, rows[(since_s > 0) & (since_s <= 2 * together_s)])
    if whole[own] >= IN_COMMON_SHARE * slow.deficit:
        for node in np.flatnonzero(whole >= max(MILD_DEFICIT, whole[own] / 2)).tolist():
            depth = slow.deficit * float(whole[node] / whole[own])
            deepest[node] = max(deepest.get(node, 0.0), depth)
    return [Struck(node, slow.onset_s, depth) for node, depth in sorted(deepest.items()) if node != own]


def _node_deficits(window: Window, clock: Floats, before: Rows, since: Rows) -> Floats:
    """Return by what share each node's GPUs fell in common, beside other nodes: (nodes,); 0 within the spread."""
    if len(before) < ROWS_MIN or len(since) < ROWS_MIN:
        return np.zeros(len(window.nodes))
    with np.errstate(invalid="ignore", divide="ignore"):
        change = _mean(clock[since]) / _mean(clock[before])
        known = np.isfinite(change)
        count = np.bincount(window.node_of[known], minlength=len(window.nodes))
        change = np.bincount(window.node_of[known], change[known], minlength=len(window.nodes)) / count
        centre, sigma = _centre(change)
        sigma = max(sigma, SIGMA_FLOOR)
        deficits: Floats = np.where(change < centre - DISTANCE_MIN * sigma, 1 - change / centre, 0.0)
    return deficits


def _deficits(rows: Floats, groups: _Grouping) -> Floats:
    """Return by what share each series' mean over some rows is below its group's median; 0 within its spread."""
    level = _glance(rows)
    centre, sigma = _centres(level, groups)
    with np.errstate(invalid="ignore", divide="ignore"):
        deficits: Floats = np.where(level < centre - DISTANCE_MIN * sigma, 1 - level / centre, 0.0)
    return deficits


def _glance(rows: Floats) -> Floats:
    """Return each series' mean over a few evenly spaced rows, over all if these miss its node's turn to report."""
    level = _mean(rows[:: max(len(rows) // SCREEN_ROWS, 1)])
    missed = np.isnan(level)
    if missed.any():
        level[missed] = _mean(rows[:, missed])
    return level


def _mean(rows: Floats) -> Floats:
    level: Floats = rows.mean(axis=0)
    if np.isnan(level).any():
        known = np.isfinite(rows)
        count = known.sum(axis=0)
        level = np.where(count > 0, np.where(known, rows, 0.0).sum(axis=0) / np.maximum(count, 1), np.nan)
    return level


def _screen(window: Window, clock: Floats, least: float) -> list[int]:
    """Return the series whose mean over a few rows is low, worst first."""
    level = _glance(clock[-lines_within(window.times_s, LARGE_LASTS_S) :])
    centre, sigma = _centres(level, _grouping(window))
    with np.errstate(invalid="ignore"):
        low = np.flatnonzero(level < centre - np.maximum(least * centre, DISTANCE_MIN * sigma))
    if not len(low):
        return []
    deficit = 1 - level[low] / centre[low]
    return [int(index) for index in low[np.argsort(-deficit, kind="stable")[:SUSPECTS_MAX]]]


@once
def _grouping(window: Window) -> _Grouping:
    """Return the groups of comparable series; groups by role alone are cached for the members."""
    groups = comparable(window)
    return _roles(window) if groups is window.role_of else _grouped(groups)


@once_for_members
def _roles(window: Window) -> _Grouping:
    return _grouped(window.role_of)


def _grouped(groups: Integers) -> _Grouping:
    stride = len(groups) // SAMPLED + 1
    if not len(groups) or (groups == groups[0]).all():
        return _Grouping(np.zeros(len(groups), dtype=np.intp), (slice(None, None, stride),), None)
    if int(groups.max()) > len(groups):
        groups = np.unique(groups, return_inverse=True)[1]
    sampled = groups[::stride]
    members: list[Integers | slice] = [np.zeros(0, dtype=np.intp)] * (int(groups.max()) + 1)
    for found in group_members(sampled):
        members[int(sampled[found[0]])] = found * stride
    if stride > 1:
        seen, there = np.bincount(sampled, minlength=len(members)), np.bincount(groups)
        for group in np.flatnonzero((seen < SAMPLE_MIN) & (there > seen)).tolist():
            members[group] = np.flatnonzero(groups == group)
    alike = len({len(own) for own in members if isinstance(own, np.ndarray)}) == 1
    return _Grouping(groups, tuple(members), np.array(members, dtype=np.intp) if alike else None)


def _centres(level: Floats, grouping: _Grouping) -> tuple[Floats, Floats]:
    """Return median and spread of each series' group: (S,) each, from a sample in a large fleet."""
    if grouping.table is not None:
        values = level[grouping.table]
        if np.isfinite(values).all():
            half, quarter = values.shape[1] // 2, (values.shape[1] - 1) // 4
            centre = np.partition(values, half, axis=1)[:, half]
            near = np.partition(np.abs(values - centre[:, None]), quarter, axis=1)[:, quarter]
            sigma = SIGMA_PER_QUARTER * near.astype(np.float64)
            return centre.astype(np.float64)[grouping.group], sigma[grouping.group]
    result = np.array([_centre(level[members]) for members in grouping.members])
    return result[grouping.group, 0], result[grouping.group, 1]


def _centre(values: Floats) -> tuple[float, float]:
    """Return the (upper) median and the spread of the observed values, NaN if none.

    The spread is taken from the quarter nearest to the median: half of the values may be faulty.
    """
    known = values[np.isfinite(values)]
    if not len(known):
        return math.nan, math.nan
    half = len(known) // 2
    centre = float(np.partition(known, half)[half])
    quarter = (len(known) - 1) // 4
    return centre, SIGMA_PER_QUARTER * float(np.partition(np.abs(known - centre), quarter)[quarter])


def _company(window: Window, groups: Integers, index: int, known: dict[tuple[int, int], Integers]) -> tuple[int, int]:
    """Return the key of a series' peers in ``known``, adding them if missing; a large group has a single key."""
    group = int(groups[index])
    key = (group, -1) if (group, -1) in known else (group, int(window.node_of[index]))
    if key not in known:
        peers = peers_of(window, index, groups)
        key = (group, -1) if nodes_among(window, peers) >= LARGE_GROUP_NODES else key
        known[key] = peers
    return key


def _reference(window: Window, clock: Floats, peers: Integers, rows: Rows) -> _Reference:
    if len(peers) < PEERS_MIN:
        return _Reference(peers, np.full(len(rows), np.nan), math.inf)
    values = clock[np.ix_(rows, peers)]
    levels = median_over_rows(values[-lines_within(window.times_s, LARGE_LASTS_S) :])
    levels = levels[np.isfinite(levels)]
    centre = middle(levels) if len(levels) >= PEERS_MIN else 0.0
    if centre <= 0:
        return _Reference(peers, np.full(len(rows), np.nan), math.inf)
    sigma = SIGMA_PER_MAD * middle(np.abs(levels - centre)) / centre
    return _Reference(peers, carried(median_over_rows(values.T)), max(sigma, SIGMA_FLOOR))


def _shown(
    window: Window,
    clock: Floats,
    index: int,
    rows: Rows,
    since: Rows,
    low: NDArray[np.bool_],
    against: _Reference,
    least: float,
) -> bool:
    """Whether enough readings show a clock that is low in the rows ``since`` its onset, and not by chance."""
    anew = read_anew(window, index)
    if anew[rows].mean() < COARSE_RATIO:
        anew = np.ones_like(anew)
    if np.count_nonzero(anew[since]) < READINGS_MIN:
        return False
    before = rows[: int(np.searchsorted(rows, since[0]))]
    before = before if len(before) >= ROWS_BEFORE_MIN else rows
    peers = against.peers[:: len(against.peers) // READINGS_SAMPLED + 1]
    usual = against.clock[: len(before), None]
    readings = _low_readings(window, clock, peers, before, usual, least)
    return not _by_chance(*readings, int(np.count_nonzero(anew[since] & low)))


def clocks_wander(window: Window, slow: SlowClock, metric: str = "gpu_sm_clock_hertz") -> bool:
    """Whether GPUs of other nodes, each against its own median, are or were as low for about as long.

    How long a clock wanders is a matter of the hardware, not of the role, and a role may have few peers: GPUs of all
    roles count, in the whole window.
    """
    clock, least = window.device[metric], 1 - slow.deficit / 2
    rows = loaded_rows(window, len(window.times_s))
    others = np.flatnonzero(window.node_of != window.node_of[slow.index])
    others = others[:: len(others) // READINGS_SAMPLED + 1]
    usual = median_over_rows(clock[np.ix_(rows, others)])
    with np.errstate(invalid="ignore"):
        low = clock[slow.stretch, slow.index] < least * slow.peers_hz
    times = int(np.count_nonzero(read_anew(window, slow.index)[slow.stretch] & low))
    return not longer_than_peers(times, *_low_readings(window, clock, others, rows, usual, least), ongoing=True)


def _low_readings(
    window: Window, clock: Floats, columns: Integers, rows: Rows, usual: Floats, least: float
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which rows hold a reading at ``least`` of the usual clock or below, and which any: (rows, columns)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = clock[np.ix_(rows, columns)] / usual
        seen = read_anew_each(window, tuple(columns.tolist()))[rows] & np.isfinite(ratio)
        return seen & (ratio <= least), seen


def _by_chance(below: NDArray[np.bool_], seen: NDArray[np.bool_], times: int) -> bool:
    """Whether chance explains that a healthy GPU has ``times`` consecutive low readings.

    Uses how often its peers have such low readings, and how often one is followed by another: clock distributions have
    tails that can last for minutes, and a source that is read twice a minute has few readings.
    """
    ended, known = ended_runs(below, seen)
    low = ended.sum(axis=0)
    counted = low / np.maximum(known, 1) < LOW_SHARE
    share = max(int(low[counted].sum()), 1) / max(int(known[counted].sum()), 1)
    following = int((ended[:-1] & ended[1:]).sum(axis=0)[counted].sum())
    again = max(following / max(int(low[counted].sum()), 1), share)
    return share * again ** (times - 1) > CHANCE_MAX


def _readings(window: Window) -> int:
    """Return how many of one GPU's readings are within LARGE_LASTS_S; there are more lines if nodes report in turn."""
    return max(ROWS_MIN, math.ceil(LARGE_LASTS_S / window.interval_s))


def _refuted(window: Window, values: Floats, rows: Rows, against: _Reference) -> bool:
    """Whether the newest rows alone show that a close examination would find nothing: most suspects are chance."""
    own, reference = values[rows], against.clock
    known = np.isfinite(own) & np.isfinite(reference) & (reference > 0)
    lines = _readings(window)
    if not np.isfinite(reference).all() or int(known.sum()) < lines:
        return False
    return _deficit(own[known] / reference[known], lines, against.sigma) is None


def _deficit(ratio: Floats, lines: int, sigma: float) -> float | None:
    """Return by what share a clock is below its reference in the newest rows; None if it is not."""
    deficit = 1 - middle(ratio[-lines:])
    if deficit < MILD_DEFICIT or deficit < DISTANCE_MIN * sigma:
        return None
    return None if middle(ratio[-ROWS_MIN:]) > 1 - deficit / 2 else deficit  # it is over


def _close_look(
    window: Window,
    clock: Floats,
    values: Floats,
    index: int,
    rows: Rows,
    against: _Reference,
) -> SlowClock | None:
    own, reference, sigma = values[rows], against.clock, against.sigma
    peers = against.peers[window.node_of[against.peers] != window.node_of[index]]
    peers = peers if len(peers) >= PEERS_MIN else against.peers
    known = np.isfinite(own) & np.isfinite(reference) & (reference > 0)
    seen, ratio = rows[known], own[known] / reference[known]
    lines = _readings(window)
    if len(ratio) < ROWS_MIN or window.times_s[seen[-1]] < window.times_s[-1] - lines * window.interval_s:
        return None
    deficit = _deficit(ratio, lines, sigma)
    if deficit is None:
        return None
    since = _onset(ratio, deficit)
    stretch = ratio[since:]
    onset_s = float(window.times_s[seen[since]]) - window.interval_s
    lasted_s = float(window.times_s[seen[-1]]) - onset_s
    chronic = since == 0
    enough_s = LARGE_LASTS_S if deficit >= LARGE_DEFICIT and not chronic else CLEAR_LASTS_S
    low = stretch < 1 - deficit / 2
    newest = rows[rows >= max(seen[since], seen[-min(lines, len(seen))])]
    if not works(window, index, peers, newest):
        return None
    return SlowClock(
        index=index,
        clock_hz=middle(values[newest]),
        peers_hz=middle(reference[known][since:][-lines:]),
        deficit=deficit,
        distance=deficit / sigma,
        earlier_deficit=_largest(ratio[:since], lines),
        onset_s=onset_s,
        chronic=chronic,
        lasting=deficit >= CLEAR_DEFICIT
        and lasted_s >= enough_s
        and low.mean() >= LOW_SHARE
        and _shown(window, clock, index, rows, seen[since:], low, against, 1 - deficit / 2),
        rows=newest,
        stretch=rows[rows >= seen[since]],
        peers=peers,
    )


def _largest(ratio: Floats, lines: int) -> float:
    """Return the largest deficit over any ``lines`` consecutive rows; 0 with fewer rows."""
    if len(ratio) < lines:
        return 0.0
    levels = np.median(np.lib.stride_tricks.sliding_window_view(ratio, lines), axis=1)
    return max(1 - float(levels.min()), 0.0)


def _onset(ratio: Floats, deficit: float) -> int:
    """Return the first row of the current low run."""
    smooth = ratio
    if len(ratio) >= 2 * SMOOTHED:
        padded = np.concatenate([ratio[: SMOOTHED // 2], ratio, ratio[-(SMOOTHED // 2) :]])
        smooth = np.median(np.lib.stride_tricks.sliding_window_view(padded, SMOOTHED), axis=1)
    ordinary = np.flatnonzero(smooth >= 1 - deficit / 2)
    return min(int(ordinary[-1]) + 1, len(ratio) - 1) if len(ordinary) else 0
