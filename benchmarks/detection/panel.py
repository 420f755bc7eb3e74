"""The baselines of one profile, fitted and tuned on the tuning cases: each has twelve settings to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from benchmarks.detection.baselines.greyhound import Greyhound
from benchmarks.detection.baselines.isolation_forest import ForestOfNodes
from benchmarks.detection.baselines.minder import Minder
from benchmarks.detection.baselines.protocol import Accusation, Baseline, Setting
from benchmarks.detection.baselines.zscore import ZScore
from benchmarks.detection.matrix import TraceMatrix
from benchmarks.detection.score import NodeScore


@dataclass(slots=True)
class Panel:
    """Fitted baselines with the setting that did best for each; ``tuning_f1`` is how well, on the tuning cases."""

    baselines: list[Baseline]
    settings: list[Setting]
    tuning_f1: list[float]

    def judge(self, trace: TraceMatrix) -> dict[str, tuple[list[Accusation], float]]:
        """Return each baseline's accusations and the seconds it took."""
        result = {}
        for baseline, setting in zip(self.baselines, self.settings, strict=True):
            began_s = perf_counter()
            (found,) = baseline.judge_each(trace, [setting])
            result[baseline.name] = (found, perf_counter() - began_s)
        return result

    def describe(self) -> dict[str, Any]:
        """Return the chosen settings as plain data."""
        return {
            baseline.name: {"setting": dict(setting), "tuning_f1": round(f1, 4)}
            for baseline, setting, f1 in zip(self.baselines, self.settings, self.tuning_f1, strict=True)
        }


def assemble(traces: Sequence[TraceMatrix]) -> Panel:
    """Return the panel, fitted and tuned on labelled and healthy traces."""
    healthy = [trace for trace in traces if not trace.labels]
    faulty = [trace for trace in traces if trace.labels]
    paper, tuned = Minder(paper=True), Minder(paper=False)
    baselines: list[Baseline] = [paper, tuned, Greyhound(), ZScore(), ForestOfNodes()]
    for baseline in baselines:
        if baseline is tuned:
            tuned.share(paper)
        else:
            baseline.fit(healthy, faulty)
    chosen = [choose(baseline, traces) for baseline in baselines]
    return Panel(baselines, [setting for setting, _ in chosen], [f1 for _, f1 in chosen])


def choose(baseline: Baseline, traces: Sequence[TraceMatrix]) -> tuple[Setting, float]:
    """Return the setting with the best F1 of the node score, of equals the one with fewer false claims, and its F1."""
    scores = [NodeScore() for _ in baseline.grid]
    for trace in traces:
        seconds = len(trace.times_s) * trace.interval_s
        for score, found in zip(scores, baseline.judge_each(trace, baseline.grid), strict=True):
            score.add(trace.labels, found, len(trace.nodes), seconds)
    f1 = [float(score.report()["f1"] or 0.0) for score in scores]
    best = min(range(len(f1)), key=lambda i: (-f1[i], scores[i].overall.false))
    return baseline.grid[best], f1[best]
