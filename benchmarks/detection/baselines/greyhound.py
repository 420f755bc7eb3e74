"""Greyhound (FALCON): a change point in the iteration time, then the group that is slower than the median.

Paper: Wu et al., "Greyhound: Hunting Fail-Slows in Hybrid-Parallel Training at Scale", ATC'25, arXiv 2410.12588.
As published: the iteration period is the first lag at which the autocorrelation of the collective calls reaches 0.95;
Bayesian online change point detection at likelihood 0.9; a change counts when the mean iteration time rose by 10%
(``change_ratio``); profiling then suspects the group that is more than 10% (``suspect_ratio``) slower than the median.
Tuned: hazard, ``change_ratio`` and ``suspect_ratio`` on the suite's tuning seeds, 12 points; the published values are
among them (the paper does not name its hazard).
Adapted: where steps are reported (``train_step``) they are the iterations and need no autocorrelation; else iterations
are counted from the collectives' sequence numbers. Profiling reads what was recorded in the five iterations after the
detection (the paper's profiling and validation take 6.9 s): compute time of each node's slowest rank against the nodes
of the same stage. The paper's validation (GEMM and link tests with the job paused) cannot be repeated on a recording:
in its place only the slowest suspect is accused, and a slow communication group, whose members all wait alike, accuses
nobody. It looks for slowness only: hangs and crashes are not its business and are missed.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.detection.baselines.bocd import Bocd
from benchmarks.detection.baselines.protocol import Accusation, Setting, once_each
from benchmarks.detection.matrix import Floats, TraceMatrix

ACF_MIN = 0.95
LIKELIHOOD = 0.9
PROFILE_ITERATIONS = 5
PERIODS_MIN = 4  # of the period in a trace before its autocorrelation says anything
PUBLISHED: Setting = {"hazard": 1 / 250, "change_ratio": 0.10, "suspect_ratio": 0.10}


@dataclass(slots=True)
class Greyhound:
    """Accuses the slowest node of the profile that follows a verified change point."""

    name: str = "Greyhound"

    @property
    def grid(self) -> Sequence[Setting]:
        """Return the 12 settings."""
        return [
            {"hazard": h, "change_ratio": c, "suspect_ratio": s}
            for h in (1 / 50, 1 / 250, 1 / 1000)
            for c in (0.05, 0.10)
            for s in (0.05, 0.10)
        ]

    def fit(self, healthy: Sequence[TraceMatrix], faulty: Sequence[TraceMatrix]) -> None:
        """Learn nothing: every job is compared with its own past."""

    def judge(self, trace: TraceMatrix) -> list[Accusation]:
        """Return the accusations under the published setting."""
        return self.judge_each(trace, [PUBLISHED])[0]

    def judge_each(self, trace: TraceMatrix, settings: Sequence[Setting]) -> list[list[Accusation]]:
        """Return the accusations under each setting."""
        ends_s, seconds = iterations(trace)
        by_hazard = {
            hazard: Bocd(hazard=hazard, likelihood=LIKELIHOOD).changes(seconds)
            for hazard in {setting["hazard"] for setting in settings}
        }
        result = []
        for setting in settings:
            found, before = [], 0
            for change in by_hazard[setting["hazard"]]:
                usual_s = float(np.mean(seconds[before : max(change.began, before + 1)]))
                now_s = float(np.mean(seconds[change.began : change.found + 1]))
                last = min(change.found + PROFILE_ITERATIONS, len(seconds) - 1)
                if now_s >= (1 + setting["change_ratio"]) * usual_s and last > change.found:
                    suspect = slowest(trace, ends_s[change.found], ends_s[last], setting["suspect_ratio"])
                    if suspect is not None:
                        found.append(Accusation(float(ends_s[last]), suspect))
                before = change.began
            result.append(once_each(found))
        return result


def iterations(trace: TraceMatrix) -> tuple[Floats, Floats]:
    """Return when iterations ended and how long they took, (K,) each; empty when nothing tells.

    Of the steps that end within one interval only their mean is known: they count as one.
    """
    step, seconds = trace.values.get("train_step"), trace.values.get("train_step_seconds")
    if step is not None and seconds is not None:
        reached = np.fmax.accumulate(_over_nodes(step))
        fresh = np.diff(reached, prepend=np.nan) > 0
        mean_s = _over_nodes(np.where(np.isfinite(step), seconds, np.nan))
        usable = fresh & np.isfinite(mean_s) & (mean_s > 0)
        return trace.times_s[usable], mean_s[usable]
    sequence = trace.values.get("nccl_sequence")
    if sequence is None:
        return np.zeros(0), np.zeros(0)
    calls = _over_nodes(sequence)
    known = np.isfinite(calls)
    lag = first_period(np.diff(calls[known]))
    if lag is None:
        return np.zeros(0), np.zeros(0)
    return _crossings(trace.times_s[known], calls[known], lag)


def first_period(series: Floats) -> int | None:
    """Return the first lag, in samples, with an autocorrelation of 0.95 or more; None where there is none."""
    centred = np.asarray(series, dtype=np.float64) - np.mean(series) if len(series) else np.zeros(0)
    power = float(centred @ centred)
    if power <= 0:
        return None
    length = len(centred)
    for lag in range(2, length // PERIODS_MIN + 1):
        pairs = length - lag
        # Each pair counts alike: the usual estimate shrinks with the lag and would never reach 0.95.
        if float(centred[lag:] @ centred[:-lag]) / pairs >= ACF_MIN * power / length:
            return lag
    return None


def slowest(trace: TraceMatrix, begin_s: float, end_s: float, ratio: float) -> str | None:
    """Return the node most above its group's median, by more than ``ratio``, None where nobody is."""
    lines = (trace.times_s > begin_s) & (trace.times_s <= end_s)
    compute = trace.slowest_compute_s
    if compute is None or not lines.any():
        return None
    mean_s = _over_time(compute[lines])
    relative = np.full(len(mean_s), np.nan)
    for role in np.unique(trace.role_of):
        members = trace.role_of == role
        if members.sum() > 1:
            relative[members] = mean_s[members] / _median(mean_s[members])
    if np.nanmax(relative, initial=0.0) > 1 + ratio:
        return trace.nodes[int(np.nanargmax(relative))]
    return None


def _crossings(times_s: Floats, calls: Floats, lag: int) -> tuple[Floats, Floats]:
    """Return ends and durations of iterations, each a fixed number of calls, of a (K,) series of call counts."""
    per_iteration = float(np.median(calls[lag:] - calls[:-lag]))
    if per_iteration < 1:
        return np.zeros(0), np.zeros(0)
    rising = np.concatenate([[True], np.diff(calls) > 0])  # np.interp needs a strictly rising axis
    marks = np.arange(calls[0], calls[-1], per_iteration)
    ends_s = np.interp(marks, calls[rising], times_s[rising])
    return ends_s[2:], np.diff(ends_s)[1:]  # the first began before the trace


def _over_nodes(values: Floats) -> Floats:
    return _quiet(np.nanmedian, values, 1)


def _over_time(values: Floats) -> Floats:
    return _quiet(np.nanmean, values, 0)


def _median(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")


def _quiet(function: object, values: Floats, axis: int) -> Floats:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=RuntimeWarning)  # lines of which nothing was observed
        return np.asarray(function(values.astype(np.float64), axis=axis))  # type: ignore[operator]
