"""A model of a site's healthy nodes as plain arrays, with just what a detector needs to score nodes.

Three views of the same features, each with its own score: the reconstruction error of an autoencoder (Sakurada & Yairi
2014), the isolation depth in an isolation forest (Liu, Ting & Zhou 2008), and the distance under a robust covariance
(Rousseeuw & Van Driessen 1999). Raw scores are not comparable; ``ScoreTail`` converts a score into the rate at which
healthy nodes reach it, in alarms per node-day, which is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eagle_eye.detectors.signs.learned_features import FEATURES, View
from eagle_eye.detectors.types import Floats, Integers

CLIP = 10.0  # robust standard deviations at which a feature is clipped, so that one does not dominate
AGREEING = 2  # of the three scores that must exceed a threshold
SCORES = ("autoencoder", "forest", "covariance")


class AutoencoderLayer(NamedTuple):
    """One layer of the autoencoder: ``weight`` (out, in), ``bias`` (out,)."""

    weight: Floats
    bias: Floats


class Forest(NamedTuple):
    """An isolation forest as arrays over all trees' nodes.

    A leaf points at itself; ``path`` is a leaf's depth plus the expected depth of its samples, 0 elsewhere; ``roots``
    has one entry per tree; ``normal`` is the mean path of a search tree of the training sample.
    """

    feature: Integers
    threshold: Floats
    left: Integers
    right: Integers
    path: Floats
    roots: Integers
    depth: int
    normal: float


class Covariance(NamedTuple):
    """A robust location (D,) and precision (D, D) of levels and changes."""

    location: Floats
    precision: Floats


class ScoreTail(NamedTuple):
    """The tail of healthy scores: peaks above ``threshold`` follow a generalised Pareto distribution (Siffer 2017).

    A peak is the maximum of a run of scores above the threshold of one node, so that one anomaly counts once.
    """

    threshold: float
    scale: float
    shape: float  # never below 0: a history is too short to show that scores are bounded
    peaks_per_node_day: float

    def alarms_per_node_day(self, scores: Floats) -> Floats:
        """Return how often healthy nodes reach a score: at most the rate of peaks, and never underestimated.

        Below the threshold the result is the rate of peaks, which is too low, but no alarm is raised there anyway.
        """
        excess = np.maximum(np.asarray(scores, np.float64) - self.threshold, 0.0) / self.scale
        if self.shape < 1e-6:
            return self.peaks_per_node_day * np.exp(-excess)
        return self.peaks_per_node_day * (1 + self.shape * excess) ** (-1 / self.shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LearnedModel:
    """The trained model, and the data it applies to: not for windows with other metrics, intervals or hardware.

    ``centre`` and ``scale`` (metrics, 3) standardise a feature to 0 and 1. A claim needs ``looks`` consecutive spans.
    ``digest`` identifies the whole model; two models with the same digest are equal.
    """

    view: View
    looks: int
    interval_s: float
    gpus_per_node: tuple[int, ...]
    power_limits_watts: tuple[float, ...]
    gpu_models: tuple[str, ...]
    centre: Floats
    scale: Floats
    layers: tuple[AutoencoderLayer, ...]
    forest: Forest
    covariance: Covariance
    tails: tuple[ScoreTail, ScoreTail, ScoreTail]
    node_days: float
    from_s: float
    until_s: float
    digest: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LearnedModel) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def inputs(self, features: Floats) -> Floats:
        """Return features (N, metrics, 3) as model inputs: (N, metrics * 3), NaN if not observed."""
        return standardised(features, self.centre, self.scale)

    def residuals(self, inputs: Floats) -> Floats:
        """Return the squared reconstruction error of the autoencoder: (N, metrics * 3), 0 if not observed."""
        known = np.isfinite(inputs)
        filled = np.where(known, inputs, 0.0)
        return np.where(known, (filled - forward(self.layers, filled)) ** 2, 0.0)

    def autoencoder_scores(self, inputs: Floats) -> Floats:
        """Return the logarithm of the mean squared residual, from 0: (N,)."""
        count = np.maximum(np.isfinite(inputs).sum(axis=1), 1)
        score: Floats = np.log1p(self.residuals(inputs).sum(axis=1) / count)
        return score

    def forest_scores(self, inputs: Floats) -> Floats:
        """Return how early the forest isolates each node, 0 to 1: (N,)."""
        return isolation(self.forest, magnitudes(inputs))

    def covariance_scores(self, inputs: Floats) -> Floats:
        """Return the logarithm of the mean squared robust distance, from 0: (N,)."""
        return distances(self.covariance, inputs)

    def scores(self, inputs: Floats, limit: float | None = None) -> Floats:
        """Return all three scores: (3, N).

        With ``limit`` the forest, which costs most, is evaluated only if another score is as rare as that many alarms
        per node-day: otherwise no two can agree, and its score is -inf.
        """
        found = np.full((len(SCORES), len(inputs)), -np.inf)
        found[0], found[2] = self.autoencoder_scores(inputs), self.covariance_scores(inputs)
        asked = np.arange(len(inputs)) if limit is None else np.flatnonzero(self._rates(found).min(axis=0) <= limit)
        if len(asked):
            found[1, asked] = self.forest_scores(inputs[asked])
        return found

    def alarms_per_node_day(self, scores: Floats) -> Floats:
        """Return how often healthy nodes score as high as each of (3, N): (N,).

        Two of the three must agree, so the second lowest rate counts; any two agreeing by chance is at most 3/2 times
        as likely.
        """
        rates: Floats = (len(SCORES) / AGREEING) * np.sort(self._rates(scores), axis=0)[AGREEING - 1]
        return rates

    def _rates(self, scores: Floats) -> Floats:
        return np.stack([tail.alarms_per_node_day(row) for tail, row in zip(self.tails, scores, strict=True)])


def standardised(features: Floats, centre: Floats, scale: Floats) -> Floats:
    """Return (N, metrics, 3) in robust standard deviations: (N, metrics * 3), float32."""
    inputs: Floats = np.clip((features - centre) / scale, -CLIP, CLIP)
    flat: Floats = inputs.reshape(len(features), centre.size).astype(np.float32, copy=False)
    return flat


def forward(layers: tuple[AutoencoderLayer, ...], inputs: Floats) -> Floats:
    """Return the autoencoder's reconstruction: tanh between the layers, none after the last."""
    value = inputs
    for place, layer in enumerate(layers):
        value = value @ layer.weight.T + layer.bias
        if place + 1 < len(layers):
            value = np.tanh(value)
    return value


def magnitudes(inputs: Floats) -> Floats:
    """Return how odd each metric is: (N, metrics), float32; 0 if not observed."""
    filled = np.where(np.isfinite(inputs), inputs, 0.0).reshape(len(inputs), -1, len(FEATURES))
    magnitude: Floats = np.sqrt((filled**2).sum(axis=2)).astype(np.float32)
    return magnitude


def isolation(forest: Forest, values: Floats) -> Floats:
    """Return the anomaly score of Liu et al. for (N, metrics): 2 ** (-mean path / normal)."""
    at = np.broadcast_to(forest.roots, (len(values), len(forest.roots)))
    rows = np.arange(len(values))[:, None]
    for _ in range(forest.depth):
        below = values[rows, forest.feature[at]] <= forest.threshold[at]
        at = np.where(below, forest.left[at], forest.right[at])
    mean: Floats = forest.path[at].mean(axis=1)
    score: Floats = np.exp2(-mean / forest.normal)
    return score


def placed(inputs: Floats) -> Floats:
    """Return levels and changes only, with unobserved values at their normal position: (N, metrics * 2)."""
    shaped = np.where(np.isfinite(inputs), inputs, 0.0).reshape(len(inputs), -1, len(FEATURES))
    return shaped[:, :, :2].reshape(len(inputs), -1)


def distances(covariance: Covariance, inputs: Floats) -> Floats:
    """Return the logarithm of the mean squared robust distance of (N, metrics * 3)."""
    away = placed(inputs) - covariance.location
    square = np.einsum("ij,ij->i", away @ covariance.precision, away)
    score: Floats = np.log1p(np.maximum(square, 0.0) / away.shape[1])
    return score
