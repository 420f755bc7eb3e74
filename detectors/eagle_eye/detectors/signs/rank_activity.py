"""Shows what a node's ranks do while their peers wait: other work, such as a write or a compilation, or nothing.

To its peers, a rank that saves, evaluates or compiles looks like one that hangs. Its host, GPU and process metrics tell
them apart, as far as they are observed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.gpu_activity import waiting
from eagle_eye.detectors.signs.host_activity import busy_with_io
from eagle_eye.detectors.signs.medians import median_of, median_over_rows
from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.signs.peers import latest
from eagle_eye.detectors.signs.under_load import lines_within
from eagle_eye.detectors.signs.without_hook import COMPUTING_TENSOR_RATIO
from eagle_eye.detectors.types import Floats, Window

CPU, IO, BLOCKED = "rank_cpu_seconds_total", "rank_io_bytes_total", "rank_blocked_ratio"
ROWS_NOW, ROWS_NOW_S = 4, 30.0  # newest rows of a rank that show what it does now
WORK_CPUS, REST_CPUS = 0.5, 0.2  # a compiling thread uses one; watchdogs and heartbeats some hundredths
WORK_IO_BYTES_PER_S, REST_IO_BYTES_PER_S = 1e7, 1e6
SPAN_S = 4.0  # over which counters must be known


@once
def works(window: Window, node: int, since_s: float) -> bool | None:
    """Return whether the node (its index) has done other work than its peers wait for since ``since_s``.

    None if neither its host nor its ranks' processes show it.
    """
    writes = busy_with_io(window, node, since_s)
    if writes or _computes(window, node, since_s) or _busy(window, node, since_s):
        return True
    return writes


@once
def at_rest(window: Window, node: int, since_s: float) -> bool:
    """Whether the node has ranks that run no kernel and whose processes use no CPU, read and write nothing.

    Excludes processes blocked in the kernel, which may wait for storage. False if not observed.
    """
    idle = _idle(window, node, since_s)
    cpus, bytes_per_s = _rate(window, CPU, since_s)[idle], _rate(window, IO, since_s)[idle]
    if not len(cpus) or not np.isfinite(cpus).all() or (bytes_per_s > REST_IO_BYTES_PER_S).any():
        return False
    blocked = _recent(window, BLOCKED, since_s)
    held = blocked is not None and bool((np.nan_to_num(median_over_rows(blocked[:, idle])) > 0).any())
    return not held and bool((cpus <= REST_CPUS).all())


def processes_seen(window: Window, node: int) -> bool:
    """Whether what the processes of the node (its index) do is reported."""
    cpus = window.device.get(CPU)
    return cpus is not None and bool(np.isfinite(cpus[:, window.node_of == node]).any())


def uses_cpu(window: Window, columns: NDArray[np.bool_], since_s: float) -> bool:
    """Whether one of these ranks' processes (S,) has used a CPU since ``since_s``."""
    with np.errstate(invalid="ignore"):
        return bool((_rate(window, CPU, since_s)[columns] >= WORK_CPUS).any())


@once
def computing_devices(window: Window, since_s: float) -> NDArray[np.bool_]:
    """Return which GPUs do what waiting kernels do not (S,): they evaluate. None of them where it is not observed.

    A source that repeats its last reading from before ``since_s`` says nothing.
    """
    tensor = _recent(window, "gpu_tensor_active_ratio", since_s)
    if tensor is None or len(tensor) == 0:
        return np.zeros(len(window.series), dtype=np.bool_)
    first = int(np.searchsorted(window.times_s, since_s, side="right"))
    before = latest(window.device["gpu_tensor_active_ratio"][:first], ROWS_NOW)
    anew = (np.isfinite(tensor) & (tensor != before)).any(axis=0)
    with np.errstate(invalid="ignore"):
        return np.asarray(anew & (median_over_rows(tensor) >= COMPUTING_TENSOR_RATIO))


def _computes(window: Window, node: int, since_s: float) -> bool:
    return bool(computing_devices(window, since_s)[window.node_of == node].any())


def _busy(window: Window, node: int, since_s: float) -> bool:
    """Whether a process whose GPU runs no kernel uses a CPU, reads or writes: with a kernel, it spins waiting for it.

    If waiting leaves GPUs without a kernel, all processes spin: then one must use more than the others.
    """
    idle = _idle(window, node, since_s)
    cpus = _rate(window, CPU, since_s)
    with np.errstate(invalid="ignore"):
        computes = cpus[idle] >= WORK_CPUS + _waiting_cpus(window, since_s)
        moves = _rate(window, IO, since_s)[idle] >= WORK_IO_BYTES_PER_S
    return bool((computes | moves).any())


@once
def _waiting_cpus(window: Window, since_s: float) -> float:
    """Return the CPU use of a waiting process if most wait without a kernel on their GPU; 0 if most run one."""
    spins = waiting(window, since_s)
    if spins is None or 2 * np.count_nonzero(spins == 0.0) <= len(spins):
        return 0.0
    cpus = _rate(window, CPU, since_s)[spins == 0.0]
    known = cpus[np.isfinite(cpus)]
    return median_of(known) if len(known) else 0.0


@once
def _idle(window: Window, node: int, since_s: float) -> list[int]:
    """Return the node's columns whose GPU is known to run no kernel."""
    spins = waiting(window, since_s)
    mine = np.flatnonzero(window.node_of == node)
    return [] if spins is None else [int(column) for column in mine if spins[column] == 0.0]


def _recent(window: Window, metric: str, since_s: float) -> Floats | None:
    """Return the newest rows of a metric that are entirely after ``since_s``."""
    values = window.device.get(metric)
    if values is None:
        return None
    first = int(np.searchsorted(window.times_s, since_s + window.interval_s / 2, side="right"))
    return values[
        max(first, len(values) - lines_within(window.times_s, max(ROWS_NOW_S, ROWS_NOW * window.interval_s))) :
    ]


@once
def _rate(window: Window, metric: str, since_s: float) -> Floats:
    """Return the recent growth of each rank's counter per second: (S,), NaN if not known."""
    rate = np.full(len(window.series), np.nan)
    rows = _recent(window, metric, since_s)
    if rows is None or len(rows) < 2:
        return rate
    times_s = window.times_s[-len(rows) :]
    known = np.isfinite(rows)
    first, last = known.argmax(axis=0), len(rows) - 1 - known[::-1].argmax(axis=0)
    span_s = times_s[last] - times_s[first]
    columns = np.flatnonzero(known.any(axis=0) & (span_s >= SPAN_S))
    grown = rows[last[columns], columns] - rows[first[columns], columns]
    # A replaced process starts counting anew.
    rate[columns] = np.where(grown >= 0, grown / span_s[columns], np.nan)
    return rate
