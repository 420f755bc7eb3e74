"""Bayesian online change point detection (Adams & MacKay, arXiv 0710.3742, 2007) of normal data."""

from __future__ import annotations

from dataclasses import dataclass
from math import lgamma
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.detection.matrix import Floats

NEGLIGIBLE = 1e-8  # run lengths less likely than this are forgotten


class Change(NamedTuple):
    """A change point: known at sample ``found``, the first of the new run being ``began``."""

    found: int
    began: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bocd:
    """Run-length posterior under a constant hazard, with a normal-inverse-gamma prior over mean and variance.

    Samples are divided by the median of the first ten, so that the prior is free of units: mean 1, worth a tenth of a
    sample, and a standard deviation of about 2%.
    """

    hazard: float = 1 / 250  # as in Adams & MacKay's examples
    likelihood: float = 0.9
    kappa0: float = 0.1
    alpha0: float = 1.0
    beta0: float = 4e-4

    def changes(self, samples: Floats) -> list[Change]:
        """Return the change points of (K,) finite positive samples, in order.

        A change is known once the runs that began after the last change hold ``likelihood`` of the posterior.
        """
        if len(samples) == 0:
            return []
        scaled = np.asarray(samples, dtype=np.float64) / max(float(np.median(samples[:10])), 1e-12)
        starts = np.zeros(1, dtype=np.int64)  # where each hypothesis' run began
        mass = np.ones(1)
        kappa, alpha = np.array([self.kappa0]), np.array([self.alpha0])
        mean, beta = np.ones(1), np.array([self.beta0])
        current, found = 0, []
        for index, value in enumerate(scaled):
            likely = np.exp(_student(value, mean, kappa, alpha, beta))
            grown = mass * likely * (1 - self.hazard)
            fresh = float((mass * likely).sum()) * self.hazard
            beta = beta + kappa * (value - mean) ** 2 / (2 * (kappa + 1))
            mean = (kappa * mean + value) / (kappa + 1)
            kappa, alpha = kappa + 1, alpha + 0.5
            # The new hypothesis: the next sample begins a run, about which only the prior is known.
            mass = np.append(grown, fresh)
            mass /= max(float(mass.sum()), 1e-300)
            starts = np.append(starts, index + 1)
            mean, beta = np.append(mean, 1.0), np.append(beta, self.beta0)
            kappa, alpha = np.append(kappa, self.kappa0), np.append(alpha, self.alpha0)
            keep = mass > NEGLIGIBLE
            keep[-1] = True
            mass, starts = mass[keep], starts[keep]
            mean, beta, kappa, alpha = mean[keep], beta[keep], kappa[keep], alpha[keep]
            later = (starts > current) & (starts <= index)
            if float(mass[later].sum()) >= self.likelihood:
                current = int(starts[later][np.argmax(mass[later])])
                found.append(Change(index, current))
        return found


_lgamma = np.vectorize(lgamma, otypes=[float])


def _student(value: float, mean: Floats, kappa: Floats, alpha: Floats, beta: Floats) -> NDArray[np.float64]:
    """Return the log density of ``value`` under each hypothesis' predictive Student t distribution."""
    scale2 = beta * (kappa + 1) / (alpha * kappa)
    z2 = (value - mean) ** 2 / scale2
    constant = _lgamma(alpha + 0.5) - _lgamma(alpha) - 0.5 * np.log(2 * np.pi * alpha * scale2)
    return np.asarray(constant - (alpha + 0.5) * np.log1p(z2 / (2 * alpha)))
