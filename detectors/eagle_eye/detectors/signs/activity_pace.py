"""Measures the slowdown of a job that reports no steps: the same work spread over more time.

GPU and network throughput falls as steps become longer, whatever the cause. Where rows resolve the step period, whole
steps are compared, since the level of a partial step depends on when it was sampled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.medians import median_over_rows
from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.signs.peers import SIGMA_PER_MAD
from eagle_eye.detectors.signs.periodicity import rhythm_s, stretches
from eagle_eye.detectors.signs.under_load import lines_within, means, middle
from eagle_eye.detectors.signs.without_hook import MOVES, NODE_MOVES, WAITING_MOVES, throughput
from eagle_eye.detectors.types import Floats, Window

GROWTH_DISTANCE = 4.0  # standard errors
BLOCKS_BEFORE_MIN, BLOCKS_AFTER_MIN = 4, 3
MEDIAN_ERROR = 1.2533  # standard error of a median over that of a mean, normal distribution
DRIFT_SHARE = 0.5  # of the change of pace within the earlier time by itself, from one half to the other: batches differ
LASTING_SHARE = 0.5  # of a change, that each half of the time since must show
ASKED_OFTEN = 1.25  # times the error of a cost: it is tested every few seconds, on blocks that are not independent
NEAR_S, NEAR_ROWS_MIN = 120.0, 3  # on each side of a moment, to say that a change began there
SPREAD_FLOOR = 0.003  # of blocks: the counters' resolution
FEW_BLOCKS = 2.0  # the error of n blocks counts 1 + 2/n times: their spread is poorly known
BLOCK_S = 15.0  # of activity counters, at least a row and a few steps: their spread shows how significant a change is
QUIET_SHARE, USUAL_QUANTILE, PAUSE_S = 0.3, 0.75, 15.0  # of its usual level for this long: not training
WAITS_MIN, WAITS_QUANTILE, LONGER_RATIO = 8, 0.8, 1.5  # what recurs this often is no pause, nor what is not much longer
BLOCK_LENGTHS = (1, 2, 4)  # multiples of BLOCK_S
LOOKED_BACK_S = tuple(range(60, 301, 30))  # a checkpoint takes less
LATE_DISTANCE = 8.0  # standard errors, if the onset is unknown: tested every second, on blocks that are not independent
PARTS = 4  # of that time, each of which must be slower
ACTIVITY_NOTED = 0.03  # counters are coarser than clocks around steps
PAYLOAD = (*(metric for metric in MOVES if metric != WAITING_MOVES), NODE_MOVES)  # none moves while all wait
ACTIVITY_S, ACTIVITY_ROWS, ACTIVITY_SAMPLED = 900.0, 1_200, 64  # long steps are few


_View = tuple[Floats, Floats]  # a counter's values, (rows, columns), and the rows' times


class PaceChange(NamedTuple):
    """By what share the job's steps have become longer, its standard error, and the smallest significant share."""

    growth: float
    error: float
    noted: float

    @property
    def clear(self) -> bool:
        """Whether the job is slower beyond its own noise."""
        return self.growth >= max(self.noted, GROWTH_DISTANCE * self.error)


UNKNOWN = PaceChange(0.0, math.inf, ACTIVITY_NOTED)


def activity_change(window: Window, since_s: float) -> PaceChange | None:
    """Return the change in GPU and network throughput, combined over all counters; None if there are none.

    A step moves the same bytes over every link, so all counters measure one pace: they are weighted by their errors,
    and the error is larger where they disagree (bursts that samples catch or miss, traffic not from training).
    """
    views = _moved(window)
    return _together(views, since_s, window.interval_s) if views else None


def lasting_change(window: Window, since_s: float) -> PaceChange | None:
    """Return ``activity_change`` as far as each half of the time since shows it by itself; None: there are no counters.

    A job's pace drifts by a few percent for a minute, and repeated tests find such a minute; the cost of a slow node is
    there all the time. Unknown until each half can be measured.
    """
    views = _moved(window)
    if not views:
        return None
    turn_s = (since_s + max(float(times_s[-1]) for _, times_s in views)) / 2
    first = [_rows(view, view[1] <= turn_s) for view in views]
    second = [_rows(view, (view[1] <= since_s) | (view[1] > turn_s)) for view in views]
    whole, *halves = (_together(part, since_s, window.interval_s) for part in (views, first, second))
    if not all(math.isfinite(half.error) for half in halves):
        return UNKNOWN
    whole = whole._replace(error=ASKED_OFTEN * whole.error)
    least = min(half.growth for half in halves)
    return whole if least >= LASTING_SHARE * whole.growth else whole._replace(growth=min(whole.growth, least))


def began_then(window: Window, since_s: float, growth: float) -> bool:
    """Whether the job became slower at that moment: by half of ``growth`` between the minutes before and after it.

    A pace that wanders gets there over minutes. By the median over the counters; False if none shows both sides.
    """
    found = []
    for values, times_s in _moved(window):
        level = means(values.T)
        before = level[(times_s > since_s - NEAR_S) & (times_s <= since_s)]
        after = level[(times_s > since_s + window.interval_s) & (times_s <= since_s + window.interval_s + NEAR_S)]
        if min(np.isfinite(before).sum(), np.isfinite(after).sum()) >= NEAR_ROWS_MIN and middle(after) > 0:
            found.append(middle(before) / middle(after) - 1)
    return bool(found) and middle(np.array(found)) >= LASTING_SHARE * growth


def changed_of_late(window: Window) -> tuple[PaceChange, float] | None:
    """Return by how much the job has recently become slower and roughly since when; None if it clearly has not.

    It must have been slower all that time: a pause has not.
    """
    found: tuple[PaceChange, float] | None = None
    for values, times_s in _activity(window):
        level = means(values.T)
        for back_s in LOOKED_BACK_S:
            since_s = float(times_s[-1]) - back_s
            before, after = level[times_s <= since_s], level[times_s > since_s + window.interval_s]
            if len(before) < BLOCKS_BEFORE_MIN or len(after) < PARTS or not _lower_throughout(before, after):
                continue
            change = _rate_change(values, times_s, since_s, window.interval_s, BLOCK_LENGTHS[:1])
            sure = change.clear and change.growth >= LATE_DISTANCE * change.error
            if sure and (found is None or change.growth > found[0].growth):
                found = change, since_s
    return found


def _activity(window: Window, metrics: Sequence[str] = (*MOVES, NODE_MOVES)) -> Iterator[_View]:
    """Yield throughput of some of the GPUs and nodes in each row of training, (rows, columns), and the rows' times."""
    views = [(throughput(window, metric), window.times_s) for metric in metrics]
    views += [(window.node.get(metric), window.node_times_s) for metric in metrics]
    for values, times_s in views:
        if values is None or len(times_s) == 0:
            continue
        lines = min(lines_within(times_s, ACTIVITY_S), ACTIVITY_ROWS)
        recent = values[-lines:, :: values.shape[1] // ACTIVITY_SAMPLED + 1]
        training = _training(median_over_rows(recent.T), times_s[-lines:])
        if training.any():
            yield recent[training], times_s[-lines:][training]


@once
def _moved(window: Window) -> list[_View]:
    """Return the job's throughput; counters that waiting kernels keep up are used only if there are no others."""
    return list(_activity(window, PAYLOAD)) or list(_activity(window, (WAITING_MOVES,)))


def _rows(view: _View, kept: NDArray[np.bool_]) -> _View:
    values, times_s = view
    return values[kept], times_s[kept]


def _together(views: Sequence[_View], since_s: float, interval_s: float) -> PaceChange:
    """Return the mean of several counters' changes, weighted by inverse squared error."""
    changes = [_rate_change(values, times_s, since_s, interval_s) for values, times_s in views]
    known = [change for change in changes if math.isfinite(change.error)]
    if not known:
        return UNKNOWN
    weights, growths = (np.array(column) for column in zip(*((c.error**-2, c.growth) for c in known), strict=True))
    mean = float(np.average(growths, weights=weights))
    apart = math.sqrt(float(np.average((growths - mean) ** 2, weights=weights)) / len(known))
    return PaceChange(mean, math.hypot(min(change.error for change in known), apart), ACTIVITY_NOTED)


def _lower_throughout(before: Floats, after: Floats) -> bool:
    """Whether each part of the later time shows half of the overall drop, and that justifies a closer look."""
    usual = float(np.nanmean(before)) if np.isfinite(before).any() else math.nan
    parts = [float(np.nanmean(part)) for part in np.array_split(after, PARTS) if np.isfinite(part).any()]
    if not usual > 0 or len(parts) < PARTS:
        return False
    drop = usual - sum(parts) / PARTS
    return drop > ACTIVITY_NOTED / 2 * usual and usual - max(parts) >= drop / 2


def _training(level: Floats, times_s: Floats) -> NDArray[np.bool_]:
    """Return which rows are training: all but long runs with hardly any activity, which are pauses.

    Waits within a step count, however long: they are what becomes longer. They recur.
    """
    known = level[np.isfinite(level)]
    if len(known) == 0:
        return np.zeros(len(level), dtype=np.bool_)
    active = np.flatnonzero(level >= QUIET_SHARE * np.quantile(known, USUAL_QUANTILE))
    edges = np.concatenate([[-1], active, [len(level)]])
    before, after = (edge[np.diff(edges) > 1] for edge in (edges[:-1], edges[1:]))
    rests_s = times_s[np.minimum(after, len(times_s) - 1)] - times_s[np.maximum(before, 0)]
    usual_s = float(np.quantile(rests_s, WAITS_QUANTILE)) if len(rests_s) >= WAITS_MIN else 0.0
    keep = np.ones(len(level), dtype=np.bool_)
    for place in np.flatnonzero(rests_s >= max(PAUSE_S, LONGER_RATIO * usual_s)).tolist():
        keep[max(before[place], 0) : after[place] + 1] = False  # including the rows in which it began and ended
    return keep


def _rate_change(
    values: Floats, times_s: Floats, since_s: float, interval_s: float, lengths: Sequence[int] = BLOCK_LENGTHS
) -> PaceChange:
    """Return the change of a rate (rows, columns) at a moment, each column against itself, since stages differ.

    Computed with blocks of several lengths; the one of median error is used: blocks without whole steps differ most,
    those that differ least may do so by chance. Where the rows resolve steps and several lengths are requested, blocks
    are whole steps and the largest error is used, since consecutive steps are correlated. The error is infinite while
    too little of the time before or after is in view.
    """
    before, after = times_s <= since_s, times_s > since_s + interval_s
    if not (before.any() and after.any()):
        return UNKNOWN
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = values / means(values[before])
    parts = [(ratios[some], times_s[some]) for some in (before, after)]
    blocks_s = [length * max(BLOCK_S, interval_s) for length in lengths]
    whole = _by_whole_steps(parts, blocks_s) if len(lengths) > 1 else []
    if whole:
        return whole[-1]
    known = _by_error(_block_change(*(_blocks(part, block_s) for part in parts)) for block_s in blocks_s)
    return known[len(known) // 2] if known else UNKNOWN


def _by_whole_steps(parts: Sequence[_View], blocks_s: Sequence[float]) -> list[PaceChange]:
    """Return the changes by blocks of whole steps of about these lengths; [] if the rows do not resolve steps."""
    rhythms = [rhythm_s(median_over_rows(values.T), times_s) for values, times_s in parts]
    known = [found for found in rhythms if found is not None]
    if len(known) < len(parts):
        return []
    return _by_error(
        _block_change(*(_whole_steps(part, block_s, step_s) for part, step_s in zip(parts, known, strict=True)))
        for block_s in blocks_s
    )


def _by_error(changes: Iterable[PaceChange]) -> list[PaceChange]:
    return sorted((change for change in changes if math.isfinite(change.error)), key=lambda change: change.error)


def _blocks(view: _View, block_s: float) -> Floats:
    """Return the level of each block of some rows."""
    values, times_s = view
    return np.array([middle(means(part)) for part in np.array_split(values, _whole_blocks(times_s, block_s))])


def _whole_steps(view: _View, block_s: float, step_s: float) -> Floats:
    """Return the level of each block of as many whole steps as fit ``block_s``."""
    values, times_s = view
    return median_over_rows(stretches(values, times_s, math.ceil(block_s / step_s) * step_s).T)


def _block_change(parts: Floats, now: Floats) -> PaceChange:
    """Return the change between the block levels of two periods."""
    parts, now = parts[np.isfinite(parts)], now[np.isfinite(now)]
    if len(parts) < BLOCKS_BEFORE_MIN or len(now) < BLOCKS_AFTER_MIN or not (middle(parts) > 0 and middle(now) > 0):
        return UNKNOWN
    # Medians of blocks: a checkpoint affects one or two of them.
    ratio = middle(now) / middle(parts)
    spread = max(SIGMA_PER_MAD * middle(np.abs(parts - middle(parts))), SPREAD_FLOOR)
    error = (1 + FEW_BLOCKS / len(parts)) * MEDIAN_ERROR * spread * math.sqrt(1 / len(parts) + 1 / len(now))
    half = len(parts) // 2
    drift = DRIFT_SHARE * abs(middle(parts[half:]) - middle(parts[:half])) / middle(parts)
    # Time is the inverse of activity: the same kernels in a longer step.
    return PaceChange(1 / ratio - 1, math.hypot(error, drift), ACTIVITY_NOTED)


def _whole_blocks(times_s: Floats, block_s: float) -> int:
    return int((times_s[-1] - times_s[0]) // block_s) + 1 if len(times_s) else 0
