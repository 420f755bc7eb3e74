"""A trace folder as aligned arrays: time x node x metric, a node's value being the mean over its GPUs.

What the published baselines read. Eagle Eye's own engine does not: it is fed frames, as on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from eagle_eye.server.backtest.trace import Label, Trace

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]

# What any of the baselines asks for; everything else stays on disk.
METRICS = (
    "node_pfc_tx_pause_packets_per_second",
    "node_cpu_utilization_ratio",
    "gpu_utilization_ratio",
    "gpu_power_watts",
    "gpu_sm_active_ratio",
    "gpu_tensor_active_ratio",
    "gpu_nvlink_tx_bytes_per_second",
    "gpu_nvlink_rx_bytes_per_second",
    "gpu_temperature_celsius",
    "gpu_sm_clock_hertz",
    "gpu_memory_used_bytes",
    "gpu_dram_active_ratio",
    "gpu_pcie_tx_bytes_per_second",
    "node_memory_used_ratio",
    "node_rdma_tx_bytes_per_second",
    "node_rdma_rx_bytes_per_second",
    "train_step",
    "train_step_seconds",
    "train_compute_seconds",
    "nccl_collective_seconds",
    "nccl_bus_bandwidth_bytes_per_second",
    "nccl_sequence",
)


@dataclass(frozen=True, slots=True, eq=False)
class TraceMatrix:
    """One trace: ``times_s`` (T,) are the ends of its intervals, ``values[m]`` (T, N) is NaN where nothing was seen.

    A metric that the trace lacks is absent. ``role_of`` (N,) groups nodes whose first rank has the same pipeline
    stage; a node without ranks is in group -1. ``labels`` are what the trace says was done, [] when nothing was.
    ``slowest_compute_s`` (T, N) is the longest compute time among a node's ranks, None where nobody says: of eight, one
    slow rank hardly moves the mean.
    """

    name: str
    interval_s: float
    times_s: Floats
    nodes: tuple[str, ...]
    role_of: Integers
    values: Mapping[str, Floats]
    labels: Sequence[Label] = field(default_factory=list)
    slowest_compute_s: Floats | None = None

    def held(self, metric: str) -> Floats | None:
        """Return (T, N) with each gap filled by the node's last value before it; None when the trace lacks the metric.

        What came before a node's first value is filled with that value. A node that never sent the metric stays NaN.
        """
        values = self.values.get(metric)
        if values is None:
            return None
        seen = np.isfinite(values)
        lines = np.where(seen, np.arange(len(values))[:, None], -1)
        newest = np.maximum.accumulate(lines, axis=0)
        first = np.where(seen.any(axis=0), seen.argmax(axis=0), 0)
        newest = np.where(newest < 0, first, newest)
        return np.asarray(np.take_along_axis(values, newest, axis=0))


def read_matrix(folder: Path, metrics: Sequence[str] = METRICS) -> TraceMatrix:
    """Return the trace as arrays; raises BadTrace where the folder is no usable trace."""
    trace = Trace(folder)
    header = trace.header
    nodes = tuple(node.node for node in header.nodes)
    lines = max(round((header.end - header.start) / header.interval_s), 1)
    path = folder / "samples.parquet"
    present = [m for m in metrics if m in pq.read_schema(path).names]
    table = pq.read_table(path, columns=["time", "node", "device", *present])
    times = table["time"].to_numpy()
    # The line of a row is the interval that it ended, however ragged the agents' clocks are.
    line = np.clip(np.rint((times - header.start) / header.interval_s).astype(np.int64) - 1, 0, lines - 1)
    column = pc.index_in(table["node"].cast(pa.string()), value_set=pa.array(nodes)).fill_null(-1).to_numpy()
    cell = line * len(nodes) + column
    values: dict[str, Floats] = {}
    for metric in present:
        found = _mean_per_cell(_floats(table[metric]), cell, column >= 0, lines * len(nodes))
        if np.isfinite(found).any():
            exact = found.reshape(lines, len(nodes))
            values[metric] = exact if metric in _EXACT else exact.astype(np.float32)
    slowest = None
    if COMPUTE in values:
        slowest = _highest_per_cell(_floats(table[COMPUTE]), cell, column >= 0, lines * len(nodes))
    stage = {rank.node: rank.pp for rank in reversed(header.ranks)}
    return TraceMatrix(
        name=folder.name,
        interval_s=header.interval_s,
        times_s=header.start + header.interval_s * np.arange(1, lines + 1),
        nodes=nodes,
        role_of=np.array([stage.get(node, -1) for node in nodes]),
        values=values,
        labels=trace.labels() or [],
        slowest_compute_s=None if slowest is None else slowest.reshape(lines, len(nodes)),
    )


COMPUTE = "train_compute_seconds"
_EXACT = frozenset({"train_step", "nccl_sequence"})  # float32 stops counting at 2**24


def _floats(column: Any) -> Floats:
    return np.asarray(pc.fill_null(column.cast(pa.float64()), np.nan).to_numpy())


def _mean_per_cell(values: Floats, cell: Integers, known_node: NDArray[np.bool_], cells: int) -> Floats:
    """Return the mean of each cell's finite values, NaN where there is none."""
    use = np.isfinite(values) & known_node
    total = np.bincount(cell[use], weights=values[use], minlength=cells)
    count = np.bincount(cell[use], minlength=cells)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _highest_per_cell(values: Floats, cell: Integers, known_node: NDArray[np.bool_], cells: int) -> Floats:
    """Return the highest of each cell's finite values, NaN where there is none."""
    use = np.isfinite(values) & known_node
    highest = np.full(cells, -np.inf)
    np.maximum.at(highest, cell[use], values[use])
    return np.where(np.isfinite(highest), highest, np.nan)
