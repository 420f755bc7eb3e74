"""Change-point detection: where a series left its level. Pure functions over one series, with bounded cost."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.types import Floats

LENGTH_MAX = 512  # values examined, newest last
HAZARD = 1 / 250  # prior probability of a change at any one value: one in some hundreds of steps
NEGLIGIBLE = 1e-7  # less likely run lengths are dropped, which bounds the cost per value
# Prior of a run's mean and variance, in units of the series' own noise: anywhere within some ten sigmas around zero.
PRIOR_KAPPA, PRIOR_ALPHA, PRIOR_BETA = 0.02, 2.0, 2.0


class RunLengths(NamedTuple):
    """The posterior of the time since the newest change: ``length`` (A,) values since, ``mass`` (A,) sums to one.

    A length equal to the number of values examined means that there was no change among them.
    """

    length: NDArray[np.intp]
    mass: Floats

    def within(self, least: int, most: int) -> float:
        """Return the probability that the newest change was at least ``least`` and at most ``most`` values ago."""
        return float(self.mass[(self.length >= least) & (self.length <= most)].sum())


def run_lengths(values: Floats, hazard: float = HAZARD) -> RunLengths:
    """Return the posterior of the run length at the end of (n,) standardised values.

    Bayesian online change-point detection (Adams & MacKay, 2007) with a normal-gamma prior, so that a run predicts
    by Student's t. ``values`` are in units of the series' noise around its usual level, without NaN. Costs about n
    times the number of plausible run lengths.
    """
    series = np.asarray(values[-LENGTH_MAX:], dtype=np.float64)
    table = _LOG_NORM
    length = np.zeros(1, dtype=np.intp)
    log_mass = np.zeros(1)
    mean, beta = np.zeros(1), np.full(1, PRIOR_BETA)
    stay, leave, floor = math.log1p(-hazard), math.log(hazard), math.log(NEGLIGIBLE)
    for value in series:
        kappa, alpha = PRIOR_KAPPA + length, PRIOR_ALPHA + 0.5 * length
        width = beta * (kappa + 1) / (alpha * kappa)
        off = value - mean
        log_density = table[length] - 0.5 * np.log(width) - (alpha + 0.5) * np.log1p(off * off / (2 * alpha * width))
        grown = log_mass + log_density + stay
        # A change just before this value: it starts a run that knows only the prior.
        fresh = _log_sum(log_mass) + leave + _fresh_log_density(float(value))
        beta_grown = beta + kappa * off * off / (2 * (kappa + 1))
        mean_grown = mean + off / (kappa + 1)
        first_beta = PRIOR_BETA + PRIOR_KAPPA * value * value / (2 * (PRIOR_KAPPA + 1))
        length = np.concatenate([[1], length + 1])
        log_mass = np.concatenate([[fresh], grown])
        mean = np.concatenate([[value / (PRIOR_KAPPA + 1)], mean_grown])
        beta = np.concatenate([[first_beta], beta_grown])
        log_mass -= _log_sum(log_mass)
        kept = log_mass > floor
        length, log_mass, mean, beta = length[kept], log_mass[kept], mean[kept], beta[kept]
    return RunLengths(length, np.exp(log_mass))


def cusum(values: Floats, slack: float) -> Floats:
    """Return Page's cumulative sum (1954) over (n,) values: s = max(0, s + value - slack), upwards only."""
    total = np.cumsum(np.asarray(values, dtype=np.float64) - slack)
    return np.asarray(total - np.minimum.accumulate(np.minimum(total, 0.0)))


def excursion_start(statistic: Floats) -> int:
    """Return the value since which a cumulative sum has been above zero: the estimate of the change point."""
    zeros = np.flatnonzero(statistic <= 0)
    return int(zeros[-1]) + 1 if len(zeros) else 0


def smoothed(values: Floats, width: int) -> Floats:
    """Return running medians over ``width`` (odd) values: (n - width + 1,), without single outliers."""
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(values, width), axis=1))


def _log_sum(log_mass: Floats) -> float:
    top = float(log_mass.max())
    return top + math.log(float(np.exp(log_mass - top).sum()))


def _log_norm(length: int) -> float:
    """Return the logarithm of the normalising constant of Student's t for a run of this length, without its width."""
    alpha = PRIOR_ALPHA + 0.5 * length
    return math.lgamma(alpha + 0.5) - math.lgamma(alpha) - 0.5 * math.log(2 * math.pi * alpha)


def _fresh_log_density(value: float) -> float:
    width = PRIOR_BETA * (PRIOR_KAPPA + 1) / (PRIOR_ALPHA * PRIOR_KAPPA)
    tail = (PRIOR_ALPHA + 0.5) * math.log1p(value * value / (2 * PRIOR_ALPHA * width))
    return float(_LOG_NORM[0]) - 0.5 * math.log(width) - tail


_LOG_NORM = np.array([_log_norm(length) for length in range(LENGTH_MAX + 1)])
