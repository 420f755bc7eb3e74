"""A fleet of many jobs as rows of numbers, the way agents send them: healthy, or with every job at a standstill.

Values are those of ``eagle_eye.simulator.load``, which vary as real ones do, with the ranks' collectives beside them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_eye.schema.frame import WIRE_VERSION, Rank
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.rows import ROW_HEAD, RowTemplate, TemplateBlock
from eagle_eye.server.model.batch import Batch, ResolvedTemplate
from eagle_eye.simulator.load.fleet import EXACT, PLAIN, TRAINED, FleetValues

Numbers = NDArray[np.floating[Any]]

EXACT_METRICS = (*EXACT, "nccl_sequence", "nccl_completed_sequence")
PLAIN_METRICS = (*PLAIN, "nccl_collective_seconds")
METRICS = len(EXACT_METRICS) + len(PLAIN_METRICS)  # of a GPU and the rank on it
COLLECTIVES = 40.0  # a step
STEP_S = 1.5
SEED = 0
DELAY_S = 0.2  # from the end of an interval until its rows are here
# What is left of a GPU's activity while its kernel waits in a collective.
WAITING = {
    "gpu_power_watts": 0.35,
    "gpu_tensor_active_ratio": 0.0,
    "gpu_dram_active_ratio": 0.0,
    "gpu_nvlink_rx_bytes_per_second": 0.0,
    "gpu_nvlink_tx_bytes_per_second": 0.0,
    "gpu_pcie_rx_bytes_per_second": 0.001,
    "gpu_pcie_tx_bytes_per_second": 0.001,
}
# Of a host: name, level, what is left of it while its GPUs wait; its readings vary by a twentieth.
HOST = (
    ("node_cpu_utilization_ratio", 0.2, 1.0),
    ("node_memory_used_ratio", 0.4, 1.0),
    ("node_io_pressure_ratio", 0.01, 1.0),
    ("node_iowait_ratio", 0.005, 1.0),
    ("node_blocked_tasks", 0.0, 1.0),
    ("node_network_rx_bytes_per_second", 1e6, 1.0),
    ("node_rdma_rx_bytes_per_second", 3e10, 0.0),
    ("node_rdma_tx_bytes_per_second", 3e10, 0.0),
)


class _Stopped(NamedTuple):
    """What ranks said last: their step, and what they said of it."""

    step: Numbers
    trained: Numbers


class ManyJobs:
    """``nodes`` hosts of ``gpus`` GPUs in jobs of ``nodes_a_job``; an interval is a second."""

    def __init__(self, nodes: int, gpus: int, nodes_a_job: int, start_s: float) -> None:
        self.jobs = -(-nodes // nodes_a_job)
        self.samples = nodes * (gpus * METRICS + len(HOST))
        self._gpus, self._start_s = gpus, start_s
        self._values = FleetValues(np.arange(nodes) // nodes_a_job, gpus, 1.0, STEP_S, start_s, SEED)
        self._rng = np.random.default_rng(SEED)
        self._resolved = [self._template(node, nodes, nodes_a_job) for node in range(nodes)]
        self._stopped: _Stopped | None = None

    def rows(self, line: int, *, hung: bool = False) -> list[Batch]:
        """Return every node's row of an interval; ``hung``: nobody has left the collective since the first such row."""
        nodes, time_s = len(self._resolved), self._start_s + line
        exact, plain = self._values.read(0, nodes, time_s)
        steps, trained = EXACT.index("train_step"), [PLAIN.index(name) for name in TRAINED]
        if hung:
            if self._stopped is None:
                self._stopped = _Stopped(exact[:, steps].copy(), plain[:, trained].copy())
            exact[:, steps], plain[:, trained] = self._stopped
            for name, left in WAITING.items():
                plain[:, PLAIN.index(name)] *= np.float32(left)
        done = COLLECTIVES * exact[:, steps, None].transpose(0, 2, 1).reshape(nodes, 1, self._gpus)
        ahead = 1.0 if hung else 3.0  # hosts enqueue more than their GPUs have done
        waits_s = 0.1 * STEP_S * (1 + 0.02 * self._rng.standard_normal((nodes, 1, self._gpus)))
        level = np.array([level * (left if hung else 1.0) for _, level, left in HOST])
        host = level * (1 + 0.05 * self._rng.standard_normal((nodes, len(HOST))))
        tables = (
            np.concatenate([exact, done + ahead, done], axis=1),
            np.concatenate([plain, waits_s], axis=1).astype(np.float32),
            host.astype(np.float32),
        )
        heads = np.zeros((nodes, ROW_HEAD.size), np.uint8)  # nobody reads them here
        numbers = [np.ascontiguousarray(table).view(np.uint8).reshape(nodes, -1) for table in tables]
        return [
            Batch(
                [one.ref for one in self._resolved],
                np.full(nodes, line + 1),
                np.full(nodes, time_s),
                np.full(nodes, time_s + DELAY_S),
                np.zeros(nodes),
                np.concatenate([heads, *numbers], axis=1),
                resolved=self._resolved,
            )
        ]

    def _template(self, node: int, nodes: int, nodes_a_job: int) -> ResolvedTemplate:
        job, place = divmod(node, nodes_a_job)
        world = min(nodes_a_job, nodes - job * nodes_a_job) * self._gpus
        name = f"job{job:04d}"
        blocks = [
            TemplateBlock(Scope.DEVICE, list(range(self._gpus)), [*EXACT_METRICS, *PLAIN_METRICS], len(EXACT_METRICS)),
            TemplateBlock(Scope.NODE, [-1], [metric for metric, _, _ in HOST], 0),
        ]
        ranks = [Rank(name, place * self._gpus + g, world, g, role=f"pp{place % 4}") for g in range(self._gpus)]
        template = RowTemplate(
            version=WIRE_VERSION,
            node=f"node{node:05d}",
            boot_id="b",
            stream=f"s{node}",
            interval_s=1.0,
            agent_version="benchmark",
            job=name,
            ranks=ranks,
            blocks=blocks,
        )
        return ResolvedTemplate(template, ())
