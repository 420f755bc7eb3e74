"""A single machine against its own past, where there are no peers: which metrics are not what the others make expected.

Each metric is predicted from all the others now and from the machine's recent course (exponential means over a few
spans), by the one linear fit that a covariance's inverse holds for all metrics at once: the residual of metric j is
(P z)_j / P_jj with P the precision matrix. A residual counts in units of what the metric's residuals reach once in a
thousand moments of the past, so that a metric which is hard to predict is not forever strange, and is capped, so that
one metric alone is not everything. Chosen on halves of training series with faults put into them, where a denoising
autoencoder, nearest neighbours and the distance from the ordinary did worse, also in addition. Causal: a score
depends on nothing after its moment. Cannot see: what had been so during training; a drift slower than the longest span.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from eagle_eye.detectors.types import Floats

CLIP_SIGMAS = 10.0
SPREAD_FLOOR = 1e-3  # of metrics that lie in [0, 1]: constant ones may move by a sensor's grain
TAILS = (0.005, 0.5, 0.995)  # quantiles that make a metric's scale: robust, and not blind to rare work
TAIL_SIGMAS = 5.15  # between the outer two, of a normal distribution
SPANS = (2.0, 10.0, 60.0)  # moments, of the means of the recent course
RIDGE = 0.01  # added to the covariance, in variances
RESIDUAL_QUANTILE, RESIDUAL_SIGMAS = 0.999, 2.58
RESIDUAL_FLOOR = 0.05
RESIDUAL_CAP = 10.0
SMOOTHED = 3.0  # moments that a score is averaged over: a fault lasts longer than a sample


@dataclass(slots=True)
class ExpectedMetrics:
    """Scores how unlike a machine's own past each moment is; the same series give the same scores."""

    name: str = "metrics from the others and the recent course"
    _centre: Floats = field(default_factory=lambda: np.zeros(0))
    _scale: Floats = field(default_factory=lambda: np.ones(0))
    _mean: Floats = field(default_factory=lambda: np.zeros(0))
    _weights: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    _ordinary: Floats = field(default_factory=lambda: np.ones(0))

    def fit(self, train: Floats) -> None:
        """Learn from (T, M) values of healthy, or mostly healthy, operation, a moment a row."""
        low, self._centre, high = np.quantile(np.asarray(train, np.float64), TAILS, axis=0)
        self._scale = np.maximum((high - low) / TAIL_SIGMAS, SPREAD_FLOOR)
        metrics = train.shape[1]
        seen = self._seen(train)
        self._mean = seen.mean(axis=0)
        precision = np.linalg.inv(np.cov((seen - self._mean).T) + RIDGE * np.eye(seen.shape[1]))
        self._weights = precision[:, :metrics] / np.diag(precision)[:metrics]
        away = np.abs((seen - self._mean) @ self._weights)
        self._ordinary = np.maximum(np.quantile(away, RESIDUAL_QUANTILE, axis=0) / RESIDUAL_SIGMAS, RESIDUAL_FLOOR)

    def score(self, test: Floats) -> Floats:
        """Return (T,) scores, the higher the stranger, of (T, M) values that begin anywhere."""
        strange = np.minimum(self.residuals(test), RESIDUAL_CAP)
        return course(np.log1p((strange**2).mean(axis=1))[:, None], SMOOTHED)[:, 0]

    def residuals(self, values: Floats) -> Floats:
        """Return (T, M): how far each metric is from what the others make expected, 1 is ordinary."""
        found: Floats = np.abs((self._seen(values) - self._mean) @ self._weights) / self._ordinary
        return found

    def _seen(self, values: Floats) -> Floats:
        """Return what predictions are made from: (T, M * (1 + spans)), the metrics themselves first."""
        z = np.clip((np.asarray(values, np.float64) - self._centre) / self._scale, -CLIP_SIGMAS, CLIP_SIGMAS)
        before = [np.concatenate([z[:1], course(z, span)[:-1]]) for span in SPANS]
        return np.concatenate([z, *before], axis=1)


def course(values: Floats, span: float) -> Floats:
    """Return the exponential mean over about ``span`` rows of (T, M), row by row, from the first row on."""
    weight = 2 / (span + 1)
    result = np.empty_like(values, dtype=np.float64)
    level = np.array(values[0], np.float64) if len(values) else np.zeros(0)
    for row, value in enumerate(values):
        level = level + weight * (value - level)
        result[row] = level
    return result
