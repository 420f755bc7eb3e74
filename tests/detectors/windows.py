"""Builders of windows: a healthy synchronous job, which a test then spoils."""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle_eye.detectors.types import Curve, Link, Pause, Series, Steps, Window, WindowEvent
from eagle_eye.server.engine.grid import StepGrid

NOW_S = 1_000.0
INTERVAL_S = 1.0
ROWS = 60
STEP_S = 0.5


class Story:
    """A job of ``nodes`` nodes with ``gpus`` ranks each that makes two steps a row; methods spoil it."""

    def __init__(self, nodes: int = 4, gpus: int = 1, rows: int = ROWS) -> None:
        self.nodes = tuple(f"n{i}" for i in range(nodes))
        self.series = tuple(
            Series(node, device, i * gpus + device) for i, node in enumerate(self.nodes) for device in range(gpus)
        )
        count = len(self.series)
        self.times_s = NOW_S - INTERVAL_S * np.arange(rows - 1, -1, -1)
        noise = np.random.default_rng(0).normal(1.0, 0.02, (rows, count))
        steps = np.repeat(2.0 * np.arange(1, rows + 1)[:, None], count, axis=1)
        self.device: dict[str, Any] = {
            "train_step": steps,
            "train_step_seconds": np.full((rows, count), STEP_S),
            "train_compute_seconds": 0.3 * noise,
            "nccl_collective_seconds": 0.2 - 0.3 * (noise - 1.0),
            "nccl_sequence": 4 * steps,
            "nccl_completed_sequence": 4 * steps,
            "train_loss": np.full((rows, count), 2.0),
            "train_grad_norm": np.full((rows, count), 1.0),
            "train_local_grad_norm": np.full((rows, count), 1.5),
        }
        self.node: dict[str, Any] = {}
        self.links: tuple[Link, ...] = ()
        self.link: dict[str, Any] = {}
        self.switches: tuple[str, ...] = ("",) * nodes
        self.role_of = np.zeros(count, dtype=np.intp)
        self.earlier: Curve | None = None
        self.heard_s = np.full(nodes, NOW_S)
        self.farewell = np.zeros(nodes, dtype=np.bool_)
        self.silent_s = np.zeros(count)
        self.events: list[WindowEvent] = []
        self.phase = [""] * count
        self.phase_since_s = np.full(count, -np.inf)
        self.pauses: list[Pause] = []
        self.watching_since_s = 0.0
        self.started_s = NOW_S - rows

    def column(self, node: str) -> list[int]:
        """Return the columns of a node."""
        return [i for i, series in enumerate(self.series) if series.node == node]

    def standstill(self, rows: int) -> Story:
        """No step finishes in the last ``rows`` rows; all ranks wait in the same next collective."""
        for name in ("train_step", "nccl_completed_sequence", "nccl_sequence"):
            self.device[name][-rows:] = self.device[name][-rows - 1]
        self.device["nccl_sequence"][-rows:] += 1
        if "gpu_tensor_active_ratio" in self.device:
            self.device["gpu_tensor_active_ratio"][-rows + 1 :] = 0.0  # kernels that wait do not compute
        return self

    def waiting(self, rows: int) -> Story:
        """In the last ``rows`` rows GPUs only wait in a collective: a third of the power, and nothing moves."""
        self.device["gpu_power_watts"][-rows:] = 230.0
        for values in (self.device, self.node, self.link):
            for name in values:
                if name == "gpu_tensor_active_ratio" or name.endswith(("_rx_bytes_per_second", "_tx_bytes_per_second")):
                    values[name][-rows:] = 0.0
        return self

    def hardware(self) -> Story:
        """Add what healthy GPUs and hosts under load show, with some spread between them."""
        rng = np.random.default_rng(1)
        rows, count, hosts = len(self.times_s), len(self.series), len(self.nodes)

        def gpu(value: float, ratio: float = 0.01) -> Any:
            return value * (1 + ratio * rng.normal(size=count)) * (1 + 0.3 * ratio * rng.normal(size=(rows, count)))

        def host(value: float, ratio: float = 0.02) -> Any:
            return value * (1 + ratio * rng.normal(size=hosts)) * (1 + ratio * rng.normal(size=(rows, hosts)))

        self.device |= {
            "gpu_utilization_ratio": np.full((rows, count), 0.99),
            "gpu_tensor_active_ratio": gpu(0.45),
            "gpu_power_watts": gpu(660.0),
            "gpu_power_limit_watts": np.full((rows, count), 700.0),
            "gpu_temperature_celsius": gpu(66.0, 0.03),
            "gpu_memory_temperature_celsius": gpu(78.0, 0.03),
            "gpu_sm_clock_hertz": gpu(1.75e9, 0.004),
            "gpu_memory_clock_hertz": np.full((rows, count), 2.6e9),
            "gpu_throttle_reasons": np.zeros((rows, count)),
            "gpu_ecc_corrected_total": np.zeros((rows, count)),
            "gpu_ecc_uncorrected_total": np.zeros((rows, count)),
            "gpu_remapped_rows_total": np.zeros((rows, count)),
            "gpu_remap_pending": np.zeros((rows, count)),
            "gpu_pcie_link_width": np.full((rows, count), 16.0),
            "gpu_pcie_link_generation": np.full((rows, count), 5.0),
            "gpu_pcie_replays_total": np.zeros((rows, count)),
            "gpu_pcie_rx_bytes_per_second": gpu(8e9, 0.05),
            "gpu_pcie_tx_bytes_per_second": gpu(6e9, 0.05),
            "gpu_nvlink_rx_bytes_per_second": gpu(1.2e11, 0.03),
            "gpu_nvlink_tx_bytes_per_second": gpu(1.2e11, 0.03),
            "gpu_nvlink_errors_total": np.zeros((rows, count)),
            "gpu_nvlinks_active": np.full((rows, count), 18.0),
        }
        self.node |= {
            "node_cpu_utilization_ratio": host(0.2, 0.05),
            "node_cpu_pressure_ratio": host(0.01, 0.2),
            "node_cpu_steal_ratio": np.zeros((rows, hosts)),
            "node_memory_used_ratio": host(0.4),
            "node_io_pressure_ratio": host(0.01, 0.2),
            "node_iowait_ratio": host(0.01, 0.2),
            "node_blocked_tasks": np.zeros((rows, hosts)),
            "node_disk_read_bytes_per_second": host(5e7, 0.2),
            "node_disk_write_bytes_per_second": host(2e7, 0.2),
            "node_rdma_rx_bytes_per_second": host(4e10, 0.03),
            "node_rdma_tx_bytes_per_second": host(4e10, 0.03),
            "node_rdma_errors_total": np.zeros((rows, hosts)),
            "node_rdma_link_downed_total": np.zeros((rows, hosts)),
            "node_pfc_tx_pause_packets_per_second": host(20.0, 0.3),
            "node_pfc_rx_pause_packets_per_second": host(20.0, 0.3),
            "node_congestion_notifications_total": np.zeros((rows, hosts)),
            "node_tcp_retransmits_per_second": host(0.5, 0.3),
        }
        return self

    def complete(self) -> Story:
        """Add all that a site can report, healthy."""
        shape = self.device["train_step"].shape
        self.device["train_data_wait_seconds"] = 0.005 * np.random.default_rng(3).uniform(0.5, 1.5, shape)
        return self.hardware().ports()

    def ports(self, each: int = 2) -> Story:
        """Add ``each`` healthy RDMA ports a node; port p of all nodes hangs on switch "rail<p>"."""
        rng = np.random.default_rng(2)
        self.links = tuple(Link(node, f"mlx5_{p}", f"rail{p}") for node in self.nodes for p in range(each))
        rows, count = len(self.times_s), len(self.links)
        self.link = {
            "link_up": np.ones((rows, count)),
            "link_rx_bytes_per_second": 2e10 * (1 + 0.03 * rng.normal(size=(rows, count))),
            "link_tx_bytes_per_second": 2e10 * (1 + 0.03 * rng.normal(size=(rows, count))),
            "link_errors_total": np.zeros((rows, count)),
            "link_downed_total": np.zeros((rows, count)),
            "link_pfc_tx_pause_packets_per_second": np.full((rows, count), 10.0),
            "link_pfc_rx_pause_packets_per_second": np.full((rows, count), 10.0),
        }
        return self

    def exit(self, node: str, code: int | None, before_s: float, error: str = "", goodbye: bool = False) -> Story:
        """A rank of the node ended ``before_s`` ago."""
        time_s = NOW_S - before_s
        rank = self.series[self.column(node)[0]].rank
        if error:
            self.events.append(WindowEvent(time_s, node, 0, "training_error", {"text": error, "rank": rank}))
        attributes = {"exit_code": code, "rank": rank, "goodbye": goodbye}
        self.events.append(WindowEvent(time_s, node, 0, "process_exit", attributes))
        return self

    def happened(self, kind: str, node: str | None, before_s: float, device: int = -1, **attributes: Any) -> Story:
        """Something happened ``before_s`` ago."""
        self.events.append(WindowEvent(NOW_S - before_s, node, device, kind, attributes))
        return self

    def aligned(self, role_of: Any) -> tuple[Steps, Curve]:
        """Return the story's rows by step, as the engine aligns them."""
        grid = StepGrid()
        for line, time_s in enumerate(self.times_s):
            grid.add_row(float(time_s), {name: values[line] for name, values in self.device.items()}, role_of)
        return grid.steps(), grid.curve()

    def window(self, **changes: Any) -> Window:
        """Return the window, its arrays read-only."""
        for values in (*self.device.values(), *self.node.values(), *self.link.values()):
            values.flags.writeable = False
        role_of = changes.get("role_of", self.role_of)
        steps, curve = self.aligned(role_of)
        highest = np.fmax.reduce(self.device.get("train_step", np.full((1, 1), np.nan)), axis=1)
        reported = highest[np.isfinite(highest)]
        advanced = np.flatnonzero(highest == reported.max())[:1] if len(reported) else np.zeros(0, np.intp)
        fields: dict[str, Any] = {
            "now_s": NOW_S,
            "job": "j",
            "attempt": 0,
            "started_s": self.started_s,
            "interval_s": INTERVAL_S,
            "times_s": self.times_s,
            "nodes": self.nodes,
            "series": self.series,
            "role_of": role_of,
            "node_of": np.array([self.nodes.index(series.node) for series in self.series], dtype=np.intp),
            "device": self.device,
            "node": self.node,
            "node_times_s": self.times_s,
            "links": self.links,
            "link": self.link,
            "link_times_s": self.times_s if self.link else self.times_s[:0],
            "switches": self.switches,
            "first_step": float(reported[0]) if len(reported) else float("nan"),
            "last_step": float(reported.max()) if len(reported) else float("nan"),
            "advanced_s": float(self.times_s[advanced[0]]) if len(advanced) else self.started_s,
            "steps": steps,
            "curve": curve,
            "earlier": self.earlier,
            "heard_s": self.heard_s,
            "farewell": self.farewell,
            "silent_s": self.silent_s,
            "watching_since_s": self.watching_since_s,
            "phase": tuple(self.phase),
            "phase_since_s": self.phase_since_s,
            "pauses": tuple(self.pauses),
            "events": tuple(self.events),
        }
        return Window(**{**fields, **changes})
