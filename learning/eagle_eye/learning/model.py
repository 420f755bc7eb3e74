"""Makes a model from history: fitting, checking on held-out data, and whether it may replace another.

History has three parts. Models of the first and of the second part score each other's part, which shows how unseen
healthy nodes score; the model of both gets that scale and is checked on the third. With enough nodes the parts are
different nodes, so that a new node is judged fairly; with fewer they are different times.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any, NamedTuple

import numpy as np

from eagle_eye.detectors.signs.learned_features import Metric
from eagle_eye.detectors.signs.learned_model import SCORES, LearnedModel, ScoreTail, magnitudes, placed, standardised
from eagle_eye.detectors.types import Floats, Integers
from eagle_eye.learning import autoencoder, covariance, forest
from eagle_eye.learning.calibration import ALARMS_PER_NODE_DAY, lasting, peaks, poisson_at_most, tail
from eagle_eye.learning.features import HealthyHistory, NoHistory, observed

OBSERVED_RATIO = 0.8  # of the looks in which a metric must be there to be learned
METRICS_MIN = 2
FIRST, SECOND, CHECK = 0, 1, 2
SHARES = (0.4, 0.8)  # where the parts end
NODES_MIN = 10  # from here on the parts are of different nodes
SCALE_QUANTILE = 0.975  # what healthy nodes reach now and then counts as ordinary...
SCALE_SIGMAS = 1.96
SCALE_FLOORS = (1.0, 1.0, 0.3)  # ...and nothing below a grain (a factor of 1.35 in spread) is ever odd
NODE_SIGMAS = 3.09  # 1 in 1,000 nodes: how far out the level of the few nodes that were seen must be extrapolated
LOOKS_MIN = 500  # to fit; fewer cannot show how metrics hang together
CHECK_ALARMS = 5.0  # how many alarms the check lets one expect, so that there is something to count
CHECK_CONFIDENCE = 0.99


class HealthyCheck(NamedTuple):
    """A model's results on healthy nodes that it had not seen."""

    node_days: float
    alarms_per_node_day: float  # the rate it was set to
    expected: float
    seen: int
    at_default: int  # alarms at one in 1,000 node-days

    @property
    def passed(self) -> bool:
        """Whether no more healthy nodes were flagged than promised."""
        return self.seen <= poisson_at_most(max(self.expected, 0.1), CHECK_CONFIDENCE) and self.at_default <= 1


def make(history: HealthyHistory, seed: int, epochs: int = autoencoder.EPOCHS) -> tuple[LearnedModel, HealthyCheck]:
    """Return a model of the history's nodes and its check on the held-out part. Raises NoHistory, TooShort."""
    metrics = observed(history, OBSERVED_RATIO)
    if len(metrics) < METRICS_MIN:
        raise NoHistory(f"{len(metrics)} metrics are observed in most looks; {METRICS_MIN} are needed")
    part, features = parts(history, seed), history.narrowed(metrics)
    if min(int((part == FIRST).sum()), int((part == SECOND).sum())) < LOOKS_MIN:
        raise NoHistory(
            f"{len(features)} looks at healthy nodes ({history.node_days:.2f} node-days);"
            f" at least {math.ceil(LOOKS_MIN / SHARES[0])} are needed"
        )
    # Each half is judged by a model of the other half: a model knows the data it was fitted on too well.
    scores = np.full((len(SCORES), len(features)), np.nan)
    for fitted, judged in ((FIRST, SECOND), (SECOND, FIRST)):
        half = _fitted(history, metrics, features, part == fitted, seed, epochs)
        scores[:, part == judged] = _lasting_scores(half, history, features, part == judged)
    known = part != CHECK
    whole = _fitted(history, metrics, features, known, seed, epochs)
    model = dataclasses.replace(whole, tails=_tails(history, scores[:, known], known))
    return model, check(model, history, part == CHECK)


def _fitted(
    history: HealthyHistory, metrics: tuple[Metric, ...], features: Floats, chosen: Any, seed: int, epochs: int
) -> LearnedModel:
    """Return a model fitted on the chosen looks, whose scores have no scale yet."""
    fit = features[chosen]
    centre, scale = scaling(fit, len(np.unique(history.node[chosen])))
    inputs = standardised(fit, centre, scale)
    return LearnedModel(
        view=dataclasses.replace(history.shape.view, metrics=metrics),
        looks=history.shape.looks,
        interval_s=history.shape.interval_s,
        gpus_per_node=history.gpus_per_node,
        power_limits_watts=history.power_limits_watts,
        gpu_models=history.gpu_models,
        centre=centre,
        scale=scale,
        layers=autoencoder.exported(autoencoder.train(inputs, seed, epochs)),
        forest=forest.exported(forest.grow(magnitudes(inputs), seed)),
        covariance=covariance.fit(placed(inputs), seed),
        tails=(ScoreTail(0.0, 1.0, 0.0, 1.0),) * 3,
        node_days=history.node_days,
        from_s=float(history.times_s.min()),
        until_s=float(history.times_s.max()),
        digest="",
    )


def parts(history: HealthyHistory, seed: int) -> Integers:
    """Return which part each look belongs to."""
    if len(history.nodes) >= NODES_MIN:
        # By name, so that a node stays in its part from one training to the next.
        draw = np.array([zlib.crc32(f"{seed}/{name}".encode()) for name in history.nodes])
        rank = np.argsort(np.argsort(draw, kind="stable"), kind="stable") / len(history.nodes)
        place = rank[history.node]
    else:
        place = np.argsort(np.argsort(history.times_s, kind="stable"), kind="stable") / len(history.times_s)
    return np.digitize(place, SHARES)


def scaling(features: Floats, nodes: int) -> tuple[Floats, Floats]:
    """Return what is ordinary, and how far healthy nodes are from it: (metrics, 3) each.

    A node keeps its level: of a few nodes, however long they were watched, one knows the spread of levels only
    roughly, and widens it as Student's distribution does (Hill's expansion, two terms).
    """
    low, centre, high = np.nanquantile(
        features, (1 - SCALE_QUANTILE, 0.5, SCALE_QUANTILE), axis=0, method="nearest", keepdims=False
    )
    spread = np.maximum(high - centre, centre - low) / SCALE_SIGMAS
    freedom, z = max(nodes - 1, 1), NODE_SIGMAS
    spread[:, 0] *= 1 + (z**2 + 1) / (4 * freedom) + (5 * z**4 + 16 * z**2 + 3) / (96 * freedom**2)
    scale = np.maximum(np.nan_to_num(spread), np.array(SCALE_FLOORS))
    return np.nan_to_num(centre).astype(np.float32), scale.astype(np.float32)


def check(model: LearnedModel, history: HealthyHistory, chosen: Any) -> HealthyCheck:
    """Return how the model does on the chosen looks of healthy nodes. Raises KeyError where metrics are missing."""
    scores = _lasting_scores(model, history, history.narrowed(model.view.metrics), chosen)
    known = np.isfinite(scores).all(axis=0)
    series, number = _series(history)[chosen][known], history.number[chosen][known]
    rates = model.alarms_per_node_day(scores[:, known])
    node_days = int(known.sum()) * model.view.span_s / 86_400
    limit = max(CHECK_ALARMS / max(node_days, 1e-9), ALARMS_PER_NODE_DAY)
    limit = min(limit, 0.5 * min(t.peaks_per_node_day for t in model.tails))  # below the threshold nothing is known
    return HealthyCheck(
        node_days=node_days,
        alarms_per_node_day=limit,
        expected=limit * node_days,
        seen=len(peaks(-rates, series, number, -limit)[0]),
        at_default=len(peaks(-rates, series, number, -ALARMS_PER_NODE_DAY)[0]),
    )


def no_worse(new: HealthyCheck, old: HealthyCheck) -> bool:
    """Whether a new model flags no more healthy nodes than the old one, except by chance."""
    allowed = poisson_at_most(max(float(old.seen), new.expected, 0.1), CHECK_CONFIDENCE)
    return new.passed and new.seen <= allowed and new.at_default <= max(old.at_default, 1)


def _tails(history: HealthyHistory, scores: Floats, chosen: Any) -> tuple[ScoreTail, ScoreTail, ScoreTail]:
    series, number = _series(history)[chosen], history.number[chosen]
    node = np.arange(int(series.max()) + 1) % len(history.nodes)
    look_s = history.shape.view.span_s
    first, second, third = (tail(row, series, number, look_s, node) for row in scores)
    return first, second, third


def _series(history: HealthyHistory) -> Integers:
    """Return what the looks that follow each other share: their run and node, as one number (W,)."""
    series: Integers = history.run * len(history.nodes) + history.node
    return series


def _lasting_scores(model: LearnedModel, history: HealthyHistory, features: Floats, chosen: Any) -> Floats:
    """Return the lowest of each score over the spans that a claim needs, of the chosen looks: (3, n)."""
    series, number = _series(history)[chosen], history.number[chosen]
    scores = model.scores(model.inputs(features[chosen]))
    return np.stack([lasting(row, series, number, model.looks) for row in scores])
