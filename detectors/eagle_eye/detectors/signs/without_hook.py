"""Infers the state of a job without the hook from its GPUs: whether it works, and which processes have ended."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from eagle_eye.detectors.signs.medians import median_of, median_over_rows
from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.types import Floats, Integers, Window

WORK_METRICS = ("gpu_power_watts", "gpu_tensor_active_ratio", "gpu_dram_active_ratio")
WAITING_RATIO = 0.6  # of the earlier level: GPUs waiting in a collective draw a third of their power, idle ones a tenth
USUAL_QUANTILE = 0.9
SAMPLED = 64  # devices whose median represents the whole job
MOVED_ROWS = 120  # past rows that show a job's usual throughput
GLANCED = 48  # earlier rows for a quick check of the usual level
STEADY_MOVES = (  # counters that training moves all through a step
    "gpu_tensor_active_ratio",
    "gpu_dram_active_ratio",
    "gpu_nvlink_tx_bytes_per_second",
)
MOVES = (*STEADY_MOVES, "gpu_pcie_tx_bytes_per_second")  # throughput; PCIe comes in bursts, as ports do
NODE_MOVES = "node_rdma_tx_bytes_per_second"
NVLINK, NVLINK_BOTH_WAYS = "gpu_nvlink_tx_bytes_per_second", "gpu_nvlink_bytes_per_second"
WIRES_MIN = 2  # of NVLink, PCIe and ports, that must be idle to count on their own
STEADY_RATIO = 0.5  # of a job's rows in which NVLink must have carried its usual load, to indicate a standstill
WAITING_MOVES = "gpu_dram_active_ratio"  # waiting kernels poll memory: used only if no other counter is observed
STILL_RATIO = 0.1  # of the earlier level: a job ten times slower than before is no standstill yet
IDLE_ROWS = 2  # whole rows without work before the job counts as idle: one may be due to a collective or a scrape
ROWS_MIN = 4
MEMORY_METRIC = "gpu_memory_used_bytes"
FREED_RATIO = 0.1  # of the earlier level, and...
FREED_BYTES_MAX = 2 * 2**30  # ...no more than the driver's own: no training process holds so little
NEWEST_LINES = 8  # rows that contain each node's newest: nodes' rows interleave
COMPUTING_TENSOR_RATIO = 0.02  # of the time; waiting kernels use no tensor cores...
USED_BYTES_PER_S = 1e7  # links carry up to this without training
COMPUTING_POWER_RATIO = 0.5  # ...and draw a third of the GPU's limit
HELD_LINES = 64  # evenly spaced rows, in one of which the memory must have been in use


class Work(NamedTuple):
    """Whether most of a job's GPUs work: ``idle_s`` is for how long they have not, 0 while they do.

    ``since_s`` is the end of the last interval in which they worked. ``longest_pause_s`` is the longest earlier time
    without work that ended, ``worked_s`` how long the window shows them at work; both NaN while they work.
    ``by_wires``: idleness is known only from NVLink, PCIe and ports, which carry nothing any more; it may be an
    evaluation without communication. ``unclear``: they draw little power, and nothing observed says whether they wait
    or do lighter work.
    """

    since_s: float
    idle_s: float
    longest_pause_s: float
    worked_s: float
    by_wires: bool = False
    unclear: bool = False


class Freed(NamedTuple):
    """A device whose memory was in use and is now free: its column, when it was last read in use, and first free."""

    column: int
    since_s: float
    free_s: float


@once
def work(window: Window) -> Work | None:
    """Return the activity of most of the job's reporting GPUs; None if not reported, or by too few rows.

    If power or memory show work, tensor cores take precedence, and if those are not observed the traffic over NVLink,
    PCIe and ports: waiting kernels draw power and poll memory, but use no tensor core and move nothing.
    """
    power = _work_by(window, WORK_METRICS[0])
    if power is not None and power.idle_s > 0:
        return power
    tensor = _work_by(window, WORK_METRICS[1])
    if tensor is not None and tensor.idle_s > 0:
        return tensor
    wires = None if tensor is not None else _idle_by_wires(window)
    return wires or power or tensor or _work_by(window, WORK_METRICS[2])


def _work_by(window: Window, metric: str) -> Work | None:
    values = window.device.get(metric)
    if values is None:
        return None
    columns = _heard(values)
    if metric == WORK_METRICS[1] and not _mean(_glance(columns)) >= COMPUTING_TENSOR_RATIO:
        return None  # a job that uses no tensor cores
    seen = None if _works_at_a_glance(columns) else _seen(columns, window.times_s)
    if seen is None:
        return Work(float(window.times_s[-1]), 0.0, math.nan, math.nan) if len(columns) >= ROWS_MIN else None
    if seen.idle_s > 0 and (moving := _moves(window, seen.since_s)) is not False:
        return Work(float(window.times_s[-1]), 0.0, seen.longest_pause_s, seen.worked_s, unclear=moving is None)
    return seen


def _idle_by_wires(window: Window) -> Work | None:
    """Return since when no link that the job has used all the time carries anything; None if that is inconclusive.

    A single link may be idle while the job goes on in another way.
    """
    values = throughput(window, NVLINK)
    columns = None if values is None else _heard(values)
    seen = None if columns is None or _works_at_a_glance(columns) else _seen(columns, window.times_s)
    if columns is None or seen is None or seen.idle_s == 0:
        return None
    level = median_over_rows(columns[window.times_s <= seen.since_s].T)
    level = level[np.isfinite(level)]
    if (level >= WAITING_RATIO * np.quantile(level, USUAL_QUANTILE)).mean() < STEADY_RATIO:
        return None  # bursty traffic has gaps
    moving = [moves for moves in _moving(window, seen.since_s) if moves is not None]
    return seen._replace(by_wires=True) if len(moving) >= WIRES_MIN and not any(moving) else None


def throughput(window: Window, metric: str) -> Floats | None:
    """Return the devices' values of a metric, (T, S), None if it is unknown; of NVLink else what goes both ways."""
    values = window.device.get(metric)
    return window.device.get(NVLINK_BOTH_WAYS) if values is None and metric == NVLINK else values


def _heard(values: Floats) -> Floats:
    """Return some of the columns of reporting nodes: GPU activity of silent ones is unknown."""
    heard = np.flatnonzero(np.isfinite(values[-NEWEST_LINES:]).any(axis=0))
    columns: Floats = values[:, heard[:: max(len(heard) // SAMPLED, 1)]]
    return columns


def idle_since_s(window: Window) -> float | None:
    """Return since when most of the job's GPUs do much less than before; None if they work, or if unknown."""
    seen = work(window)
    return seen.since_s if seen is not None and seen.idle_s > 0 else None


@once
def computing(window: Window) -> bool | None:
    """Whether most GPUs compute, judged by the present alone; None if not reported.

    For a job that never worked in view, for which a steady level is inconclusive.
    """
    tensor = _typical(window.device.get("gpu_tensor_active_ratio"))
    if math.isfinite(tensor):
        return tensor >= COMPUTING_TENSOR_RATIO
    drawn = _typical(window.device.get("gpu_power_watts")) / _typical(window.device.get("gpu_power_limit_watts"))
    return drawn >= COMPUTING_POWER_RATIO if math.isfinite(drawn) else None


def _typical(values: Floats | None) -> float:
    """Return the median over devices and the newest rows, NaN if nothing was observed."""
    newest = np.zeros(0) if values is None else values[-NEWEST_LINES:]
    known = newest[np.isfinite(newest)]
    return median_of(known) if len(known) else math.nan


def _moves(window: Window, since_s: float) -> bool | None:
    """Return whether any training counter still moves since ``since_s``: then the job is slow and does not stand still.

    Counters that only training moves take precedence over those that waiting moves too, which are used if nothing else
    is observed. None without either: lower power alone is no standstill, unless ranks report steps.
    """
    seen = moves(window, since_s)
    if seen is None:
        seen = _still_moves(window.device.get(WAITING_MOVES), window.times_s, since_s, 0.0)
    return False if seen is None and math.isfinite(window.last_step) else seen


@once
def moves(window: Window, since_s: float) -> bool | None:
    """Return whether any counter that only training moves has moved since ``since_s``; None if none is observed.

    This includes other computation: an evaluation uses tensor cores.
    """
    known = [one for one in _moving(window, since_s) if one is not None]
    return any(known) if known else None


def _moving(window: Window, since_s: float) -> list[bool | None]:
    """Return whether each training-only counter still moves: tensor cores, then the links; None if not known."""
    tensor, *wires = (metric for metric in MOVES if metric != WAITING_MOVES)
    return [
        _still_moves(window.device.get(tensor), window.times_s, since_s, COMPUTING_TENSOR_RATIO),
        *(_still_moves(throughput(window, wire), window.times_s, since_s, USED_BYTES_PER_S) for wire in wires),
        _still_moves(window.node.get(NODE_MOVES), window.node_times_s, since_s, USED_BYTES_PER_S),
    ]


def _still_moves(values: Floats | None, times_s: Floats, since_s: float, least: float) -> bool | None:
    """Return whether half of the columns have moved since ``since_s`` at more than STILL_RATIO of before.

    None if unknown, or if the usual level was below ``least``. Only the newer half of the rows since then counts:
    sources are slower than rows, and repeat earlier values.
    """
    if values is None:
        return None
    columns = values[:, :: max(values.shape[1] // SAMPLED, 1)]
    first = int(np.searchsorted(times_s, since_s, side="right"))
    since = columns[first + 1 :]
    now, usual = _means(since[len(since) // 2 :]), _means(columns[:first][-MOVED_ROWS:])
    known = np.isfinite(now) & (usual > least)
    return median_of(now[known] / usual[known]) > STILL_RATIO if known.any() else None


def _means(values: Floats) -> Floats:
    """Return each column's mean over its observed rows: (columns,), NaN if there are none."""
    known = np.isfinite(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: Floats = np.where(known, values, 0.0).sum(axis=0) / known.sum(axis=0)
    return mean


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _works_at_a_glance(columns: Floats) -> bool:
    """Whether the newest rows show as much work as a few earlier ones: usually ends a pass over a healthy job."""
    newest = columns[-IDLE_ROWS:]
    glance = np.concatenate([_glance(columns), newest])
    level = median_over_rows(glance.T)
    known = level[np.isfinite(level)]
    if len(known) < ROWS_MIN:
        return False
    usual = WAITING_RATIO * np.quantile(known, USUAL_QUANTILE)
    with np.errstate(invalid="ignore"):
        return bool((level[-len(newest) :] >= usual).any())


def _glance(columns: Floats) -> Floats:
    return columns[:: max(len(columns) // GLANCED, 1)]


def _seen(columns: Floats, times_s: Floats) -> Work | None:
    whole, at_s = _whole_rows(columns, times_s)
    if len(whole) < ROWS_MIN:
        return None
    level = median_over_rows(whole.T)
    working = np.flatnonzero(level >= WAITING_RATIO * np.quantile(level, USUAL_QUANTILE))
    since_s, newest_s = float(at_s[working[-1]]), float(times_s[-1])
    gaps_s = np.diff(at_s[working])
    idle = working[-1] < len(whole) - IDLE_ROWS
    return Work(
        since_s=since_s if idle else newest_s,
        idle_s=newest_s - since_s if idle else 0.0,
        longest_pause_s=float(gaps_s.max(initial=0.0)),
        worked_s=since_s - float(at_s[working[0]]),
    )


def _whole_rows(columns: Floats, times_s: Floats) -> tuple[Floats, Floats]:
    """Return rows in which at least half of the columns have a value, and their times.

    Sources that are read at different moments fill a row of the grid in part; such rows are joined with the next ones.
    """
    if (2 * np.isfinite(columns).sum(axis=1) >= columns.shape[1]).all():
        return columns, times_s
    rows, at_s = [], []
    joined = np.full(columns.shape[1], np.nan)
    for row, time_s in zip(columns, times_s.tolist(), strict=True):
        joined = np.where(np.isfinite(row), row, joined)
        if 2 * np.isfinite(joined).sum() >= len(joined):
            rows.append(joined)
            at_s.append(time_s)
            joined = np.full(columns.shape[1], np.nan)
    return np.array(rows), np.array(at_s)


@once
def freed_memory(window: Window) -> list[Freed]:
    """Return the devices whose process has ended, by their memory: in use before, free in the newest two rows."""
    values = window.device.get(MEMORY_METRIC)
    if values is None or len(values) < ROWS_MIN:
        return []
    now = np.fmax.reduce(values[-2:], axis=0)
    with np.errstate(invalid="ignore"):
        low = np.flatnonzero(now < FREED_BYTES_MAX)
    if len(low) == 0:
        return []
    before = np.fmax.reduce(values[:: max(len(values) // HELD_LINES, 1)][:, low], axis=0)
    with np.errstate(invalid="ignore"):
        low = low[now[low] < FREED_RATIO * before]
    return [_freed(window, column) for column in low.tolist()]


def unused_devices(window: Window) -> list[int]:
    """Return the columns whose memory no process uses while most devices' memory is in use."""
    values = window.device.get(MEMORY_METRIC)
    if values is None or len(values) == 0:
        return []
    now = np.fmax.reduce(values[-NEWEST_LINES:], axis=0)
    with np.errstate(invalid="ignore"):
        low = np.flatnonzero(now < FREED_BYTES_MAX).tolist()
    return low if 2 * len(low) < int(np.isfinite(now).sum()) else []


@once
def held_until_s(window: Window, since_s: float) -> Floats:
    """Return until when each device's memory has been in use without a break after ``since_s``: (S,), -inf if never.

    Another process that fills it again is not the one that left it.
    """
    values = window.device[MEMORY_METRIC]
    with np.errstate(invalid="ignore"):
        held, free = values > FREED_BYTES_MAX, values < FREED_BYTES_MAX
    left = np.logical_or.accumulate(free & (window.times_s > since_s)[:, None], axis=0)
    held &= ~left
    last = len(held) - 1 - held[::-1].argmax(axis=0)
    return np.where(held.any(axis=0), window.times_s[last], -math.inf)


def most_freed(window: Window, since_s: float) -> bool:
    """Whether most devices' memory has been freed after ``since_s``, in use again or not: the job's processes ended."""
    values = window.device.get(MEMORY_METRIC)
    if values is None:
        return False
    with np.errstate(invalid="ignore"):
        free = (values[window.times_s > since_s] < FREED_BYTES_MAX).any(axis=0)
    return 2 * int((free & np.isfinite(held_until_s(window, since_s))).sum()) > len(window.series)


def node_of(window: Window, freed: list[Freed]) -> Integers:
    """Return the node, as its index, of each device whose memory was freed."""
    return window.node_of[[item.column for item in freed]]


def _freed(window: Window, column: int) -> Freed:
    own = window.device[MEMORY_METRIC][:, column]
    held = np.flatnonzero(own > FREED_BYTES_MAX)
    last = int(held[-1]) if len(held) else 0
    free = last + 1 + np.flatnonzero(np.isfinite(own[last + 1 :]))
    return Freed(column, float(window.times_s[last]), float(window.times_s[free[0] if len(free) else -1]))
