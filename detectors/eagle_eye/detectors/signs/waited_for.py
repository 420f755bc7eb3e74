"""Finds whom all other ranks wait for, among nodes against which there is direct evidence.

A process that a signal has stopped and a node that has fallen silent are no pauses of the program: what ranks without
such evidence do while the others wait is not judged here.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.collective_counts import COMPLETED, ENQUEUED, RECENT_LINES, resting_count
from eagle_eye.detectors.signs.exits import QUORUM
from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.signs.peers import latest
from eagle_eye.detectors.signs.progress import Patience, Progress, typical_step_s
from eagle_eye.detectors.signs.silence import significant_s
from eagle_eye.detectors.types import Floats, Window

STOPPED = "rank_stopped_ratio"


@once
def quorums(window: Window) -> Floats | None:
    """Return each rank's last known quorum of replica groups: (S,), NaN unknown; None if the job reports none."""
    values = window.device.get(QUORUM)
    return None if values is None else latest(values, len(values))


def stopped_ranks(window: Window, silent_s: float) -> NDArray[np.bool_]:
    """Return which ranks (S,) have been silent for so long because a signal has stopped their process."""
    values = window.device.get(STOPPED)
    if values is None:
        return np.zeros(len(window.series), dtype=np.bool_)
    stopped: NDArray[np.bool_] = (window.silent_s > silent_s) & (latest(values, RECENT_LINES) == 1.0)
    return stopped


def waited_for(window: Window, nodes: Collection[int]) -> set[int]:
    """Return which of these nodes all ranks elsewhere wait for in a collective; none if one rank does not wait.

    With replica groups, only the quorum in which ranks wait counts: others have left it, and nobody waits for them.
    """
    elsewhere = np.array([series.rank >= 0 for series in window.series]) & ~np.isin(window.node_of, [*nodes])
    with np.errstate(invalid="ignore"):
        waits = resting_count(window, ENQUEUED) > resting_count(window, COMPLETED)
    quorum = quorums(window)
    if quorum is None:
        return {*nodes} if elsewhere.any() and waits[elsewhere].all() else set()
    current = np.fmax.reduce(quorum[elsewhere & waits], initial=-np.inf)
    elsewhere &= quorum == current
    if not (elsewhere.any() and waits[elsewhere].all()):
        return set()
    return {node for node in nodes if (quorum[window.node_of == node] == current).any()}


def outlasts_floor(window: Window, state: Progress, patience: Patience) -> bool:
    """Whether the standstill may be acted on with direct evidence, whatever pauses the job has made before.

    False outside training: in a phase without due steps, before the first step, and where no steps are reported.
    """
    least_s = patience.typical_steps * max(typical_step_s(window), window.interval_s)
    return state.reported and not state.phase and state.standstill_s >= max(patience.floor_s, least_s)


def harmless_silences_s(window: Window) -> Floats:
    """Return how long the silence of a replica group's node must last to be significant: (N,), 0 for any.

    As ``passed_silences_s``, but a silence after which the node is in another quorum was not harmless.
    """
    longest_s = np.zeros(len(window.nodes))
    for column, values in enumerate(window.device[QUORUM].T):
        known = np.flatnonzero(np.isfinite(values))
        gaps_s = np.diff(window.times_s[known])[np.diff(values[known]) == 0]
        node = window.node_of[column]
        longest_s[node] = max(longest_s[node], gaps_s.max(initial=0.0))
    return significant_s(window, longest_s)
