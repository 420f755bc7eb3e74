"""A small fleet that trains for hours: nodes that differ a little, metrics that hang together, bursts now and then."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eagle_eye.detectors.signs.learned_features import Metric, View, look
from eagle_eye.detectors.types import Curve, Series, Steps, Window
from eagle_eye.learning.features import HealthyHistory, Shape, candidates

START_S = 1_700_000_000.0
INTERVAL_S = 10.0
WINDOW_S = 900.0
NAMES = (
    "gpu_utilization_ratio", "gpu_tensor_active_ratio", "gpu_dram_active_ratio", "gpu_power_watts",
    "gpu_temperature_celsius", "node_cpu_utilization_ratio", "node_memory_used_ratio",
    "node_network_rx_bytes_per_second", "node_io_pressure_ratio",
)  # fmt: skip
METRICS: tuple[Metric, ...] = tuple(m for m in candidates() if m.name in NAMES)
SHAPE = Shape(INTERVAL_S, View(metrics=METRICS, span_s=60.0, past_s=300.0), looks=3)


class Fleet:
    """``nodes`` nodes with ``gpus`` GPUs each, watched for some hours; methods spoil it."""

    def __init__(self, seed: int, nodes: int = 12, gpus: int = 2, hours: float = 12.0) -> None:
        rng = np.random.default_rng(seed)
        rows, count = int(hours * 3600 / INTERVAL_S), nodes * gpus
        self.nodes = tuple(f"n{i}" for i in range(nodes))
        self.gpus = gpus
        self.times_s = START_S + INTERVAL_S * np.arange(1, rows + 1)
        self.series = tuple(Series(n, d, i * gpus + d) for i, n in enumerate(self.nodes) for d in range(gpus))
        load = 1 + 0.03 * wander(rng, rows, 1) + 0.01 * wander(rng, rows, count)  # of the job, and of each GPU

        def gpu(value: float, follows: float, chip: float, noise: float) -> Any:
            own = 1 + chip * rng.normal(size=count)
            return value * own * (1 + follows * (load - 1)) * (1 + noise * rng.normal(size=(rows, count)))

        def host(value: float, own: float, noise: float) -> Any:
            drift = 1 + own * rng.normal(size=nodes) + own * wander(rng, rows, nodes)
            return value * drift * (1 + noise * rng.normal(size=(rows, nodes)))

        steps = np.repeat(20.0 * np.arange(1, rows + 1)[:, None], count, axis=1)
        power = gpu(650.0, 1.0, 0.02, 0.01)
        self.device: dict[str, Any] = {
            "train_step": steps,
            "train_step_seconds": np.full((rows, count), 0.5),
            "gpu_utilization_ratio": np.clip(0.98 + 0.005 * rng.normal(size=(rows, count)), 0, 1),
            "gpu_tensor_active_ratio": gpu(0.5, 1.0, 0.01, 0.02),
            "gpu_dram_active_ratio": gpu(0.4, 1.0, 0.01, 0.02),
            "gpu_power_watts": power,
            "gpu_power_limit_watts": np.full((rows, count), 700.0),
            "gpu_temperature_celsius": 30
            + power / 20
            + 2 * rng.normal(size=count)
            + 0.5 * rng.normal(size=(rows, count)),
        }
        burst = (rng.random((rows, nodes)) < 0.003) * rng.exponential(0.2, (rows, nodes))
        self.node: dict[str, Any] = {
            "node_cpu_utilization_ratio": host(0.2, 0.05, 0.1),
            "node_memory_used_ratio": host(0.4, 0.02, 0.005),
            "node_network_rx_bytes_per_second": host(2e9, 0.02, 0.05),
            "node_io_pressure_ratio": np.clip(host(0.01, 0.1, 0.3) + burst, 0, 1),
        }

    def column(self, node: str) -> slice:
        """Return the node's device columns."""
        at = self.nodes.index(node)
        return slice(at * self.gpus, (at + 1) * self.gpus)

    def drift(self, node: str, since_s: float, memory: float = 0.15, dram: float = 0.12) -> Fleet:
        """From ``since_s`` on one node's memory use and its GPUs' memory traffic creep up over five minutes."""
        grow = np.clip((self.times_s - since_s) / 300.0, 0, 1)
        self.node["node_memory_used_ratio"][:, self.nodes.index(node)] += memory * grow
        self.device["gpu_dram_active_ratio"][:, self.column(node)] += dram * grow[:, None]
        return self

    def window(self, until_s: float, **changes: Any) -> Window:
        """Return what a detector sees at ``until_s``."""
        last = int(np.searchsorted(self.times_s, until_s, side="right"))
        rows = slice(max(last - int(WINDOW_S / INTERVAL_S), 0), last)
        count, step = len(self.series), float(self.device["train_step"][last - 1].max())
        fields: dict[str, Any] = {
            "now_s": until_s,
            "job": "j",
            "attempt": 0,
            "started_s": START_S,
            "interval_s": INTERVAL_S,
            "times_s": self.times_s[rows],
            "nodes": self.nodes,
            "series": self.series,
            "role_of": np.zeros(count, dtype=np.intp),
            "node_of": np.repeat(np.arange(len(self.nodes)), self.gpus),
            "device": {name: values[rows].astype(np.float32) for name, values in self.device.items()},
            "node": {name: values[rows].astype(np.float32) for name, values in self.node.items()},
            "node_times_s": self.times_s[rows],
            "heard_s": np.full(len(self.nodes), until_s),
            "farewell": np.zeros(len(self.nodes), dtype=np.bool_),
            "silent_s": np.zeros(count),
            "watching_since_s": START_S,
            "phase": ("",) * count,
            "phase_since_s": np.full(count, -np.inf),
            "first_step": 20.0,
            "last_step": step,
            "advanced_s": float(self.times_s[last - 1]),
            "steps": Steps(np.zeros(0), np.zeros(0), {}, np.zeros((0, count))),
            "curve": Curve(np.zeros(0), np.zeros(0), {}),
        }
        return Window(**{**fields, **changes})

    def history(self) -> HealthyHistory:
        """Return looks at all nodes, all taken for healthy."""
        moments = np.arange(START_S + 900, self.times_s[-1], SHAPE.view.span_s)
        values = [look(self.window(t), SHAPE.view, t).values for t in moments]
        count = len(self.nodes)
        return HealthyHistory(
            shape=SHAPE,
            features=np.concatenate(values),
            node=np.tile(np.arange(count), len(moments)),
            run=np.zeros(count * len(moments), np.intp),
            number=np.repeat(np.arange(len(moments)), count),
            times_s=np.repeat(moments, count),
            nodes=self.nodes,
            gpus_per_node=(self.gpus,),
            power_limits_watts=(700.0,),
            gpu_models=("H100",),
            job="j",
            left_out=Counter(),
        )

    def write(self, folder: Path, labels: list[dict[str, Any]] | None = None) -> Path:
        """Write the fleet as a trace."""
        folder.mkdir(parents=True)
        rows, count, hosts = len(self.times_s), len(self.series), len(self.nodes)
        owner = [s.node for s in self.series]
        names = [*self.device, *self.node]
        missing = np.full(rows * count, np.nan)
        columns: dict[str, Any] = {
            "time": np.concatenate([np.repeat(self.times_s, count), np.repeat(self.times_s, hosts)]),
            "node": owner * rows + list(self.nodes) * rows,
            "device": np.array([s.device for s in self.series] * rows + [-1] * hosts * rows, np.int16),
        }
        for name in names:
            device = self.device[name].ravel() if name in self.device else missing
            node = self.node[name].ravel() if name in self.node else missing[: rows * hosts]
            columns[name] = np.concatenate([device, node]).astype(np.float64)
        pq.write_table(pa.table(columns), folder / "samples.parquet")
        header = {
            "format": "eagle-eye-trace/1",
            "job": "j",
            "interval_s": INTERVAL_S,
            "start": START_S,
            "end": float(self.times_s[-1]),
            "nodes": [{"node": n, "gpus": self.gpus, "gpu_model": "H100"} for n in self.nodes],
            "ranks": [{"rank": s.rank, "node": s.node, "device": s.device, "dp": s.rank} for s in self.series],
        }
        (folder / "trace.json").write_text(json.dumps(header))
        if labels is not None:
            (folder / "faults.jsonl").write_text("".join(json.dumps(label) + "\n" for label in labels))
        return folder


def wander(rng: np.random.Generator, rows: int, columns: int, memory_rows: int = 60) -> Any:
    """Return a slow random walk that comes back to zero, of standard deviation 1: (rows, columns)."""
    kept = np.exp(-1 / memory_rows)
    noise = rng.normal(size=(rows, columns)) * np.sqrt(1 - kept**2)
    value = rng.normal(size=columns)
    result = np.empty((rows, columns))
    for row in range(rows):
        value = kept * value + noise[row]
        result[row] = value
    return result
