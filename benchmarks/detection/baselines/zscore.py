"""Plain z-scores across nodes with persistence: what a first alerting rule looks like.

Paper: none; the rule of thumb of operators (Aegis, NSDI'25, names mean + 2 sigma held for 10 minutes).
As published: k = 2, persistence 600 s; the traces are shorter than that, so both are tuned.
Tuned: ``k`` and ``persistence_s`` on the suite's tuning seeds, 12 points.
Adapted: sigma has a floor of 2% of the peers' mean, for identical nodes differ by less than any alert should mind; a
metric whose peers are all zero has no z-score. Of n nodes none can exceed (n - 1) / sqrt(n) sigmas, which shuts small
jobs out.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.detection.baselines.minder_metrics import PUBLISHED_ORDER, metric_values
from benchmarks.detection.baselines.protocol import Accusation, Setting, once_each, persistent
from benchmarks.detection.matrix import Floats, TraceMatrix

SIGMA_FLOOR_RATIO = 0.02


@dataclass(slots=True)
class ZScore:
    """Accuses a node whose value of any metric lies more than ``k`` sigmas from the nodes' mean for long enough."""

    name: str = "z-score"

    @property
    def grid(self) -> Sequence[Setting]:
        """Return the 12 settings."""
        return [{"k": k, "persistence_s": s} for k in (1.4, 2.0, 3.0, 4.0) for s in (30.0, 120.0, 240.0)]

    def fit(self, healthy: Sequence[TraceMatrix], faulty: Sequence[TraceMatrix]) -> None:
        """Learn nothing: the rule compares nodes with each other only."""

    def judge(self, trace: TraceMatrix) -> list[Accusation]:
        """Return the accusations at 3 sigma, held for 120 s."""
        return self.judge_each(trace, [{"k": 3.0, "persistence_s": 120.0}])[0]

    def judge_each(self, trace: TraceMatrix, settings: Sequence[Setting]) -> list[list[Accusation]]:
        """Return the accusations under each setting."""
        scores = [z_scores(v) for v in (metric_values(trace, m) for m in PUBLISHED_ORDER) if v is not None]
        if not scores:
            return [[] for _ in settings]
        # The persistence is each metric's own: a node off in one now and in another later is no steady finding.
        result = []
        for setting in settings:
            found = [
                a for z in scores for a in persistent(z > setting["k"], trace, trace.times_s, setting["persistence_s"])
            ]
            result.append(once_each(found))
        return result


def z_scores(values: Floats) -> Floats:
    """Return (T, N) absolute z-scores across nodes; 0 where a node or its peers were not observed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=RuntimeWarning)  # lines on which nobody was observed
        mean = np.nanmean(values, axis=1, keepdims=True)
        sigma = np.nanstd(values, axis=1, keepdims=True)
    floor = SIGMA_FLOOR_RATIO * np.abs(mean)
    scale = np.maximum(sigma, floor)
    z = np.divide(np.abs(values - mean), scale, out=np.zeros(values.shape), where=scale > 0)
    return np.asarray(np.nan_to_num(z, nan=0.0))
