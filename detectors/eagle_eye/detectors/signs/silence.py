"""Finds silent nodes: for how long, which fell silent at the same moment, and whether the job stopped too."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eagle_eye.detectors.signs.at_work import pausing_at_work
from eagle_eye.detectors.signs.exits import unplanned_exits
from eagle_eye.detectors.signs.host_activity import most_busy_with_io
from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.signs.progress import PAUSE_FLOORS, STARTING, Patience, Progress, progress, typical_step_s
from eagle_eye.detectors.signs.topology import SharedTrouble, struck_at_once, struck_switches
from eagle_eye.detectors.types import Blind, Evidence, Floats, Integers, Window

TOGETHER_S = 3.0  # nodes cut off together were last heard within this time...
WENT_ON_STEPS, WENT_ON_INTERVALS = 2.0, 2.0  # what may still finish and be reported after a node is gone
METRICS_LOOKED_AT = 3  # a row that arrived contains one of these
GAP_INTERVALS = 2.5  # between two rows, beyond which some are missing
PASSED_RATIO = 1.5  # of earlier silences that passed, beyond which a new one is significant
TOGETHER_INTERVALS = 1.5  # ...or this many intervals, since agents report at different moments


class Silence(NamedTuple):
    """``seconds`` (N,) is how long each node has been silent (0 after a goodbye), ``nodes`` lists the silent ones.

    ``most`` is True if most of the job is silent: then the path to the server is likelier at fault.
    """

    seconds: Floats
    limit_s: float
    nodes: Integers
    most: bool


@once
def silence(window: Window, intervals: float, floor_s: float) -> Silence:
    """Return the silent nodes: those that missed ``intervals`` reports, and at least ``floor_s``."""
    heard_s = np.maximum(window.heard_s, window.watching_since_s)
    seconds = np.where(window.farewell, 0.0, window.now_s - heard_s)
    limit_s = max(floor_s, intervals * window.interval_s)
    silent = np.flatnonzero(seconds > limit_s)
    return Silence(seconds, limit_s, silent, most=2 * len(silent) > len(window.nodes))


@once
def silent_together(window: Window, intervals: float, floor_s: float) -> list[SharedTrouble]:
    """Return the groups of nodes that fell silent at one moment and share a switch, or are too many for chance.

    Nodes whose silence is not yet long enough count too if they were last heard at the same moment.
    """
    found = silence(window, intervals, floor_s)
    together_s = max(TOGETHER_S, TOGETHER_INTERVALS * window.interval_s)
    everybody = np.arange(len(window.nodes))
    open_nodes = sorted(found.nodes.tolist(), key=lambda node: (-found.seconds[node], node))
    groups: list[SharedTrouble] = []
    taken: set[int] = set()
    for node in open_nodes:
        if node in taken:
            continue
        near = (np.abs(found.seconds - found.seconds[node]) <= together_s) & (found.seconds > 0)
        near[list(taken)] = False
        group = struck_switches(near, everybody, window.switches) if any(window.switches) else None
        group = group or struck_at_once(near, everybody, len(window.nodes))
        if group is not None:
            groups.append(group)
            taken.update(group.nodes)
    return groups


@once
def passed_silences_s(window: Window) -> Floats:
    """Return how long each node's silence must last to be significant: (N,), 0 where silences do not pass.

    Based on silences that passed on the node itself, or on two others, while nothing was wrong: if agents often report
    nothing for a minute, a minute of silence means nothing. Late reports leave no gap, and times without a running
    server do not count.
    """
    return significant_s(window, _longest_gaps_s(window))


def significant_s(window: Window, longest_s: Floats) -> Floats:
    """Return how long each node's silence must last to be significant: (N,), 0 for any.

    ``longest_s`` is the longest time between two rows of each node in which nothing was wrong: (N,).
    """
    unusual_s = np.where(longest_s > GAP_INTERVALS * window.interval_s, longest_s, 0.0)
    many_s = np.sort(unusual_s)[-2] if len(unusual_s) > 1 else 0.0
    lasting_s: Floats = PASSED_RATIO * np.maximum(unusual_s, many_s)
    return lasting_s


def _longest_gaps_s(window: Window) -> Floats:
    """Return the longest time between two rows of each node in the window: (N,), 0 where there are not two."""
    longest_s = np.zeros(len(window.nodes))
    names = [name for name in window.device if not name.startswith("train_")][:METRICS_LOOKED_AT] or [*window.device]
    if not names or len(window.times_s) < 2:
        return longest_s
    seen = np.zeros((len(window.times_s), len(window.nodes)), dtype=np.bool_)
    for name in names:
        rows, columns = np.nonzero(np.isfinite(window.device[name]))
        seen[rows, window.node_of[columns]] = True
    rows = np.where(seen, np.arange(len(seen))[:, None], -1)
    before = np.vstack([np.full(len(window.nodes), -1), np.maximum.accumulate(rows, axis=0)[:-1]])
    begun_s = window.times_s[np.maximum(before, 0)]
    ours = begun_s < window.watching_since_s  # server down; reports queued at the agents have not all arrived
    gaps_s = np.where(seen & (before >= 0) & ~ours, window.times_s[:, None] - begun_s, 0.0)
    gaps: Floats = gaps_s.max(axis=0)
    return gaps


def fell_with_the_job(window: Window, node: int, state: Progress | None) -> bool:
    """Whether the node (its index) fell silent about when the job stopped: only then may its silence be the reason.

    Steps made after it was last heard included it, and a node that falls silent long after the stop has not caused it.
    One that falls silent in a pause is missed once the others have done what they paused for. While the server was not
    running the node may have reported: it fell silent then or when the server started, whichever fits. ``state`` is the
    job's progress, None if its ranks have ended.
    """
    heard_s = float(window.heard_s[node])
    latest_s = max(heard_s, window.watching_since_s)
    if state is None and any(item.cause and item.node != window.nodes[node] for item in unplanned_exits(window)):
        return False  # a rank elsewhere died of its own error
    if state is None and not np.isfinite(window.last_step):
        return True
    if state is not None and state.phase == STARTING:  # its progress is unknown: any node that has fallen silent since
        return latest_s >= window.started_s - TOGETHER_S
    advanced_s = state.advanced_s if state is not None else window.advanced_s
    stepped_s = window.advanced_s if state is not None and state.reported else advanced_s
    after_s, before_s = heard_s - advanced_s, stepped_s - latest_s
    ended_s = WENT_ON_INTERVALS * window.interval_s + TOGETHER_S
    underway_s = WENT_ON_STEPS * max(typical_step_s(window), window.interval_s)
    if after_s > 0 and state is not None and not state.reported:
        underway_s = state.known_pause_s  # its GPUs worked until then, and pause that long in an ordinary step
    return max(after_s, before_s) <= underway_s + ended_s


def job_stopped(window: Window, patience: Patience) -> tuple[Progress | None, Evidence | None]:
    """Return the job's progress (None: its ranks ended, or unknown) and the evidence that it has stopped.

    The evidence is None if nothing shows a stop: the job goes on, is starting, or most GPUs go on computing, which
    would wait for a node that is gone.
    """
    exits = unplanned_exits(window)
    if exits:
        first = exits[0]
        return None, Evidence("process_exit", first.node, first.device, f"rank {first.rank} {first.how}")
    try:
        state = progress(window, patience)
    except Blind:
        return None, None
    if state.reported:
        stands = (state.stopped or state.outlasts_pauses) and not pausing_at_work(window, state)
        return state, state.evidence if stands else None
    # GPUs may also wait while an unannounced checkpoint is written.
    written_s = PAUSE_FLOORS * state.ripe_s if most_busy_with_io(window, state.advanced_s) else 0.0
    return state, state.evidence if state.overstayed and state.standstill_s >= written_s else None
