"""Whether the job as a whole has become slower, since when, and what of it the network explains."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from eagle_eye.detectors.signs.progress import Patience, typical_step_s
from eagle_eye.detectors.signs.recent_rows import middle
from eagle_eye.detectors.types import Evidence, Floats, Window

STEPS_MIN = 3  # fewer steps say nothing about a lasting change
RECENT_S = 15.0  # the newest steps are those of this time, STEPS_MIN at least
SAMPLED = 64  # steps of the past looked at, spread evenly
NEWEST_MAX = 64
OLDER_MIN = 32
EXCESS_RATIO = 0.02  # a change below this is weather
SIGMAS = 5.0  # and it must be beyond chance
MEDIAN_ERROR = 1.2533 * 1.4826  # standard error of a median from the median absolute deviation, normal distribution
SPREAD_FLOOR_RATIO = 0.01  # a job whose steps are all alike still jitters
EXPLAINED_RATIO = 0.5  # of what collectives are longer, that one rank's own work may make up


class Change(NamedTuple):
    """A quantity of the job's steps: before, now, since when; ``sure`` when beyond chance and EXCESS_RATIO."""

    before: float
    now: float
    since_s: float
    sure: bool

    @property
    def ratio(self) -> float:
        """By how much it is more than before: 0.2 for a fifth."""
        return self.now / self.before - 1 if self.before > 0 else 0.0

    def evidence(self, metric: str) -> Evidence:
        """Return the change as evidence, the past in the peers' place."""
        return Evidence(metric, None, None, self.now, self.before, self.before * (1 + EXCESS_RATIO), "seconds")


def changed_lately(window: Window, metric: str) -> Change | None:
    """Return how the newest steps differ from the job's past; None when either is not known."""
    values, times_s = window.curve.values.get(metric), window.curve.times_s
    if values is None or len(values) < 2 * STEPS_MIN:
        return None
    newest = len(values) - int(np.searchsorted(times_s, times_s[-1] - RECENT_S, side="right"))
    newest = min(max(newest, STEPS_MIN), NEWEST_MAX, len(values) - STEPS_MIN)
    start = len(values) - newest
    # Of a long past the older half: a change that lasts is not to become its own past soon.
    older = start if start < OLDER_MIN else max(start // 2, OLDER_MIN)
    return _change(values, times_s, start, newest, older)


def changed_since(window: Window, metric: str, since_s: float) -> Change | None:
    """Return how the steps since a moment differ from those before it; None when either is not known."""
    values, times_s = window.curve.values.get(metric), window.curve.times_s
    if values is None:
        return None
    start = int(np.searchsorted(times_s, since_s, side="right"))
    if start < STEPS_MIN or len(values) - start < STEPS_MIN:
        return None
    return _change(values, times_s, start, min(len(values) - start, NEWEST_MAX), start)


def overdue(window: Window, patience: Patience) -> bool:
    """Whether steps stay away for longer than the job's pace explains, by the cheapest look; False without steps."""
    if len(window.times_s) == 0 or not math.isfinite(window.last_step):
        return False
    missing_s = float(window.times_s[-1]) - window.advanced_s
    steps = patience.typical_steps
    return missing_s >= steps * window.interval_s and missing_s >= steps * typical_step_s(window)


def slowed_by_network(window: Window, since_s: float | None = None) -> tuple[Change, Change, str] | None:
    """Return how collectives and steps became longer where nobody's own work explains it; None: they did not.

    The last item is the kind of evidence: "collective_time", or "step_time" where collectives are not observed and
    compute time, where observed, has not changed.
    """

    def changed(metric: str) -> Change | None:
        return changed_lately(window, metric) if since_s is None else changed_since(window, metric, since_s)

    waits = changed("nccl_collective_seconds")
    if waits is not None and not waits.sure:
        return None
    steps = changed("train_step_seconds")
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


def _one_rank_explains(window: Window, longer_s: float) -> bool:
    """Whether some rank's own compute or data time is so much above the others' that they wait for it."""
    for metric in ("train_compute_seconds", "train_data_wait_seconds"):
        values = window.steps.values.get(metric)
        if values is None or len(values) < STEPS_MIN:
            continue
        newest = values[-STEPS_MIN:]
        # Peers of other pipeline stages differ by nature, so that each rank is set against its own past, too.
        excess = np.fmin.reduce(newest, axis=0) - _past(values)
        if len(excess) and np.fmax.reduce(excess) > EXPLAINED_RATIO * longer_s:
            return True
    return False


def _past(values: Floats) -> Floats:
    older = values[: -2 * STEPS_MIN] if len(values) > 2 * STEPS_MIN else values[:1]
    least: Floats = np.fmin.reduce(older[:: max(len(older) // 8, 1)], axis=0)
    return least


def _change(values: Floats, times_s: Floats, start: int, newest: int, past: int) -> Change | None:
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
        return Change(before, level, since_s, sure=False)
    spread = max(middle(np.abs(older - before)), SPREAD_FLOOR_RATIO * before)
    error = MEDIAN_ERROR * spread * math.sqrt(1 / len(now) + 1 / len(older))
    ordinary = np.flatnonzero(values[:start] < before + excess / 2)
    since_s = float(times_s[ordinary[-1]]) if len(ordinary) else since_s
    return Change(before, level, since_s, sure=excess > SIGMAS * error)
