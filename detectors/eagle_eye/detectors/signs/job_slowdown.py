"""Measures whether the whole job has slowed down, since when, and how much the network explains."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from eagle_eye.detectors.signs.activity_pace import activity_change, changed_of_late
from eagle_eye.detectors.signs.medians import median_over_rows
from eagle_eye.detectors.signs.own_pace import PACE_LINES, settled_curve
from eagle_eye.detectors.signs.peers import SIGMA_PER_MAD
from eagle_eye.detectors.signs.progress import Patience, hooked, typical_step_s
from eagle_eye.detectors.signs.recent_rows import middle
from eagle_eye.detectors.signs.slow_clocks import slow_clocks
from eagle_eye.detectors.signs.without_hook import work
from eagle_eye.detectors.types import Blind, Evidence, Floats, Window

STEPS, COLLECTIVES = "train_step_seconds", "nccl_collective_seconds"
STEPS_MIN = 3  # fewer steps do not show a lasting change
RECENT_S = 15.0  # the newest steps are those of this time, at least STEPS_MIN
SAMPLED = 64  # past steps examined, evenly spaced
NEWEST_MAX = 64
OLDER_MIN = 32
EXCESS_RATIO = 0.02  # a smaller change is normal variation
SIGMAS = 5.0  # and it must be beyond chance
MEDIAN_ERROR = 1.2533 * 1.4826  # standard error of a median from the median absolute deviation, normal distribution
SPREAD_FLOOR_RATIO = 0.01  # even equal steps vary by this much
OWN_STEPS, OWN_PAST, OWN_SIGMAS = 12, 32, 3.0  # newest steps, steps of the past, standard errors of a rank's own change
EXPLAINED_RATIO = 0.5  # of the growth of collectives, that one rank's own work may account for


class QuantityChange(NamedTuple):
    """A quantity of the job's steps: before, now, onset; ``sure`` if beyond chance and EXCESS_RATIO.

    ``metric`` "" is the job's pace by GPU and network throughput, relative to before.
    """

    before: float
    now: float
    since_s: float
    sure: bool
    metric: str

    @property
    def ratio(self) -> float:
        """Relative increase over before: 0.2 for a fifth."""
        return self.now / self.before - 1 if self.before > 0 else 0.0

    @property
    def evidence(self) -> Evidence:
        """The change as evidence, with the past as the peers' value."""
        metric, unit = (self.metric, "seconds") if self.metric else ("job_activity_slowdown", "ratio")
        return Evidence(metric, None, None, self.now, self.before, self.before * (1 + EXCESS_RATIO), unit)

    def __str__(self) -> str:
        """Return the change as a sentence."""
        if not self.metric:
            return f"what the job's GPUs and networks do takes {100 * self.ratio:.0f}% longer than before"
        what = "collectives" if self.metric == COLLECTIVES else "steps"
        return f"{what} take {self.now:.3f} s where {self.before:.3f} s were usual"


def changed_lately(window: Window, metric: str) -> QuantityChange | None:
    """Return how the newest steps differ from the job's past; None if either is not known."""
    curve = settled_curve(window)
    values, times_s = curve.values.get(metric), curve.times_s
    if values is None or len(values) < PACE_LINES:
        return None
    newest = len(values) - int(np.searchsorted(times_s, times_s[-1] - RECENT_S, side="right"))
    newest = min(max(newest, STEPS_MIN), NEWEST_MAX, len(values) - STEPS_MIN)
    start = len(values) - newest
    # Of a long past the older half, so that a lasting change does not soon become its own past.
    older = start if start < OLDER_MIN else max(start // 2, OLDER_MIN)
    return _change(metric, values, times_s, start, newest, older)


def changed_since(window: Window, metric: str, since_s: float) -> QuantityChange | None:
    """Return how the steps since ``since_s`` differ from those before; None if either is not known."""
    curve = settled_curve(window)
    values, times_s = curve.values.get(metric), curve.times_s
    if values is None or len(values) < PACE_LINES:
        return None
    start = int(np.searchsorted(times_s, since_s, side="right"))
    if start < STEPS_MIN or len(values) - start < STEPS_MIN:
        return None
    return _change(metric, values, times_s, start, min(len(values) - start, NEWEST_MAX), start)


def overdue(window: Window, patience: Patience) -> bool:
    """Whether steps have been missing for longer than the job's pace explains, by the cheapest check.

    For a job that reports no steps: whether its GPUs do no work.
    """
    if len(window.times_s) == 0:
        return False
    steps = patience.typical_steps
    if not math.isfinite(window.last_step):
        seen = None if hooked(window) else work(window)
        return seen is not None and seen.idle_s >= steps * window.interval_s
    missing_s = float(window.times_s[-1]) - window.advanced_s
    return missing_s >= steps * window.interval_s and missing_s >= steps * typical_step_s(window)


def slower(window: Window) -> QuantityChange | None:
    """Return how the job's pace recently changed, by its steps or, if not reported, its activity."""
    if not math.isfinite(window.last_step):
        return None if hooked(window) else _pace(window, None)
    return changed_lately(window, STEPS)


def slowed_by_network(
    window: Window, since_s: float | None = None
) -> tuple[QuantityChange, QuantityChange, str] | None:
    """Return how collectives and steps became longer if no rank's own work explains it; None if they did not.

    The last item is the kind of evidence: "collective_time", "step_time" if collectives are not observed and compute
    time, if observed, has not changed, or "job_activity" if steps are not reported.
    """
    if not math.isfinite(window.last_step):
        pace = None if hooked(window) else _pace(window, since_s)
        return (pace, pace, "job_activity") if pace is not None and not _clocks_explain(window, pace) else None

    def changed(metric: str) -> QuantityChange | None:
        return changed_lately(window, metric) if since_s is None else changed_since(window, metric, since_s)

    waits = changed(COLLECTIVES)
    if waits is not None and not waits.sure:
        return None
    steps = changed(STEPS)
    if steps is None or not steps.sure:
        return None
    longer_s = waits.now - waits.before if waits is not None else steps.now - steps.before
    for metric in ("train_compute_seconds", "train_data_wait_seconds"):
        own = changed(metric)
        if own is not None and own.now - own.before > EXPLAINED_RATIO * longer_s:
            return None
    if _one_rank_explains(window, longer_s):
        return None
    if waits is None:
        return steps, steps, "step_time"
    return waits, steps, "collective_time"


def _pace(window: Window, since_s: float | None) -> QuantityChange | None:
    """Return the change of the job's activity, if it is significant."""
    found = changed_of_late(window) if since_s is None else (activity_change(window, since_s), since_s)
    if found is None or found[0] is None or not found[0].clear:
        return None
    return QuantityChange(1.0, 1 + found[0].growth, found[1], sure=True, metric="")


def _clocks_explain(window: Window, pace: QuantityChange) -> bool:
    """Whether some GPU's clock is below its peers' by so much that the others wait for it."""
    try:
        slow_ones = slow_clocks(window)
    except Blind:
        return False
    return any(slow.lasting and slow.deficit > EXPLAINED_RATIO * pace.ratio for slow in slow_ones)


def _one_rank_explains(window: Window, longer_s: float) -> bool:
    """Whether some rank's own compute or data time is so far above its own past that the others wait for it.

    Each rank is compared with itself, since peers of other pipeline stages differ by nature; where its work varies from
    step to step, only the excess over that counts.
    """
    for metric in ("train_compute_seconds", "train_data_wait_seconds"):
        values = window.steps.values.get(metric)
        if values is None or len(values) < STEPS_MIN:
            continue
        count = max(min(OWN_STEPS, len(values) // 2), STEPS_MIN)
        now, older = values[-count:], values[:-count] if len(values) > 2 * count else values[:1]
        older = older[:: max(len(older) // OWN_PAST, 1)]
        usual = median_over_rows(older)
        noise = SIGMA_PER_MAD * median_over_rows(np.abs(older - usual)) / math.sqrt(count)
        excess = median_over_rows(now) - usual - OWN_SIGMAS * noise
        if len(excess) and np.fmax.reduce(excess) > EXPLAINED_RATIO * longer_s:
            return True
    return False


def _change(metric: str, values: Floats, times_s: Floats, start: int, newest: int, past: int) -> QuantityChange | None:
    now = values[-newest:]
    now = now[np.isfinite(now)]
    older = values[:past]
    older = older[:: max(len(older) // SAMPLED, 1)]
    older = older[np.isfinite(older)]
    if len(now) < STEPS_MIN or len(older) < STEPS_MIN:
        return None
    level, before = middle(now), middle(older)
    excess = level - before
    since_s = float(times_s[start - 1])
    if excess <= EXCESS_RATIO * before:
        return QuantityChange(before, level, since_s, sure=False, metric=metric)
    spread = max(middle(np.abs(older - before)), SPREAD_FLOOR_RATIO * before)
    error = MEDIAN_ERROR * spread * math.sqrt(1 / len(now) + 1 / len(older))
    ordinary = np.flatnonzero(values[:start] < before + excess / 2)
    since_s = float(times_s[ordinary[-1]]) if len(ordinary) else since_s
    return QuantityChange(before, level, since_s, sure=excess > SIGMAS * error, metric=metric)
