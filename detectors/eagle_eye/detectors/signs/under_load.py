"""Compares GPUs under load: which rows were under load, which GPUs are comparable, and their levels in these rows.

Idle GPUs lower clocks, power and PCIe generation by themselves, and waiting ones look idle: only rows in which the job
works describe a GPU.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.medians import median_over_rows
from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.signs.peers import PEERS_MIN, SIGMA_PER_MAD
from eagle_eye.detectors.signs.progress import quiet_phase, typical_step_s
from eagle_eye.detectors.types import Blind, Floats, Integers, Window

# Indicators of load, best first; the minimum level that is load, and the share of its usual level that still is.
LOAD_SIGNS = (
    ("gpu_tensor_active_ratio", 0.03, 0.5),
    ("gpu_sm_active_ratio", 0.2, 0.5),
    ("gpu_power_watts", 0.0, 0.75),  # a GPU that waits in a collective draws a third to a half of a working one's power
    ("gpu_utilization_ratio", 0.3, 0.5),
)
USUAL_QUANTILE = 0.75
STANDSTILL_STEPS, STANDSTILL_ROWS = 3.0, 3.0  # without a step for this long, the job does not work
LOOKS = 16  # rows sampled over the window; a GPU that works in at least one is not a spare
PEERS_SAMPLED = 64  # of a large group, enough for a median and its spread
LIMITS_ALIKE_RATIO = 0.02  # power limits closer than this are the same
LIMIT_NODES_MIN = 3  # fewer nodes with a limit of their own are not a group: they are compared with the others
BUSY_UTILIZATION = 0.5  # of a working GPU, however slow: NVML counts any kernel, including a waiting one

ROWS_MIN = 3

Rows = NDArray[np.intp]


class PeerComparison(NamedTuple):
    """A series' level over some rows, its peers' median level, and the robust spread between peers."""

    own: float
    peers: float
    sigma: float

    @property
    def ratio(self) -> float:
        """Own level over the peers'; NaN if undefined."""
        return self.own / self.peers if self.peers > 0 else math.nan


def lines_within(times_s: Floats, seconds: float) -> int:
    """Return how many of the newest rows are within ``seconds``, at least ROWS_MIN if available.

    Agents that tick at different moments produce more than one row per interval.
    """
    if len(times_s) == 0:
        return 0
    covered = len(times_s) - int(np.searchsorted(times_s, times_s[-1] - seconds, side="right"))
    return min(max(covered, ROWS_MIN), len(times_s))


def carried(values: Floats) -> Floats:
    """Return values (rows,) with gaps filled by the last known value, at the beginning by the first known."""
    known = np.flatnonzero(np.isfinite(values))
    if len(known) in (0, len(values)):
        return values
    at = np.clip(np.searchsorted(known, np.arange(len(values)), side="right") - 1, 0, None)
    filled: Floats = values[known[at]]
    return filled


def require_training(window: Window) -> None:
    """Raise Blind while a rank is in a phase without load: nothing can be compared then."""
    phase = quiet_phase(window)
    if phase:
        raise Blind(f"a rank is in phase {phase}: without load GPUs cannot be compared")


@once
def loaded_rows(window: Window, lines: int) -> Rows:
    """Return which of the newest ``lines`` device rows were under load, as indexes into all rows."""
    lines = min(lines, len(window.times_s))
    first = len(window.times_s) - lines
    rows = np.arange(first, len(window.times_s))
    sample = np.arange(0, len(window.series), max(len(window.series) // PEERS_SAMPLED, 1))
    for metric, floor, share in LOAD_SIGNS:
        values = window.device.get(metric)
        if values is None:
            continue
        level = median_over_rows(values[first:][:, sample].T)
        known = level[np.isfinite(level)]
        if len(known) == 0:
            continue
        usual = float(np.quantile(known, USUAL_QUANTILE))
        rows = rows[level >= max(share * usual, floor)]  # NaN is not
        break
    return rows[window.times_s[rows] <= _worked_until_s(window)]


def rests(window: Window) -> bool:
    """Whether the newest rows are not under load because the job stands still: cheaper than ``loaded_rows``."""
    return len(window.times_s) >= ROWS_MIN and bool(window.times_s[-ROWS_MIN] > _worked_until_s(window))


def _worked_until_s(window: Window) -> float:
    """Return until when the job works according to its steps; inf if not reported."""
    if "train_step" not in window.device or not math.isfinite(window.last_step):
        return math.inf
    return window.advanced_s + max(STANDSTILL_STEPS * typical_step_s(window), STANDSTILL_ROWS * window.interval_s)


@once
def comparable(window: Window) -> Integers:
    """Return (S,) groups of comparable series: the roles, split if many nodes have a power limit of their own.

    GPUs that never work are a group of their own.
    """
    groups, spare = _by_limit(window), spare_devices(window)
    return groups if spare is None else np.where(spare, groups + int(groups.max()) + 1, groups)


@once
def spare_devices(window: Window) -> NDArray[np.bool_] | None:
    """Return the series that no sampled row shows working while others do, as on spare nodes: (S,); None: none."""
    for metric, floor, _ in LOAD_SIGNS:
        values = window.device.get(metric)
        if values is None or floor <= 0 or len(values) == 0:
            continue
        with np.errstate(invalid="ignore"):
            spare = np.fmax.reduce(values[:: max(len(values) // LOOKS, 1)], axis=0) < floor
        return spare if spare.any() and not spare.all() else None
    return None


def standby_nodes(window: Window) -> NDArray[np.bool_]:
    """Return the nodes whose GPUs have never worked in view while others' did (N,): what they do says nothing."""
    spare = spare_devices(window)
    if spare is None:
        return np.zeros(len(window.nodes), dtype=np.bool_)
    every, idle = (np.bincount(nodes, minlength=len(window.nodes)) for nodes in (window.node_of, window.node_of[spare]))
    return np.asarray((every > 0) & (idle == every))


@once
def power_limits(window: Window) -> Floats | None:
    """Return each series' power limit in watts, (S,), NaN if not observed; None if none is, or all are alike."""
    limits = window.device.get("gpu_power_limit_watts")
    if limits is None or len(limits) == 0:
        return None
    lately = limits[-lines_within(window.times_s, (ROWS_MIN - 0.5) * window.interval_s) :]
    most = np.fmax.reduce(lately, axis=None, initial=0.0)
    if not np.fmin.reduce(lately, axis=None, initial=np.inf) < (1 - LIMITS_ALIKE_RATIO) * most:
        return None
    return median_over_rows(lately)  # one reading may have failed


def _by_limit(window: Window) -> Integers:
    newest = power_limits(window)
    if newest is None:
        return window.role_of
    highest = np.fmax.reduce(newest, initial=0.0)
    step = np.nan_to_num(np.round(newest / (LIMITS_ALIKE_RATIO * highest)), nan=-1.0).astype(np.int64)
    groups: Integers = window.role_of.astype(np.int64) * 1_000 + step + 1
    # Whoever lowered a limit asked for no role: nodes of all roles say how many have it.
    few = [limit for limit in np.unique(step) if len(np.unique(window.node_of[step == limit])) < LIMIT_NODES_MIN]
    for role in np.unique(window.role_of[np.isin(step, few)]).tolist():
        members = window.role_of == role
        names, counts = np.unique(groups[members], return_counts=True)
        groups[members & np.isin(step, few)] = names[np.argmax(counts)]
    return groups


def peers_of(window: Window, index: int, groups: Integers) -> Integers:
    """Return (a sample of) the series comparable with one: on other nodes if there are any, as indexes."""
    members, spare = np.flatnonzero(groups == groups[index]), spare_devices(window)
    if spare is not None and not spare[index]:
        members = members[~spare[members]]
    elsewhere = members[window.node_of[members] != window.node_of[index]]
    if len(elsewhere) < PEERS_MIN:
        elsewhere = members[members != index]
    sample: Integers = elsewhere[:: max(math.ceil(len(elsewhere) / PEERS_SAMPLED), 1)]
    return sample


def nodes_among(window: Window, columns: Integers) -> int:
    """Return on how many nodes the series are."""
    return len(np.unique(window.node_of[columns]))


def compare(window: Window, metric: str, index: int, peers: Integers, rows: Rows) -> PeerComparison | None:
    """Return how a series compares with its peers in a metric over some rows; None if not observed."""
    values = window.device.get(metric)
    if values is None or len(rows) == 0 or len(peers) == 0:
        return None
    return compare_values(values[rows, index], values[np.ix_(rows, peers)])


def compare_values(values: Floats, of_peers: Floats) -> PeerComparison | None:
    """Return how a series' values compare with its peers', (rows, peers); None if too few were observed."""
    own, levels = middle(values), median_over_rows(of_peers)
    levels = levels[np.isfinite(levels)]
    if not math.isfinite(own) or len(levels) < PEERS_MIN:
        return None
    centre = middle(levels)
    return PeerComparison(own, centre, SIGMA_PER_MAD * middle(np.abs(levels - centre)))


def bit_share(window: Window, mask: int, columns: Integers, rows: Rows) -> float:
    """Return the share of observed values of some series over some rows that have a bit of the mask; NaN if none."""
    reasons = window.device.get("gpu_throttle_reasons")
    if reasons is None or len(rows) == 0 or len(columns) == 0:
        return math.nan
    values = reasons[np.ix_(rows, columns)]
    known = values[np.isfinite(values)]
    return float(((known.astype(np.int64) & mask) != 0).mean()) if len(known) else math.nan


def seen_bits(window: Window, index: int, rows: Rows) -> str:
    """Return all clocks-event-reason bits that a series showed over some rows, as a hexadecimal mask."""
    values = window.device["gpu_throttle_reasons"][rows, index]
    return f"{int(np.bitwise_or.reduce(values[np.isfinite(values)].astype(np.int64))):#x}"


def works(window: Window, index: int, peers: Integers, rows: Rows) -> bool:
    """Whether a GPU works, as opposed to idling because its host or peers give it nothing to do."""
    for metric in ("gpu_tensor_active_ratio", "gpu_sm_active_ratio"):
        found = compare(window, metric, index, peers, rows)
        if found is not None and found.peers > 0:
            return found.own >= 0.5 * found.peers
    used = compare(window, "gpu_utilization_ratio", index, peers, rows)
    return used is None or used.own >= BUSY_UTILIZATION


def means(values: Floats) -> Floats:
    """Return each column's mean over its observed rows: (columns,), NaN if there are none."""
    known = np.isfinite(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        result: Floats = np.where(known, values, 0.0).sum(axis=0) / known.sum(axis=0)
    return result


def middle(values: Floats) -> float:
    """Return the median of the finite values; NaN if there are none."""
    known: NDArray[Any] = np.sort(values[np.isfinite(values)], axis=None)
    count = len(known)
    return float(known[(count - 1) // 2] + known[count // 2]) / 2 if count else math.nan
