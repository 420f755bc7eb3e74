"""An isolation forest over the nodes' windows.

Paper: Liu, Ting & Zhou, "Isolation Forest", ICDM'08; scikit-learn's implementation. Aegis (NSDI'25) reports
having tried it for degradation and found it no better than z-scores.
As published: 100 trees of 256 samples.
Tuned: the quantile of healthy windows' scores below which a window is anomalous, and for how long it must
stay so, on the suite's tuning seeds, 12 points.
Adapted: a window's features are mean and deviation of each metric over 60 s (at least four samples), relative to
the nodes' median at the same time and in units of the healthy windows' spread, so that the phase of the job cancels. A
metric that a trace lacks counts as exactly average. Trained on healthy traces alone. Of several anomalous nodes only
the oddest is accused, as Minder does: when a job stops, all nodes are unlike healthy training.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from sklearn.ensemble import IsolationForest

from benchmarks.detection.baselines.protocol import Accusation, Setting, persistent
from benchmarks.detection.matrix import Floats, TraceMatrix

METRICS = (
    "node_pfc_tx_pause_packets_per_second",
    "node_cpu_utilization_ratio",
    "node_memory_used_ratio",
    "node_rdma_tx_bytes_per_second",
    "node_rdma_rx_bytes_per_second",
    "gpu_utilization_ratio",
    "gpu_power_watts",
    "gpu_sm_active_ratio",
    "gpu_tensor_active_ratio",
    "gpu_dram_active_ratio",
    "gpu_temperature_celsius",
    "gpu_sm_clock_hertz",
    "gpu_memory_used_bytes",
    "gpu_nvlink_tx_bytes_per_second",
    "gpu_pcie_tx_bytes_per_second",
    "train_compute_seconds",
    "nccl_collective_seconds",
)
WINDOW_S, LINES_MIN = 60.0, 4
STRIDES_PER_WINDOW = 6
TRAIN_ROWS = 100_000
SPREAD_FLOOR = 1e-9
FEATURE_LIMIT = 50.0  # spreads: beyond it a value is simply far off


@dataclass(slots=True)
class ForestOfNodes:
    """Accuses the node whose windows the forest isolates most quickly, and more so than nearly all healthy ones."""

    name: str = "isolation forest"
    trees: int = 100
    seed: int = 0
    spread: Floats = field(default_factory=lambda: np.zeros(0))
    healthy_scores: Floats = field(default_factory=lambda: np.zeros(0))
    forest: IsolationForest | None = None

    @property
    def grid(self) -> Sequence[Setting]:
        """Return the 12 settings."""
        return [{"quantile": q, "persistence_s": s} for q in (1e-2, 3e-3, 1e-3, 3e-4) for s in (30.0, 120.0, 240.0)]

    def fit(self, healthy: Sequence[TraceMatrix], faulty: Sequence[TraceMatrix]) -> None:  # noqa: ARG002 - no labels
        """Grow the forest on windows of healthy traces and keep their scores."""
        tables = [features(trace)[0] for trace in healthy]
        rows = np.concatenate([t.reshape(-1, t.shape[2]) for t in tables]) if tables else np.zeros((0, 0))
        if len(rows) == 0:
            return
        rng = np.random.default_rng(self.seed)
        rows = rows[rng.permutation(len(rows))[:TRAIN_ROWS]]
        self.spread = np.maximum(rows.std(axis=0), SPREAD_FLOOR)
        self.forest = IsolationForest(n_estimators=self.trees, max_samples=256, random_state=self.seed)
        self.forest.fit(self._scaled(rows))
        self.healthy_scores = np.sort(self.forest.score_samples(self._scaled(rows)))

    def judge(self, trace: TraceMatrix) -> list[Accusation]:
        """Return the accusations at the 0.1% quantile, held for 120 s."""
        return self.judge_each(trace, [{"quantile": 1e-3, "persistence_s": 120.0}])[0]

    def judge_each(self, trace: TraceMatrix, settings: Sequence[Setting]) -> list[list[Accusation]]:
        """Return the accusations under each setting."""
        table, ends_s = features(trace)
        if self.forest is None or len(ends_s) == 0:
            return [[] for _ in settings]
        rows = self._scaled(table.reshape(-1, table.shape[2]))
        scores = self.forest.score_samples(rows).reshape(table.shape[:2])
        oddest = scores == scores.min(axis=1, keepdims=True)
        return [
            persistent(
                oddest & (scores < self._threshold(setting["quantile"])), trace, ends_s, setting["persistence_s"]
            )
            for setting in settings
        ]

    def _threshold(self, quantile: float) -> float:
        """Return the score that this share of healthy windows lies below.

        No quantile near 0: what lies beyond all healthy windows is isolated no faster than the outermost of them.
        """
        return float(self.healthy_scores[int(quantile * len(self.healthy_scores))])

    def _scaled(self, rows: Floats) -> Floats:
        return np.clip(rows / self.spread, -FEATURE_LIMIT, FEATURE_LIMIT)


def features(trace: TraceMatrix) -> tuple[Floats, Floats]:
    """Return (K, N, 2 x metrics) features of the nodes' windows and the (K,) times at which the windows end."""
    lines = max(round(WINDOW_S / trace.interval_s), LINES_MIN)
    stride = max(lines // STRIDES_PER_WINDOW, 1)
    if len(trace.times_s) < lines:
        return np.zeros((0, len(trace.nodes), 2 * len(METRICS))), np.zeros(0)
    ends_s = trace.times_s[lines - 1 :: stride]
    table = np.zeros((len(ends_s), len(trace.nodes), 2 * len(METRICS)))
    for index, metric in enumerate(METRICS):
        values = trace.held(metric)
        if values is not None:
            relative = _relative(values)
            windows = sliding_window_view(relative, lines, axis=0)[::stride]
            table[:, :, 2 * index] = windows.mean(axis=-1)
            table[:, :, 2 * index + 1] = windows.std(axis=-1)
    return table, ends_s


def _relative(values: Floats) -> Floats:
    """Return each value's distance from the nodes' median in units of it; 0 where a node was not observed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=RuntimeWarning)  # lines on which nobody was observed
        median = np.nanmedian(values, axis=1, keepdims=True)
    typical = float(np.nanmedian(np.abs(median))) or 1.0
    return np.asarray(np.nan_to_num((values - median) / typical, nan=0.0), dtype=np.float64)
