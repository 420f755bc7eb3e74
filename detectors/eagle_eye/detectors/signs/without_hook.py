"""What GPUs tell of a job that reports nothing itself: whether it works, and which processes have left their GPU."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eagle_eye.detectors.types import Integers, Window

LINES = 60  # rows of the past looked at
WORK_METRICS = ("gpu_power_watts", "gpu_tensor_active_ratio", "gpu_dram_active_ratio")
WAITING_RATIO = 0.6  # of what it was: GPUs that wait in a collective draw a third of their power, idle ones a tenth
SAMPLED = 256  # devices whose median tells of the whole job
MEMORY_METRIC = "gpu_memory_used_bytes"
FREED_RATIO = 0.1  # of what it was, and...
FREED_BYTES_MAX = 2 * 2**30  # ...no more than the driver's own: no process that trains holds so little
HELD_LINES = (3, 8, 20, 50)  # rows back in which the memory must have been in use


class Freed(NamedTuple):
    """A device whose memory was in use and is free: its column, and the end of the last interval with it in use."""

    column: int
    since_s: float


def idle_since_s(window: Window, lines: int = LINES) -> float | None:
    """Return since when most of the job's GPUs do much less than before; None where they work, or nobody says.

    That is the end of the last interval in which they worked, looked for in the newest ``lines`` rows.
    """
    for metric in WORK_METRICS:
        values = window.device.get(metric)
        if values is None:
            continue
        step = max(values.shape[1] // SAMPLED, 1)
        recent = values[-lines:, ::step]
        whole = np.flatnonzero(np.isfinite(recent).sum(axis=1) * 2 >= recent.shape[1])  # whole rows only
        if len(whole) < 4:
            continue
        work = np.nanmedian(recent[whole], axis=1)
        working = np.flatnonzero(work >= WAITING_RATIO * np.quantile(work, 0.9))
        if len(working) == 0 or working[-1] >= len(whole) - 2:
            return None
        return float(window.times_s[-len(recent) :][whole[working[-1]]])
    return None


def freed_memory(window: Window) -> list[Freed]:
    """Return the devices whose process has ended, by their memory: in use before, free in the newest two rows."""
    values = window.device.get(MEMORY_METRIC)
    if values is None or len(values) <= HELD_LINES[0]:
        return []
    now = np.fmax.reduce(values[-2:], axis=0)
    with np.errstate(invalid="ignore"):
        low = np.flatnonzero(now < FREED_BYTES_MAX)
    if len(low) == 0:
        return []
    before = np.fmax.reduce(values[[-back for back in HELD_LINES if back <= len(values)]][:, low], axis=0)
    with np.errstate(invalid="ignore"):
        low = low[now[low] < FREED_RATIO * before]
    return [Freed(column, _held_until_s(window, column)) for column in low.tolist()]


def node_of(window: Window, freed: list[Freed]) -> Integers:
    """Return the node, as its index, of each device whose memory was freed."""
    return window.node_of[[item.column for item in freed]]


def _held_until_s(window: Window, column: int) -> float:
    own = window.device[MEMORY_METRIC][:, column]
    held = np.flatnonzero(own > FREED_BYTES_MAX)
    return float(window.times_s[held[-1]]) if len(held) else float(window.times_s[0])
