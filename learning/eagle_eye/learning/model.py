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
from eagle_eye.learning import learners
from eagle_eye.learning.features import HealthyHistory, NoHistory, observed

# Scores become alarms per node-day by the tail of healthy scores, which is fitted by extreme value theory,
# conservatively. Peaks over a threshold follow a generalised Pareto distribution (Pickands 1975; used so for anomaly
# scores by Siffer et al., SPOT, KDD 2017). A run of scores above the threshold counts as one peak (Coles 2001, section
# 5.3.2), since one anomaly makes one alarm. Healthy history is never entirely healthy: the highest peaks are censored
# ("at least this high"), so that a fault among them does not stretch the tail, and none is dropped, so that the tail is
# not cut. Of all tails consistent with the peaks the one with the most alarms is taken.

QUANTILES = (0.98, 0.95, 0.90, 0.80)  # of all scores; the first with enough peaks above it is the threshold
PEAKS_MIN = 20  # fewer do not determine a tail's shape
RUN_GAP = 5  # looks below the threshold that end a run
CENSORED_RATIO = 0.1  # of the peaks, the highest: at least this high
ALARMS_PER_NODE_DAY = 1e-3  # where the tail is made safe: the default of learned_alarms_per_1000_node_days
LIKELIHOOD_DROP = 1.35  # below the best: a one-sided 95% bound by the profile likelihood
# Scores are logarithms of squared distances: a tail of distances as heavy as any power law is exponential in them,
# shape 0. Some allowance on top; more would let twenty peaks stretch to anywhere.
SHAPE_MAX = 0.1
SHAPES, SCALES = 11, 81  # of the grid of tails


class TooShort(ValueError):
    """The history has too few peaks to estimate how often a score occurs by chance."""


def lasting(scores: Floats, series: Integers, number: Integers, looks: int) -> Floats:
    """Return for each look the lowest of its series' last ``looks`` scores, NaN where some are missing.

    ``series`` (W,) names what a look belongs to, ``number`` (W,) its place in time.
    """
    order = np.lexsort((number, series))
    value, who, when = scores[order], series[order], number[order]
    lowest = value.astype(np.float64)
    for back in range(1, looks):
        before = np.full(len(value), np.nan)
        follows = (who[back:] == who[:-back]) & (when[back:] == when[:-back] + back)
        before[back:] = np.where(follows, value[:-back], np.nan)
        lowest = np.minimum(lowest, before)
    result = np.empty_like(lowest)
    result[order] = lowest
    return result


def peaks(scores: Floats, series: Integers, number: Integers, threshold: float) -> tuple[Floats, Integers]:
    """Return the highest score of each run above the threshold, and whose run it was."""
    above = np.flatnonzero(scores > threshold)
    above = above[np.lexsort((number[above], series[above]))]
    if len(above) == 0:
        return np.zeros(0), np.zeros(0, np.intp)
    who, when = series[above], number[above]
    begins = np.flatnonzero(np.concatenate([[True], (who[1:] != who[:-1]) | (when[1:] - when[:-1] > RUN_GAP)]))
    highest: Floats = np.maximum.reduceat(scores[above].astype(np.float64), begins)
    return highest, who[begins]


def tail(
    scores: Floats,
    series: Integers,
    number: Integers,
    look_s: float,
    node: Integers | None = None,
    safe_at: float = ALARMS_PER_NODE_DAY,
) -> ScoreTail:
    """Return the tail of scores of looks that each stand for ``look_s``; NaN scores do not count. Raises TooShort.

    ``node`` (series,) tells whose a series is: a node that is a little odd is so all day, so that its peaks are less
    evidence of other nodes than as many of different ones; None where the one node is all that will be judged.
    The tail is safe around ``safe_at`` alarms per node-day.
    """
    known = np.isfinite(scores)
    scores, series, number = scores[known], series[known], number[known]
    node_days = len(scores) * look_s / 86_400
    found: Floats = np.zeros(0)
    whose: Integers = np.zeros(0, np.intp)
    threshold = 0.0
    for quantile in QUANTILES:
        if len(scores):
            threshold = float(np.quantile(scores, quantile))
            found, whose = peaks(scores, series, number, threshold)
        if len(found) >= PEAKS_MIN:
            break
    else:
        raise TooShort(
            f"{len(found)} peaks in {node_days:.2f} healthy node-days, {PEAKS_MIN} are needed to tell how often a score"
            " comes up by chance: take a longer history or more nodes"
        )
    error, independent = math.sqrt(len(found)), 1.0
    if node is not None:
        counts = np.bincount(node[whose], minlength=int(node.max()) + 1)[np.unique(node[series])]
        error = max(error, float(counts.std(ddof=1)) * math.sqrt(len(counts)) if len(counts) > 1 else 0.0)
        independent = independence(found, node[whose])
    # One-sided 95% bound of the rate, its error from how the nodes differ and at least that of a Poisson count.
    rate = (len(found) + 1.645 * error + 1) / node_days
    return _safe_tail(found - threshold, threshold, rate, max(rate / safe_at, 1.0), independent)


def independence(values: Floats, groups: Integers) -> float:
    """Return what share of the values counts as independent: those of a group are alike (Kish's design effect)."""
    sizes = np.bincount(groups)
    sizes = sizes[sizes > 0]
    within = len(values) - len(sizes)
    if len(sizes) < 2 or within < 1:
        return 1.0 if within < 1 else 1 / len(values)
    means = np.bincount(groups, values)[np.unique(groups)] / sizes
    position = np.searchsorted(np.unique(groups), groups)
    inner = float(((values - means[position]) ** 2).sum()) / within
    outer = float((sizes * (means - values.mean()) ** 2).sum()) / (len(sizes) - 1)
    typical = (len(values) - float((sizes**2).sum()) / len(values)) / (len(sizes) - 1)
    alike = max((outer - inner) / max(outer + (typical - 1) * inner, 1e-12), 0.0)
    return 1 / (1 + (float((sizes**2).sum()) / len(values) - 1) * alike)


def _safe_tail(excess: Floats, threshold: float, rate: float, odds: float, independent: float) -> ScoreTail:
    """Return, of the tails that explain the excesses nearly as well as the best, the one that reaches furthest.

    ``independent`` is the share of the excesses that counts, ``odds`` how many peaks there are to one that matters.
    """
    excess = np.maximum(excess, 1e-9)
    censored = int(CENSORED_RATIO * len(excess))
    ordered = np.sort(excess)
    exact = ordered[: len(ordered) - censored]
    shapes = np.linspace(0.0, SHAPE_MAX, SHAPES)[:, None]
    scales = float(ordered.mean()) * np.logspace(-1.2, 0.8, SCALES)[None, :]
    likelihood = np.zeros((SHAPES, SCALES))
    for value in exact:
        likelihood += _log_survival(value, scales, shapes) - np.log(scales) - np.log1p(shapes * value / scales)
    likelihood += censored * _log_survival(exact[-1], scales, shapes)
    # The score that one in so many peaks reaches, for each tail.
    with np.errstate(divide="ignore", invalid="ignore"):
        level = np.where(shapes > 0, (odds**shapes - 1) / np.where(shapes > 0, shapes, 1), math.log(odds)) * scales
    likelihood *= independent
    allowed = likelihood >= likelihood.max() - LIKELIHOOD_DROP
    at = np.unravel_index(int(np.argmax(np.where(allowed, level, -np.inf))), level.shape)
    return ScoreTail(threshold, float(scales[0, at[1]]), float(shapes[at[0], 0]), rate)


def _log_survival(value: float, scales: Floats, shapes: Floats) -> Floats:
    ratio = value / scales
    with np.errstate(divide="ignore", invalid="ignore"):
        heavy = -np.log1p(shapes * ratio) / np.where(shapes > 0, shapes, 1)
    result: Floats = np.where(shapes > 0, heavy, -ratio)
    return result


def poisson_at_most(expected: float, probability: float) -> int:
    """Return the least count that a Poisson number of this mean stays within with this probability."""
    count, term = 0, math.exp(-expected)
    below = term
    while below < probability and count < 10_000:
        count += 1
        term *= expected / count
        below += term
    return count


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


def make(history: HealthyHistory, seed: int, epochs: int = learners.EPOCHS) -> tuple[LearnedModel, HealthyCheck]:
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
        layers=learners.exported_autoencoder(learners.train_autoencoder(inputs, seed, epochs)),
        forest=learners.exported_forest(learners.grow_forest(magnitudes(inputs), seed)),
        covariance=learners.fit_covariance(placed(inputs), seed),
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
