"""Compares GPU activity while a job stands still: GPUs that wait in a collective look alike, and a culprit differs.

NCCL's kernels spin while they wait, so utilisation stays near 1 and power at a third of full load. A GPU whose host is
stuck has nothing to run and idles; one that is stuck in a kernel of its own draws a different power.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.medians import median_over_rows
from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.signs.peers import standing
from eagle_eye.detectors.signs.under_load import lines_within, spare_devices
from eagle_eye.detectors.types import Floats, Window

# Metric, the spread of healthy waiting GPUs in its unit, and the distance that means a different activity.
SIGNS = (
    ("gpu_utilization_ratio", 0.03, 0.4),
    ("gpu_sm_active_ratio", 0.03, 0.25),
    ("gpu_tensor_active_ratio", 0.02, 0.15),
    ("gpu_power_watts", 10.0, 60.0),
)
SIGMAS_MIN = 6.0
ROWS_MIN = 2
READINGS_MAX, READINGS_MAX_S = 30, 60.0  # newest: a checkpoint before the hang looks different
BUSY_UTILIZATION = 0.5  # NVML counts any kernel, including one that waits


def waiting(window: Window, since_s: float) -> Floats | None:
    """Return for each device of an idle job whether a kernel has run on it since ``since_s``: 1.0, 0.0, NaN not known.

    A kernel that does no work waits for its peers. None if nothing shows it.
    """
    values = window.device.get("gpu_utilization_ratio")
    rows = int((window.times_s > since_s + window.interval_s / 2).sum())
    if values is None or rows < ROWS_MIN:
        return None
    level = median_over_rows(values[-min(rows, _rows_max(window)) :])
    return np.where(np.isfinite(level), (level >= BUSY_UTILIZATION).astype(np.float64), np.nan)


@once
def activity_outliers(window: Window, since_s: float) -> set[int]:
    """Return the nodes, as indexes, with a GPU that behaves differently from its peers since ``since_s``; {} if alike.

    The row that contains ``since_s`` still mixes work and waiting and does not count.
    """
    nodes = {int(n) for n in np.unique(window.node_of[odd_devices(window, since_s)])}
    return nodes if 3 * len(nodes) <= len(window.nodes) else set()


@once
def odd_devices(window: Window, since_s: float) -> NDArray[np.bool_]:
    """Return which GPUs behave differently from the job's others since ``since_s`` (S,); none with too few rows.

    GPUs that have not worked before either, as on spare nodes, are neither odd nor others.
    """
    odd = np.zeros(len(window.series), dtype=np.bool_)
    rows = int((window.times_s > since_s + window.interval_s / 2).sum())
    if rows < ROWS_MIN:
        return odd
    spare = spare_devices(window)
    for metric, spread, least in SIGNS:
        values = window.device.get(metric)
        if values is None:
            continue
        level: Floats = median_over_rows(values[-min(rows, _rows_max(window)) :])
        if spare is not None:
            level = np.where(spare, np.nan, level)
        # While all ranks wait, pipeline stages do not matter: all are peers.
        found = standing(level, np.zeros(len(level), dtype=np.intp), floor=spread)
        with np.errstate(invalid="ignore"):
            odd |= (np.abs(found.distance) > SIGMAS_MIN) & (np.abs(level - found.median) > least)
    return odd


def _rows_max(window: Window) -> int:
    """Return in how many rows the newest readings are: more than each GPU has readings if nodes report in turn."""
    seconds = min(READINGS_MAX * window.interval_s, max(ROWS_MIN * window.interval_s, READINGS_MAX_S))
    return lines_within(window.times_s, seconds)
