"""Detects a job that has become slower as a whole from some step on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.changepoint import cusum, excursion_start, run_lengths, smoothed
from eagle_eye.detectors.signs.own_pace import WARMUP_LINES, require_cpu, require_pace
from eagle_eye.detectors.signs.peers import SIGMA_PER_MAD, peers_median
from eagle_eye.detectors.signs.progress import quiet_phase
from eagle_eye.detectors.signs.step_series import course
from eagle_eye.detectors.types import Blind, Evidence, Floats, Verdict, Window

DROP_RATIO = 1.10  # of the step time: the ratio that Greyhound verifies a change point by (Wu et al., ATC 2025)
HISTORY = 2_048  # newest reports that define what is usual
DETAIL = 256  # newest reports among which a change is searched; earlier ones as medians of HISTORY / DETAIL
USUAL_MIN = 12  # reports before the change: their median's error, a third of their noise, counts in ``SIGMAS``
RECENT_MIN = 120  # reports before the change that it is measured against, if available
USUAL_QUANTILE = 0.3  # of the history; still the usual level if most of it is already slow
LASTED_MIN = 10  # reports since...
LASTED_S = 20.0  # ...and seconds: other jobs' bursts and garbage collection take less
SURE_REPORTS = 20
SMOOTHED = 5  # reports per running median: a single checkpoint or evaluation is no change
CLIP_SIGMAS = 12.0  # larger deviations count as this much
CUSUM_LIMIT = 12.0  # cumulated sigmas above half the change that counts
LIKELIHOOD = 0.9  # of a change point, before it is verified (Greyhound)
SIGMAS = 8.0  # of the difference of the medians: step times are not independent of each other
NOISE_FLOOR = 0.005  # of the logarithm: a timer's resolution
STEADY_QUANTILE = 0.25  # of the steps since, which must be slow too: a few very slow steps do not make a slow job
HABIT_STRETCHES = 2  # earlier periods as slow and as long: then the job does that by itself
MARGIN_RATIO = 0.05  # of tokens or work per step, above which the steps themselves have changed
EXPLAINED_RATIO = 0.5  # of the longer step, that one node's compute or more work must account for
COMPUTE_LINES = 6  # newest steps over which a node's compute and data wait are examined
NODES_RATIO_MAX = 0.2  # more nodes than this (and more than one) waiting for data: the storage, not the nodes
CONFIDENCE_EARLY, CONFIDENCE_SURE = 0.75, 0.9
PARTS = (
    ("train_compute_seconds", "computing"),
    ("train_data_wait_seconds", "waiting for data"),
    ("nccl_collective_seconds", "in collectives"),
)


class PaceStep(NamedTuple):
    """From curve line ``at`` on the pace is ``after``, not ``before``: seconds per step, or per million tokens."""

    at: int
    before: float
    after: float
    reports: int
    likelihood: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputDrop:
    """Finds a lasting rise of the job's step time (of the time per token if only that is reported).

    The logarithms of the medians over the ranks, smoothed by a running median, go through Page's CUSUM (1954), which is
    cheap, and then through Bayesian online change-point detection (Adams & MacKay, 2007). A change is verified: the
    median since is ``DROP_RATIO`` and ``SIGMAS`` above the job's usual, so is the lower quartile, it has lasted
    ``LASTED_MIN`` reports and ``LASTED_S``, and the job has not done the same by itself before. Steps with more tokens
    or more work are not slower; a rise that one node's compute or data wait explains is that node's fault. The verdict
    names the part of the step that grew. Blind if no rank reports step times or tokens per second, while the job has no
    pace yet, and where most hosts are short of CPU (``signs/own_pace``). Cannot see: slow drifts; a job that was slow
    from the start of its attempt; a cause.
    """

    ratio: float = DROP_RATIO
    name: str = "throughput_drop"
    by_step: bool = True

    def detect(self, window: Window) -> list[Verdict]:
        """Return at most one verdict."""
        metric = next(
            (m for m in ("train_step_seconds", "train_tokens_per_second") if m in window.curve.values),
            None,
        )
        if metric is None and not {"train_step_seconds", "train_tokens_per_second"} & window.device.keys():
            raise Blind("no rank reports its step time or tokens per second")
        require_pace(window)
        if metric is None:
            return []
        if _as_quick_as_ever(window.curve.values[metric][-HISTORY:], metric, self.ratio):
            return []
        seen = course(window.curve, metric, HISTORY)
        usable = (seen.value > 0) & (seen.line >= WARMUP_LINES)
        line = seen.line[usable]
        pace = np.log(seen.value[usable])
        if metric == "train_tokens_per_second":
            pace = math.log(1e6) - pace
        if len(pace) < USUAL_MIN + LASTED_MIN:
            return []
        usual = float(np.partition(pace, int(USUAL_QUANTILE * len(pace)))[int(USUAL_QUANTILE * len(pace))])
        if float(np.sort(pace[-LASTED_MIN:])[LASTED_MIN // 2]) - usual < math.log(self.ratio):
            return []
        if quiet_phase(window):
            return []
        tokens = window.curve.values.get("train_tokens_per_second")
        if tokens is not None and _as_quick_as_ever(tokens[-HISTORY:], "train_tokens_per_second", self.ratio):
            return []  # longer steps at the same throughput: the steps contain more work
        require_cpu(window)
        change = self._change(window, line, pace, usual)
        if change is None or _more_work(window, change) or _one_node(window, change):
            return []
        return [self._verdict(window, change, metric)]

    def _change(self, window: Window, line: NDArray[np.intp], pace: Floats, usual: float) -> PaceStep | None:
        """Return the change still in effect in the newest steps; None if there is none."""
        for width in (1, HISTORY // DETAIL):
            kept = len(pace) // width * width
            coarse = pace[-kept:] if width == 1 else np.median(pace[-kept:].reshape(-1, width), axis=1)
            at = self._located(coarse[-DETAIL:], usual)
            if at is not None:
                start, likelihood = at
                first = len(pace) - (min(len(coarse), DETAIL) - start) * width
                found = self._verified(window, line, pace, max(first, 0), likelihood)
                if found is not None:
                    return found
        return None

    def _located(self, pace: Floats, usual: float) -> tuple[int, float] | None:
        """Return where in the values the newest change was, and its likelihood; None if none is likely."""
        if len(pace) < SMOOTHED + LASTED_MIN:
            return None
        # Step-to-step differences exclude the change itself; deviations around the level include slow waves.
        noise = SIGMA_PER_MAD * float(np.median(np.abs(np.diff(pace)))) / math.sqrt(2)
        quick = pace[pace <= usual + max(0.5 * math.log(self.ratio), 2 * noise)]
        if not len(quick):
            return None  # slow all along: the change is further back
        centre = float(np.median(quick))
        sigma = max(noise, SIGMA_PER_MAD * float(np.median(np.abs(quick - centre))), NOISE_FLOOR)
        calm = np.clip((smoothed(pace, SMOOTHED) - centre) / sigma, -CLIP_SIGMAS, CLIP_SIGMAS)
        slack = min(0.5 * math.log(self.ratio) / sigma, CLIP_SIGMAS / 2)
        if cusum(calm, slack)[-1] < CUSUM_LIMIT:
            return None
        # Again with half the observed change instead of the smallest that counts, to date it.
        start = excursion_start(cusum(calm, max(slack, 0.5 * float(np.median(calm[-LASTED_MIN:])))))
        likelihood = run_lengths(calm).within(1, len(calm) - 1)
        if start == 0 or likelihood < LIKELIHOOD:
            return None
        return start + SMOOTHED // 2, likelihood

    def _verified(
        self, window: Window, line: NDArray[np.intp], pace: Floats, at: int, likelihood: float
    ) -> PaceStep | None:
        before, after = pace[:at], pace[at:]
        if len(before) < USUAL_MIN or len(after) < LASTED_MIN:
            return None
        at_s = float(window.curve.times_s[line[at]]) - window.interval_s
        if window.now_s - at_s < LASTED_S:
            return None
        recent = before[-max(4 * len(after), RECENT_MIN) :]
        usual, now = float(np.median(recent)), float(np.median(after))
        usual = max(usual, float(np.median(before)))  # after a fast period the job has only returned to its usual pace
        shift = now - usual
        noise = SIGMA_PER_MAD * float(np.median(np.abs(recent - np.median(recent))))
        since = SIGMA_PER_MAD * float(np.median(np.abs(after - now)))
        error = 1.2533 * max(noise, since, NOISE_FLOOR) * math.sqrt(1 / len(after) + 1 / len(recent))
        if shift < max(math.log(self.ratio), SIGMAS * error):
            return None
        if float(np.quantile(after, STEADY_QUANTILE)) - usual < 0.5 * shift:
            return None
        if float(np.median(after[-LASTED_MIN:])) - usual < max(0.5 * shift, math.log(self.ratio)):
            return None  # already recovering
        if _stretches(before, usual + 0.7 * shift, min(len(after), len(before) // 4)) >= HABIT_STRETCHES:
            return None
        return PaceStep(int(line[at]), math.exp(usual), math.exp(now), len(after), likelihood)

    def _verdict(self, window: Window, change: PaceStep, metric: str) -> Verdict:
        steps = metric == "train_step_seconds"
        slowdown = change.after / change.before - 1
        unit = "seconds" if steps else "seconds per million tokens"
        parts = list(_parts(window, change))
        grown = max(parts, key=lambda part: part[2] - part[1], default=None)
        said = ""
        if grown is not None and grown[2] - grown[1] > EXPLAINED_RATIO * (change.after - change.before):
            said = f"; most of it is time {grown[3]} ({grown[1]:.3g} to {grown[2]:.3g} s)"
        what = "steps take" if steps else "a million tokens take"
        return Verdict(
            detector=self.name,
            fault="throughput_drop",
            job=window.job,
            nodes=(),
            node=None,
            device=None,
            confidence=CONFIDENCE_SURE if change.reports >= SURE_REPORTS else CONFIDENCE_EARLY,
            onset_s=float(window.curve.times_s[change.at]) - max(window.interval_s, change.after if steps else 0.0),
            summary=(
                f"{what} {change.after:.3g} s where {change.before:.3g} s were usual ({100 * slowdown:.0f}% longer),"
                f" since step {window.curve.number[change.at]:.0f}, on all nodes alike{said}"
            ),
            evidence=(
                Evidence(
                    metric if steps else "train_seconds_per_million_tokens",
                    None,
                    None,
                    change.after,
                    change.before,
                    self.ratio * change.before,
                    unit,
                ),
                Evidence("change_point_likelihood", None, None, change.likelihood, None, LIKELIHOOD, "ratio"),
                Evidence("steps_since_change", None, None, float(change.reports), None, float(LASTED_MIN), "reports"),
                *(Evidence(name, None, None, after, before, None, "seconds") for name, before, after, _ in parts),
            ),
            kinds=frozenset({"step_time"}),
            slowdown_ratio=slowdown,
        )


def _as_quick_as_ever(values: Floats, metric: str, ratio: float) -> bool:
    """Whether the newest values are no worse than usual: cheap, and nearly always True. False: perhaps not."""
    if len(values) < USUAL_MIN + LASTED_MIN:
        return True
    newest = np.sort(values[-LASTED_MIN:])
    if metric == "train_step_seconds":
        at = int(USUAL_QUANTILE * len(values) / 2)
        return bool(newest[LASTED_MIN // 2] < ratio * np.partition(values, at)[at])
    at = int((1 - USUAL_QUANTILE / 2) * len(values))
    return bool(newest[LASTED_MIN // 2] > np.partition(values, at)[at] / ratio)


def _stretches(pace: Floats, level: float, length: int) -> int:
    """Return how many separate runs of ``length`` values have a median above the level."""
    if length < 1:
        return 0
    blocks = len(pace) // length
    high = np.median(pace[len(pace) - blocks * length :].reshape(blocks, length), axis=1) > level
    return int(high[:1].sum() + (high[1:] & ~high[:-1]).sum())


def _medians(window: Window, metric: str, at: int, reports: int) -> tuple[float, float]:
    """Return the metric's median before and since a line of the curve; NaN if not reported."""
    values = window.curve.values.get(metric)
    if values is None:
        return math.nan, math.nan
    before, after = values[max(at - max(4 * reports, DETAIL), 0) : at], values[at:]
    before, after = before[np.isfinite(before)], after[np.isfinite(after)]
    if not len(before) or not len(after):
        return math.nan, math.nan
    return float(np.median(before)), float(np.median(after))


def _parts(window: Window, change: PaceStep) -> list[tuple[str, float, float, str]]:
    """Return the parts of a step: (metric, before, after, description)."""
    found = []
    for metric, what in PARTS:
        before, after = _medians(window, metric, change.at, change.reports)
        if math.isfinite(before) and math.isfinite(after):
            found.append((metric, before, after, what))
    return found


def _more_work(window: Window, change: PaceStep) -> bool:
    """Whether the steps contain more since: more tokens, or more work as reported by the training code."""
    longer = math.log(change.after / change.before)
    seconds = _medians(window, "train_step_seconds", change.at, change.reports)
    tokens = _medians(window, "train_tokens_per_second", change.at, change.reports)
    if min(*seconds, *tokens) > 0:
        each = math.log(seconds[1] * tokens[1]) - math.log(seconds[0] * tokens[0])
        if each > max(math.log1p(MARGIN_RATIO), EXPLAINED_RATIO * longer):
            return True
    units = window.steps.values.get("train_work_units")
    if units is None or not len(units):
        return False
    since = int(np.searchsorted(window.steps.times_s, window.curve.times_s[change.at]))
    before, after = units[max(since - 16, 0) : since], units[-16:] if since < len(units) - 16 else units[since:]
    before, after = before[np.isfinite(before)], after[np.isfinite(after)]
    if not len(before) or not len(after) or float(np.median(before)) <= 0:
        return False
    grown = math.log(max(float(np.median(after)), 1e-9) / float(np.median(before)))
    return grown > max(math.log1p(MARGIN_RATIO), EXPLAINED_RATIO * longer)


def _one_node(window: Window, change: PaceStep) -> bool:
    """Whether one node's compute or data wait accounts for the longer steps: then it is a straggler.

    Straggler and SlowInput report that. If many nodes wait for data, no node is at fault and this verdict holds.
    """
    seconds = _medians(window, "train_step_seconds", change.at, change.reports)
    limit_s = EXPLAINED_RATIO * (seconds[1] - seconds[0])
    if not math.isfinite(limit_s):
        return False
    compute = window.steps.values.get("train_compute_seconds")
    if compute is not None and len(compute) >= COMPUTE_LINES:
        with np.errstate(invalid="ignore"):
            relative = window.steps.relative_compute[-COMPUTE_LINES:] - 1.0
            excess = compute[-COMPUTE_LINES:] * relative / (1.0 + relative)
        if (_mean_of_most(excess) > limit_s).any():
            return True
    waits = window.steps.values.get("train_data_wait_seconds")
    if waits is None or len(waits) < COMPUTE_LINES:
        return False
    excess = np.array([row - peers_median(row, window.role_of) for row in waits[-COMPUTE_LINES:]])
    late = np.unique(window.node_of[_mean_of_most(excess) > limit_s])
    return 0 < len(late) <= max(1, int(NODES_RATIO_MAX * len(window.nodes)))


def _mean_of_most(values: Floats) -> Floats:
    """Return each column's mean, NaN if fewer than half of the rows were observed."""
    known = np.isfinite(values)
    count = known.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(known, values, 0.0).sum(axis=0) / count
    return np.where(count >= len(values) // 2, mean, np.nan)
