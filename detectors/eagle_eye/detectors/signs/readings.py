"""Identifies real readings: a source that repeats its last values has been read once, however often it is polled.

Durations are counted in readings. A driver that hangs for a minute repeats one wrong number sixty times; an exporter
scraped twice as often as it reads reports everything twice.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.types import Floats, Window

READINGS_MIN = 3  # readings that must show a count: fewer are a misreading

# Metrics that never all repeat exactly on a working GPU.
RESTLESS = (
    "gpu_power_watts",
    "gpu_sm_active_ratio",
    "gpu_tensor_active_ratio",
    "gpu_dram_active_ratio",
    "gpu_utilization_ratio",
    "gpu_temperature_celsius",
    "gpu_memory_temperature_celsius",
    "gpu_sm_clock_hertz",
    "gpu_pcie_rx_bytes_per_second",
    "gpu_pcie_tx_bytes_per_second",
    "gpu_nvlink_rx_bytes_per_second",
    "gpu_nvlink_tx_bytes_per_second",
    "gpu_nvlink_bytes_per_second",
)
# The same of a port that carries traffic or sends pauses, and of a node's network.
RESTLESS_OF_LINK = (
    "link_rx_bytes_per_second",
    "link_tx_bytes_per_second",
    "link_pfc_rx_pause_packets_per_second",
    "link_pfc_tx_pause_packets_per_second",
)
RESTLESS_OF_NODE = (
    "node_rdma_rx_bytes_per_second",
    "node_rdma_tx_bytes_per_second",
    "node_network_rx_bytes_per_second",
    "node_network_tx_bytes_per_second",
)


def read_anew(window: Window, column: int) -> NDArray[np.bool_]:
    """Return in which rows a device shows anything new: (T,); all if none of ``RESTLESS`` is reported."""
    return read_anew_each(window, (column,))[:, 0]


@once
def read_anew_each(window: Window, columns: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return ``read_anew`` of many devices at once: (T, columns)."""
    return _changes(window.device, RESTLESS, len(window.times_s), columns)


def link_read_anew(window: Window, columns: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return in which rows ports show anything new: (T, columns); all if no RESTLESS_OF_LINK is reported."""
    return _changes(window.link, RESTLESS_OF_LINK, len(window.link_times_s), columns)


def node_read_anew(window: Window, columns: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return in which rows nodes' networks show anything new: (T, columns); all if no RESTLESS_OF_NODE is reported."""
    return _changes(window.node, RESTLESS_OF_NODE, len(window.node_times_s), columns)


def _changes(
    source: Mapping[str, Floats], metrics: tuple[str, ...], rows: int, columns: tuple[int, ...]
) -> NDArray[np.bool_]:
    anew = np.zeros((rows, len(columns)), dtype=np.bool_)
    reported = np.zeros(len(columns), dtype=np.bool_)
    for metric in metrics:
        values = source.get(metric)
        if values is None:
            continue
        own = values[:, columns]
        known = np.isfinite(own)
        reported |= known.any(axis=0)
        if known.all():
            anew[:1] = True
            anew[1:] |= own[1:] != own[:-1]
            continue
        newest = np.maximum.accumulate(np.where(known, np.arange(len(own))[:, None], -1), axis=0)
        before = np.vstack([np.full_like(newest[:1], -1), newest[:-1]])  # the row of the reading before
        anew |= known & ((before < 0) | (own != np.take_along_axis(own, np.maximum(before, 0), axis=0)))
    anew[:, ~reported] = True
    return anew


def readings(window: Window, metric: str, column: int) -> Floats:
    """Return a device's readings, (T,); NaN in rows that only repeat an earlier one."""
    return np.where(read_anew(window, column), window.device[metric][:, column], np.nan)


def lasting(counts: Floats) -> Floats:
    """Return readings of a count, (T,), without values seen fewer than READINGS_MIN times."""
    shown, times = np.unique(counts[np.isfinite(counts)], return_counts=True)
    return np.where(np.isin(counts, shown[times >= READINGS_MIN]), counts, np.nan)
