"""Minder: a node whose denoised window lies far from all others', for minutes on end.

Paper: Deng et al., "Minder: Faulty Machine Detection for Large-scale Distributed Model Training", NSDI'25,
arXiv 2411.01791.
As published: seven metrics, min-max normalised; for each an LSTM-VAE (window 8 samples, hidden 4, latent 8, one
layer) whose reconstructions stand for the windows; pairwise Euclidean distances, summed for each machine and
normalised by the size of the cluster; the machine with the largest sum is the candidate if it is over a similarity
threshold; stride 1; the same machine for more than 4 minutes (``continuity_s``) is the alert. Metrics are asked in the
order of a decision tree over each window's largest z-score; the first that fires wins.
Tuned: the similarity threshold, for the published continuity ("Minder, 240 s"), and both threshold and
continuity ("Minder, tuned"), on the suite's tuning seeds, 12 points each.
Adapted: it judges at every sample instead of every 8 minutes, which can only make it earlier. A gap is filled with the
node's last value and not with the nearest, which would look ahead. Graphics-engine activity is our SM activity. The
limits of min-max normalisation are the extremes of the traces fitted on; what exceeds them is cut. The models see
windows of all fitted traces, healthy or not, as production data is: fed with healthy ones alone they decode a stalled
job into noise. Their training ends at the published error of 1e-4 or after 3,000 steps; sensor noise often leaves
more. A metric that a trace lacks, or that not all nodes send, is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from benchmarks.detection.baselines import lstm_vae
from benchmarks.detection.baselines.minder_metrics import PUBLISHED_ORDER, learn_order, metric_values
from benchmarks.detection.baselines.protocol import Accusation, Setting
from benchmarks.detection.matrix import Floats, Integers, TraceMatrix

WINDOW = 8
CONTINUITY_S = 240.0  # as published
TRAIN_WINDOWS = 20_000  # drawn from the traces, for each metric
SIMILARITIES = (0.15, 0.3, 0.5, 0.8)
PAPER_SIMILARITIES = (0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.55, 0.75, 1.0)
CONTINUITIES_S = (30.0, 60.0, 120.0)
CHUNK = 256  # lines whose distances are in memory at once


@dataclass(slots=True)
class Minder:
    """One model for each metric, and the order in which the metrics are asked.

    ``paper`` keeps the published continuity and tunes the similarity alone.
    """

    paper: bool = True
    seed: int = 0
    steps_max: int = lstm_vae.STEPS_MAX
    order: tuple[str, ...] = PUBLISHED_ORDER
    limits: dict[str, tuple[float, float]] = field(default_factory=dict)
    denoisers: dict[str, lstm_vae.Denoiser] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the name in tables."""
        return "Minder, 240 s" if self.paper else "Minder, tuned"

    @property
    def grid(self) -> Sequence[Setting]:
        """Return the 12 settings."""
        if self.paper:
            return [{"similarity": s, "continuity_s": CONTINUITY_S} for s in PAPER_SIMILARITIES]
        return [{"similarity": s, "continuity_s": c} for s in SIMILARITIES for c in CONTINUITIES_S]

    def fit(self, healthy: Sequence[TraceMatrix], faulty: Sequence[TraceMatrix]) -> None:
        """Learn each metric's limits and model, and the order of the metrics."""
        everything = [*healthy, *faulty]
        for index, name in enumerate(PUBLISHED_ORDER):
            known = [v for v in (metric_values(t, name) for t in everything) if v is not None and np.isfinite(v).any()]
            if not known:
                continue
            self.limits[name] = (min(float(np.nanmin(v)) for v in known), max(float(np.nanmax(v)) for v in known))
            windows = self._training_windows(everything, name, self.seed + index)
            if len(windows):
                self.denoisers[name] = lstm_vae.train(windows, self.seed + index, self.steps_max)
        self.order = learn_order(everything, WINDOW)

    def share(self, other: Minder) -> None:
        """Take over what another has learnt: the two differ only in what is tuned."""
        self.order, self.limits, self.denoisers = other.order, other.limits, other.denoisers

    def judge(self, trace: TraceMatrix) -> list[Accusation]:
        """Return the accusations at the published continuity and a middling threshold."""
        return self.judge_each(trace, [{"similarity": 0.2, "continuity_s": CONTINUITY_S}])[0]

    def judge_each(self, trace: TraceMatrix, settings: Sequence[Setting]) -> list[list[Accusation]]:
        """Return the accusation, at most one, under each setting."""
        ends_s = trace.times_s[WINDOW - 1 :]
        candidates = [c for c in (self._candidates(trace, name) for name in self.order) if c is not None]
        result = []
        for setting in settings:
            alerts = [first_alert(machine, value, ends_s, trace, setting) for machine, value in candidates]
            # Asked again at every sample, the metric that fires first wins; at one moment, the first in order.
            result.append([min((a for a in alerts if a), key=lambda a: a.time_s)] if any(alerts) else [])
        return result

    def _candidates(self, trace: TraceMatrix, name: str) -> tuple[Integers, Floats] | None:
        """Return for each window (T - 7,) the most dissimilar machine and its dissimilarity."""
        values = metric_values(trace, name)
        if values is None or name not in self.denoisers or not np.isfinite(values).all() or len(values) < WINDOW:
            return None
        windows = sliding_window_view(self._normalised(values, name), WINDOW, axis=0)  # (T - 7, N, 8)
        denoised = self.denoisers[name](windows.reshape(-1, WINDOW)).reshape(windows.shape)
        scores = dissimilarities(denoised)
        return scores.argmax(axis=1), scores.max(axis=1)

    def _normalised(self, values: Floats, name: str) -> Floats:
        low, high = self.limits[name]
        scale = high - low if high > low else 1.0
        return np.asarray(np.clip((values - low) / scale, 0.0, 1.0))

    def _training_windows(self, traces: Sequence[TraceMatrix], name: str, seed: int) -> Floats:
        """Return windows (B, 8) drawn from the traces, normalised."""
        rng = np.random.default_rng(seed)
        share = max(TRAIN_WINDOWS // max(len(traces), 1), 1)
        chosen = []
        for trace in traces:
            values = metric_values(trace, name)
            if values is not None and len(values) >= WINDOW:
                windows = sliding_window_view(self._normalised(values, name), WINDOW, axis=0).reshape(-1, WINDOW)
                windows = windows[np.isfinite(windows).all(axis=1)]
                chosen.append(windows[rng.permutation(len(windows))[:share]])
        return np.concatenate(chosen) if chosen else np.zeros((0, WINDOW))


def dissimilarities(windows: Floats) -> Floats:
    """Return (T, N): each machine's Euclidean distances to all others, summed and divided by N, of (T, N, w)."""
    result = np.empty(windows.shape[:2])
    for start in range(0, len(windows), CHUNK):
        part = windows[start : start + CHUNK].astype(np.float64)
        square = np.einsum("tnw,tnw->tn", part, part)
        product = np.einsum("tnw,tmw->tnm", part, part)
        gaps = np.sqrt(np.maximum(square[:, :, None] + square[:, None, :] - 2 * product, 0.0))
        result[start : start + CHUNK] = gaps.sum(axis=2) / windows.shape[1]
    return result


def first_alert(
    machine: Integers, dissimilarity: Floats, ends_s: Floats, trace: TraceMatrix, setting: Setting
) -> Accusation | None:
    """Return the first machine that stays the candidate for longer than the continuity, None when none does."""
    held_s, before = 0.0, -1
    for line, (index, value) in enumerate(zip(machine, dissimilarity, strict=True)):
        if value < setting["similarity"]:
            before = -1
            continue
        held_s = held_s + trace.interval_s if index == before else 0.0
        before = int(index)
        if held_s > setting["continuity_s"]:
            return Accusation(float(ends_s[line]), trace.nodes[before])
    return None
