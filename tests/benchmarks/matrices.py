"""Trace matrices made by hand for the tests of the benchmarks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from benchmarks.detection.matrix import Floats, TraceMatrix
from eagle_eye.server.backtest.trace import Label

START_S = 1_700_000_000.0


def matrix(values: Mapping[str, Floats], labels: list[Label] | None = None, interval_s: float = 1.0) -> TraceMatrix:
    """Return (T, N) arrays as a trace of nodes n0, n1, ...: all of one stage."""
    lines, nodes = next(iter(values.values())).shape
    return TraceMatrix(
        name="t",
        interval_s=interval_s,
        times_s=START_S + interval_s * np.arange(1, lines + 1),
        nodes=tuple(f"n{i}" for i in range(nodes)),
        role_of=np.zeros(nodes, dtype=np.int64),
        values=values,
        labels=labels or [],
        slowest_compute_s=values.get("train_compute_seconds"),
    )


def noisy(level: float, lines: int, nodes: int, seed: int, sigma: float = 0.01) -> Floats:
    """Return (T, N) values around a level, with the job's own slow wave that all nodes share."""
    rng = np.random.default_rng(seed)
    wave = 1 + 0.1 * np.sin(np.arange(lines) / 5)[:, None]
    return np.asarray(level * wave * (1 + sigma * rng.standard_normal((lines, nodes))))
