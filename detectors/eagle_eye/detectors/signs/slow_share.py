"""Measures how much longer a job's steps are because of one device, from steps, or estimated from counters."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eagle_eye.detectors.signs.activity_pace import PaceChange, lasting_change
from eagle_eye.detectors.signs.medians import median_over_rows
from eagle_eye.detectors.signs.own_pace import require_pace
from eagle_eye.detectors.signs.peers import PEERS_MIN, SIGMA_PER_MAD
from eagle_eye.detectors.signs.progress import typical_step_s
from eagle_eye.detectors.signs.under_load import middle, peers_of
from eagle_eye.detectors.types import Blind, Floats, Integers, Window

COMPUTE_SHARE = 0.7  # of a step that scales with the GPU clock, if compute times are not reported: model FLOPS
# utilisations of 40 to 55% at peak rates leave about that much (Jiang et al. 2024)
STEPS_MEASURED = 64  # newest, since the onset
STEPS_BEFORE_MIN, STEPS_AFTER_MIN = 5, 2
GROWTH_NOTED = 0.01  # of the step time, below which a change of pace is no evidence
EXPECTED_DISTANCE = 3.0  # standard errors that suffice if counters predict the change
ERRORS_COMPATIBLE = 2.0  # standard errors within which an estimated cost agrees with the job's pace...
NEARER_RATIO = 0.5  # ...which must be nearer to it than to zero cost

NOT_YET = PaceChange(0.0, math.inf, GROWTH_NOTED)

_CLAUSE = re.compile(
    r"; (the job's steps are (not|[\d.]+%) longer for it( \(reckoned from counters\))?"
    r"|what it costs the job is not known)$"
)


class Slowness(NamedTuple):
    """By what share the job's steps are longer; ``measured`` on steps, or estimated. 0: no known cost."""

    ratio: float
    measured: bool

    def __str__(self) -> str:
        """Return it as a clause of a sentence."""
        if self.ratio <= 0:
            return "the job's steps are not longer for it" if self.measured else "what it costs the job is not known"
        how = "" if self.measured else " (reckoned from counters)"
        return f"the job's steps are {100 * self.ratio:.1f}% longer for it{how}"


def without_cost(summary: str) -> str:
    """Return a verdict's summary without the final clause that says how much longer the job's steps are."""
    return _CLAUSE.sub("", summary)


def slowness_by_clock(
    window: Window, columns: Sequence[int], since_s: float, clock_ratio: float, chronic: bool
) -> Slowness:
    """Return the cost of slow clocks: by compute times since the onset, else 1 / clock over the compute share.

    Neither shows whether the job waits for these ranks: its pace does, if the window shows a time before.
    """
    excess = compute_excess(window, columns, since_s)
    if chronic and excess is None:
        return Slowness(0.0, measured=False)  # neither ranks nor the time before show the cost
    reckoned = (1 / max(clock_ratio, 0.05) - 1) * compute_share(window)
    change = pace_change(window, since_s, chronic=chronic)
    found = slowness_by_pace(change, reckoned if excess is None else max(excess, 0.0))
    return Slowness(found.ratio, found.measured or (excess is not None and found.ratio == excess))


def compute_excess(window: Window, columns: Sequence[int], since_s: float) -> float | None:
    """Return by what share of a step the worst of some ranks computes longer than its peers; None if not observed.

    Peers are those of the rank's role on other nodes, so that a node that is slow as a whole is not its own reference.
    """
    steps = window.steps
    compute = steps.values.get("train_compute_seconds")
    if compute is None:
        return None
    lines = np.flatnonzero(steps.times_s >= since_s + typical_step_s(window) + window.interval_s)[-STEPS_MEASURED:]
    if len(lines) == 0:
        return None
    found = [ratio for column in columns if (ratio := _excess(window, compute, column, lines)) is not None]
    return max(found) if found else None


def _excess(window: Window, compute: Floats, column: int, lines: Integers) -> float | None:
    peers = peers_of(window, column, window.role_of)
    if column >= compute.shape[1]:
        return None  # a series that joined after these steps
    peers = peers[peers < compute.shape[1]]
    elsewhere = window.node_of[peers] != window.node_of[column]
    if len(peers) < PEERS_MIN or not elsewhere.all():
        return None
    own, others = compute[lines, column], median_over_rows(compute[np.ix_(lines, peers)].T)
    work = window.steps.values.get("train_work_units")
    if work is not None and np.isfinite(work[lines, column]).any():
        with np.errstate(invalid="ignore", divide="ignore"):
            own = own / work[lines, column]
            others = median_over_rows((compute[np.ix_(lines, peers)] / work[np.ix_(lines, peers)]).T)
    with np.errstate(invalid="ignore", divide="ignore"):
        longer = middle(own / others) - 1
    if not math.isfinite(longer):
        return None
    peers_s = middle(median_over_rows(compute[np.ix_(lines, peers)].T))
    step_s = _step_s(window, column, lines)
    excess_s = longer * peers_s
    return excess_s / (step_s - excess_s) if step_s > excess_s else longer


def _step_s(window: Window, column: int, lines: Integers) -> float:
    seconds = window.steps.values.get("train_step_seconds")
    known = middle(seconds[lines, column]) if seconds is not None else math.nan
    return known if math.isfinite(known) else typical_step_s(window)


def compute_share(window: Window) -> float:
    """Return which share of a step a typical rank computes."""
    compute = middle(window.curve.values.get("train_compute_seconds", np.zeros(0))[-STEPS_MEASURED:])
    step = middle(window.curve.values.get("train_step_seconds", np.zeros(0))[-STEPS_MEASURED:])
    return min(compute / step, 1.0) if math.isfinite(compute) and step > 0 else COMPUTE_SHARE


def pace_change(window: Window, since_s: float, *, chronic: bool = False) -> PaceChange | None:
    """Return how much longer the job's steps have become since ``since_s``, against just before.

    Its error is infinite while the pace since, or any pace, is not known. None if the time before is not known, as
    where the cause is ``chronic``. If steps are not reported, the job's throughput is used: the same work spread over
    more time.
    """
    try:
        require_pace(window)
    except Blind:
        return NOT_YET
    if chronic:
        return None
    if not np.isfinite(window.curve.values.get("train_step_seconds", np.zeros(0))).any():
        return lasting_change(window, since_s)
    seconds, times_s = window.curve.values["train_step_seconds"], window.curve.times_s
    begun_s = since_s + typical_step_s(window) + window.interval_s
    before = seconds[times_s <= since_s][-STEPS_MEASURED:]
    after = seconds[times_s > begun_s][-STEPS_MEASURED:]
    return _change(before[np.isfinite(before)], after[np.isfinite(after)])


def _change(before: Floats, after: Floats) -> PaceChange | None:
    """Return the change of the (lower) medians between two periods, which pauses do not move."""
    if len(before) < STEPS_BEFORE_MIN:
        return None
    usual = float(np.sort(before)[(len(before) - 1) // 2])
    if usual <= 0:
        return None
    if len(after) < STEPS_AFTER_MIN:
        return NOT_YET
    noise = SIGMA_PER_MAD * middle(np.abs(before - middle(before)))
    error = noise * math.sqrt(1 / len(after) + 1 / len(before)) / usual
    return PaceChange(float(np.sort(after)[(len(after) - 1) // 2]) / usual - 1, error, GROWTH_NOTED)


def slowness_by_pace(change: PaceChange | None, reckoned: float) -> Slowness:
    """Return a device's cost: by the job's pace if that has clearly changed or stayed, else as estimated.

    A slow device of a pipeline stage that has time to spare costs nothing. While the pace since is not known yet, no
    cost is claimed.
    """
    if change is None:
        return Slowness(reckoned, measured=False)
    if math.isinf(change.error):
        return Slowness(0.0, measured=False)
    if change.clear:
        return Slowness(change.growth, measured=True)
    if reckoned > 0 and change.growth >= EXPECTED_DISTANCE * change.error:
        return Slowness(min(change.growth, reckoned), measured=True)
    if change.noted > GROWTH_NOTED:
        return Slowness(0.0, measured=False)  # counters are too coarse to confirm an estimate
    compatible = reckoned <= change.growth + ERRORS_COMPATIBLE * change.error
    if reckoned > 0 and compatible and (change.growth >= NEARER_RATIO * reckoned or reckoned < change.noted):
        return Slowness(reckoned, measured=False)
    return Slowness(0.0, measured=True)
