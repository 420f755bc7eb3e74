"""Estimates what a slow rank costs its job: by how much the steps that wait for it are longer. Pure."""

from __future__ import annotations

import math

import numpy as np

from eagle_eye.detectors.signs.medians import median_of, median_over_rows, trimmed_means
from eagle_eye.detectors.signs.own_pace import settled_line
from eagle_eye.detectors.signs.peers import SIGMA_PER_MAD
from eagle_eye.detectors.signs.slow_share import Slowness
from eagle_eye.detectors.signs.step_noise import PEERS_SAMPLED
from eagle_eye.detectors.types import Floats, Integers, Window

ONSET_MARGIN = 0.5  # of the excess: a step above it counts as slow
STEPS_MIN = 2  # since the onset
PACE_STEPS_BEFORE, PACE_STEPS_MAX = 10, 48  # steps before the onset that define the earlier pace
PACE_NOTED, PACE_SIGMAS = 0.01, 4.0  # growth of the pace, and standard errors of it, below which it shows no cost
WAITS_STEPS_MAX = 128  # newest steps compared one by one with the ranks' times in them
WAITS_MIN = 3  # steps in which a rank was the latest
WAITS_SHARE = 0.5  # of what it was later by, that these steps must be longer by


def waited_for(window: Window, onset: int, index: int, centre: float, peers: Integers) -> float:
    """Return by what share steps are longer because a rank is ``centre`` times as slow as it would be.

    A step waits for its slowest rank: if a peer on another node is as late anyway, this one costs nothing. Steps before
    the onset are used as well, as they would have been with the slow rank. Peers that are about equally slow all the
    time are ignored, so that of two slow nodes each has its cost.
    """
    first = max(len(window.steps.number) - PACE_STEPS_MAX, 0)
    compute, seconds = window.steps.values["train_compute_seconds"], window.steps.values.get("train_step_seconds")
    slow = compute[first:, index].copy()
    slow[: max(onset - first, 0)] *= centre
    latest = _latest(window, onset, index, centre, peers, first)
    longer = np.maximum(slow, latest) - np.maximum(slow / centre, latest)
    steps = seconds[first:, index] if seconds is not None else np.full_like(slow, np.nan)
    steps = np.where(np.isfinite(steps), np.maximum(steps, slow), slow)
    seen = np.isfinite(longer) & np.isfinite(steps)
    excess_s, step_s = float(longer[seen].sum()), float(steps[seen].sum())
    return excess_s / (step_s - excess_s) if step_s > excess_s else 0.0


def cost_since(
    window: Window, onset: int, index: int, centre: float, peers: Integers, expected: float
) -> Slowness | None:
    """Return by what share the job's steps are longer, at most ``expected``: a stage with time to spare costs less.

    By the job's pace, or step by step where these show more: steps of uneven length hide it from the pace. None if the
    time before the onset is not in view: then the expected cost applies.
    """
    cost = cost_by_pace(window, onset, expected)
    if cost is None or cost.ratio >= expected:
        return cost
    by_step = _cost_by_step(window, onset, index, centre, peers)
    return Slowness(min(by_step, expected), measured=True) if by_step > max(cost.ratio, PACE_NOTED) else cost


def cost_by_pace(window: Window, onset: int, expected: float) -> Slowness | None:
    """Return the cost by the medians of the steps before the onset and since.

    None if the time before the onset is not in view: then the expected cost applies. A measured cost of zero requires a
    pace even enough to show the expected one.
    """
    seconds = window.steps.values.get("train_step_seconds")
    begin = max(onset - PACE_STEPS_MAX, settled_line(window))
    if seconds is None or onset - begin < PACE_STEPS_BEFORE or len(seconds) - onset < STEPS_MIN:
        return None
    steps = seconds[begin:, :: max(seconds.shape[1] // PEERS_SAMPLED, 1)]
    first = onset - begin
    before, after = _median_of(steps[:first]), _median_of(steps[first:])
    paces = median_over_rows(steps[:first].T)
    noise = SIGMA_PER_MAD * _median_of(np.abs(paces - _median_of(paces)))
    error = noise / before * math.sqrt(1 / first + 1 / (len(steps) - first))
    growth = after / before - 1
    if growth >= max(PACE_NOTED, PACE_SIGMAS * error):
        return Slowness(min(growth, expected), measured=True)
    return Slowness(0.0, measured=growth + PACE_SIGMAS * error < expected)


def _cost_by_step(window: Window, onset: int, index: int, centre: float, peers: Integers) -> float:
    """Return by what share the steps are longer that waited for a rank, step by step; 0 if they do not show it.

    Where each step has other work its length says little, but what is left of it after the latest of the other nodes'
    ranks has computed is even: this time is longer by as much as the rank computes longer than they do, and only in
    the steps in which it does, or no step waits for it.
    """
    first = max(onset - PACE_STEPS_MAX, len(window.steps.number) - WAITS_STEPS_MAX, 0)
    seconds = window.steps.values.get("train_step_seconds")
    if seconds is None:
        return 0.0
    step_s = median_over_rows(seconds[first:, :: max(seconds.shape[1] // PEERS_SAMPLED, 1)].T)
    own_s = window.steps.values["train_compute_seconds"][first:, index]
    latest_s = _latest(window, onset, index, centre, peers, first)
    rest_s, longer_s = step_s - latest_s, np.maximum(own_s - latest_s, 0.0)
    seen, since = np.isfinite(rest_s) & np.isfinite(own_s) & (latest_s > 0), np.arange(len(step_s)) >= onset - first
    usual_s, waits = rest_s[seen & (longer_s == 0)], seen & since & (longer_s > 0)
    if len(usual_s) < PACE_STEPS_BEFORE or int(waits.sum()) < WAITS_MIN:
        return 0.0
    base_s, count = median_of(usual_s), int(waits.sum())
    noise_s = SIGMA_PER_MAD * median_of(np.abs(usual_s - base_s))
    shown_s = float(np.minimum(rest_s[waits] - base_s, longer_s[waits]).sum())
    error_s = noise_s * math.sqrt(count + count**2 / len(usual_s))
    whole_s = float(step_s[seen & since].sum())
    shows = shown_s >= max(PACE_SIGMAS * error_s, WAITS_SHARE * float(longer_s[waits].sum()))
    return shown_s / (whole_s - shown_s) if shows and whole_s > shown_s else 0.0


def _latest(window: Window, onset: int, index: int, centre: float, peers: Integers, first: int) -> Floats:
    """Return how long the latest of a rank's peers on other nodes computes, by step line from ``first`` on.

    Without those that are about equally slow since the onset.
    """
    others = peers[window.node_of[peers] != window.node_of[index]]
    usual = trimmed_means(window.steps.relative_compute[max(onset, first) :, others]) < 1 + ONSET_MARGIN * (centre - 1)
    latest: Floats = np.fmax.reduce(
        window.steps.values["train_compute_seconds"][first:, others[usual]], axis=1, initial=0.0
    )
    return latest


def _median_of(values: Floats) -> float:
    return median_of(values[np.isfinite(values)])
