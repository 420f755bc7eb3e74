"""Maps scores to alarms per node-day: fits the tail of healthy scores by extreme value theory, conservatively.

Peaks over a threshold follow a generalised Pareto distribution (Pickands 1975; used so for anomaly scores by Siffer et
al., SPOT, KDD 2017). A run of scores above the threshold counts as one peak (Coles 2001, section 5.3.2), since one
anomaly makes one alarm. Healthy history is never entirely healthy: the highest peaks are censored ("at least this
high"), so that a fault among them does not stretch the tail, and none is dropped, so that the tail is not cut. Of all
tails consistent with the peaks the one with the most alarms is taken.
"""

from __future__ import annotations

import math

import numpy as np

from eagle_eye.detectors.signs.learned_model import ScoreTail
from eagle_eye.detectors.types import Floats, Integers

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
