"""Decides whether a slow rank's work is known to equal its peers'; otherwise it may be slow because it has more to do.

Work counts as equal in two cases. Ranks' times, corrected for reported work, differ little from step to step: then the
work is equal (fixed-length data: 1%; packed sequences and experts differ by 5 to 30%), or differs by far too little to
explain a rank that is many times as slow, particularly if the code reports how much it is, and that it differs, or if
most hosts are short of CPU; the remaining differences are mostly the machines' own. Or ranks with the same data, whose
times correlated with this one's alone, are not slower. Work counts as unequal if the ranks of other pipeline stages
that work on the same data have become as slow at the same time, or if peers' times lie apart all along.
"""

from __future__ import annotations

import math

import numpy as np

from eagle_eye.detectors.signs.medians import median_of, median_over_rows
from eagle_eye.detectors.signs.once import once, once_for_members
from eagle_eye.detectors.signs.own_history import STEPS_LOOKED_AT, growths
from eagle_eye.detectors.signs.own_pace import short_of_cpu
from eagle_eye.detectors.signs.peers import SIGMA_PER_MAD, role_members
from eagle_eye.detectors.signs.progress import typical_step_s
from eagle_eye.detectors.signs.step_noise import MEMORY_MIN, memory, spread_of
from eagle_eye.detectors.signs.under_load import peers_of
from eagle_eye.detectors.types import Floats, Integers, Window

NOISE_RATIO = 0.03  # of single steps: the most by which ranks of equal work differ
# Share of a rank's excess below which step-to-step differences do not explain it, if nothing says why they differ...
NOISE_SHARE = 0.04
NOISE_SHARE_TOLD = 0.15  # ...and if reported work does, or hosts that are short of CPU
LEVELS_SHARE = 0.125  # the same of the differences that last, as between experts of which some are asked for more
# Reports of several short steps hold their mean, in which such differences shrink. Machines' own shrink less: times of
# one worker have a lag-1 correlation of 0.52 to 0.88 (Alibaba). Where reports still show that they last, so many steps
# vary like an independent one (0.85); where they do not, so many (0.38), since work that differs by 5% must be seen.
STEPS_ALIKE, STEPS_ALIKE_UNSEEN = 12, 2.25
TAILS = 2.0  # times that by the mean deviation: a few odd steps do not make work uneven
MEAN_DEVIATION = 1.2533  # of a normal distribution, its standard deviation over its mean deviation
WORK_SHARE = 0.5  # of the growth, that growth of the work must reach to explain it
TOKENS_NOTED = 0.01  # growth of tokens below which nothing has grown
ALIKE = 0.8  # correlation of two ranks' times from step to step, which chance reaches in none of RANKS_SAMPLED...
ALIKE_STEPS_MIN = 24  # ...over so many independent steps: once in 10,000 times by Fisher's transformation
RANKS_SAMPLED = 512
# So many nodes that become slow at one moment did not fail each by itself: a rack lacks power, or an aisle is hot.
TOGETHER_NODES_MIN = 3
TOGETHER_TIMES = 3.0
TOGETHER_SIGMAS = 4.0


@once
def even_work(window: Window, index: int, onset: int) -> bool:
    """Return whether a rank that is slow since step line ``onset`` is known to have no more work since then."""
    peers = peers_of(window, index, window.role_of)
    first = max(onset - STEPS_LOOKED_AT, 0)
    relative = window.steps.relative_compute
    earlier, later = relative[first:onset], relative[onset:][-STEPS_LOOKED_AT:]
    now = later[np.isfinite(later[:, index]), index]
    times = max(median_of(now), 1.0) if len(now) else 1.0
    if _tokens_growth(window, index, onset, peers) >= max(WORK_SHARE * math.log(times), TOKENS_NOTED):
        return False
    told = work_is_told(window, index, onset) and _units_differ(window, first, peers)
    share = NOISE_SHARE_TOLD if told or short_of_cpu(window) else NOISE_SHARE
    noise = max(NOISE_RATIO, share * (times - 1))
    if not told:
        lasting = memory(window, int(window.role_of[index])) >= MEMORY_MIN
        alike = STEPS_ALIKE if lasting else STEPS_ALIKE_UNSEEN
        noise /= math.sqrt(max(window.interval_s / typical_step_s(window) / alike, 1.0))
    if spread_of(median_over_rows(later[:, peers])) > max(NOISE_RATIO, LEVELS_SHARE * (times - 1)):
        return False
    if all(_steady(part, noise) for part in (earlier[:, peers], earlier[:, [index]], later[:, peers])):
        return True
    return _same_data_not_slower(window, earlier, later, index)


@once
def slow_with_its_data(window: Window, index: int, onset: int) -> tuple[str, ...]:
    """Return the other nodes of ranks that share a slow rank's data and are as slow since step line ``onset``.

    () if fewer than half of such ranks are slow, or it is not known which they are.
    """
    relative = window.steps.relative_compute[onset:][-STEPS_LOOKED_AT:]
    known = np.isfinite(relative[:, index])
    mates = _stage_mates(window, index)
    if not known.any() or not len(mates):
        return ()
    excess = median_over_rows(relative[known][:, [index, *mates]]) - 1
    slow = mates[excess[1:] >= WORK_SHARE * excess[0]]
    return tuple(sorted({window.series[int(mate)].node for mate in slow})) if 2 * len(slow) > len(mates) else ()


@once
def slow_with_others(window: Window, index: int, onset: int) -> tuple[str, ...]:
    """Return the nodes, its own included, with a rank that has become about as slow as one did at step line ``onset``.

    () if they are fewer than TOGETHER_NODES_MIN, or no more than TOGETHER_TIMES those that became so by chance in as
    many steps before. Each is compared with its own past, and with how far ranks stray.
    """
    relative = window.steps.relative_compute
    later = relative[onset:][-STEPS_LOOKED_AT:]
    earlier = relative[max(onset - STEPS_LOOKED_AT, 0) : onset]
    before, past = earlier[-len(later) :], earlier[: -len(later)]
    own = float(_growth(later, earlier)[index])
    nodes = _grown_by(window, index, later, earlier, own)
    if len(nodes) < TOGETHER_NODES_MIN or len(nodes) <= TOGETHER_TIMES * len(
        _grown_by(window, index, before, past, own)
    ):
        return ()
    return tuple(sorted(window.nodes[node] for node in nodes))


def _grown_by(window: Window, index: int, later: Floats, earlier: Floats, about: float) -> Integers:
    """Return the nodes with a rank that has grown by about as much, and by more than ranks of other nodes stray."""
    growth = _growth(later, earlier)
    node_of = window.node_of[: len(growth)]
    elsewhere = growth[np.isfinite(growth) & (node_of != window.node_of[index])]
    if not len(elsewhere) or not about > 0:
        return np.zeros(0, dtype=np.intp)
    spread = SIGMA_PER_MAD * median_of(np.abs(elsewhere - median_of(elsewhere)))
    with np.errstate(invalid="ignore"):
        alike = (growth >= max(WORK_SHARE * about, TOGETHER_SIGMAS * spread)) & (growth <= about / WORK_SHARE)
    return np.unique(node_of[alike])


def _growth(later: Floats, earlier: Floats) -> Floats:
    """Return by how much more each rank computes than before, relative to its peers: (S,), NaN if not known."""
    if not len(later) or not len(earlier):
        return np.full(later.shape[1], np.nan)
    growth: Floats = median_over_rows(later) - median_over_rows(earlier)
    return growth


def _stage_mates(window: Window, index: int) -> Integers:
    """Return the ranks on other nodes that have the same position in other roles of the same size.

    Launchers number the ranks of all pipeline stages alike: equal positions are one data-parallel replica.
    """
    places = _places(window)
    same = (places == places[index]).all(axis=1) & (window.role_of != window.role_of[index])
    return np.flatnonzero(same & (window.node_of != window.node_of[index]))


@once_for_members
def _places(window: Window) -> Integers:
    """Return each rank's position in its role, by rank, and the size of the role: (S, 2)."""
    places = np.zeros((len(window.series), 2), dtype=np.intp)
    ranks = np.array([series.rank for series in window.series])
    for members in role_members(window):
        places[members[np.argsort(ranks[members], kind="stable")], 0] = np.arange(len(members))
        places[members, 1] = len(members)
    return places


def work_is_told(window: Window, index: int, onset: int) -> bool:
    """Whether the training code reports the work of a rank, and of most of its peers, since step line ``onset``."""
    units = window.steps.values.get("train_work_units")
    if units is None:
        return False
    known = np.isfinite(np.fmax.reduce(units[onset:], axis=0, initial=np.nan))
    return bool(known[index]) and float(np.mean(known[peers_of(window, index, window.role_of)])) > 0.5


def _units_differ(window: Window, first: int, peers: Integers) -> bool:
    """Whether reported work differs between ranks since step line ``first``: equal numbers explain no difference."""
    units = window.steps.values["train_work_units"][first:][:, peers]
    with np.errstate(invalid="ignore", divide="ignore"):
        off = np.abs(units / median_over_rows(units.T)[:, None] - 1)
    off = off[np.isfinite(off)]
    return len(off) > 0 and MEAN_DEVIATION * float(np.mean(off)) >= NOISE_RATIO


def _steady(relative: Floats, noise: float = NOISE_RATIO) -> bool:
    """Whether each rank's times vary from step to step as little as those of equal work; True if there are none."""
    if not np.isfinite(relative).any():
        return True
    with np.errstate(invalid="ignore", divide="ignore"):
        off = np.abs(relative / median_over_rows(relative) - 1)
    off = off[np.isfinite(off)]
    return SIGMA_PER_MAD * median_of(off) <= noise and MEAN_DEVIATION * float(np.mean(off)) <= TAILS * noise


def _tokens_growth(window: Window, index: int, onset: int, peers: Integers) -> float:
    """Return by how much more a rank's tokens per step have grown than its peers', as a logarithm; 0 if not known."""
    rate, seconds = (window.steps.values.get(name) for name in ("train_tokens_per_second", "train_step_seconds"))
    if rate is None or seconds is None:
        return 0.0
    tokens = rate * seconds
    earlier, later = tokens[max(onset - STEPS_LOOKED_AT, 0) : onset], tokens[onset:][-STEPS_LOOKED_AT:]
    own, others = (growths(earlier[:, some], later[:, some]) for some in ([index], peers))
    return float(own[0]) - median_of(others) if len(own) and len(others) else 0.0


def _same_data_not_slower(window: Window, earlier: Floats, later: Floats, index: int) -> bool:
    """Whether ranks whose times correlated with a rank's, and so have the same data, have not slowed with it."""
    own = earlier[:, index]
    known = np.isfinite(own)
    kept = memory(window, int(window.role_of[index]))  # two series that wander correlate by chance (Bartlett 1946)
    if int(known.sum()) < ALIKE_STEPS_MIN * (1 + kept**2) / (1 - kept**2):
        return False
    stride = earlier.shape[1] // RANKS_SAMPLED + 1
    near = np.arange(max(index - RANKS_SAMPLED // 2, 0), min(index + RANKS_SAMPLED // 2, earlier.shape[1]))
    some = np.setdiff1d(np.union1d(np.arange(0, earlier.shape[1], stride), near), [index])
    some = some[np.isfinite(earlier[known][:, some]).all(axis=0)]
    if not len(some):
        return False
    own_off = own[known] - own[known].mean()
    others_off = earlier[known][:, some] - earlier[known][:, some].mean(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        likeness = own_off @ others_off / np.sqrt((own_off**2).sum() * (others_off**2).sum(axis=0))
    mates = some[likeness >= ALIKE]
    changes, own_change = growths(earlier[:, mates], later[:, mates]), growths(earlier[:, [index]], later[:, [index]])
    if not len(changes) or not len(own_change) or median_of(changes) >= (1 - WORK_SHARE) * float(own_change[0]):
        return False
    with np.errstate(invalid="ignore", divide="ignore"):
        apart = own / median_over_rows(earlier[:, mates].T)
    return _steady(apart[:, None])  # the data are all that made them differ
