"""Examines an attempt without a step: whether one should have been seen, and who has not reported."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.signs.without_hook import computing
from eagle_eye.detectors.types import Window

SILENT_S = 10.0  # a hook that missed some heartbeats has not necessarily stopped


@once
def steps_expected(window: Window) -> bool:
    """Whether the attempt's ranks have the hook, so that steps would be seen; a missing hook is no fault.

    True if some ranks of this attempt have reported and others never did, or one has stopped reporting; or if an
    earlier attempt of the job reported steps, unless this one's GPUs compute or GPU activity is not reported. Also if
    the launcher names the ranks that hold the start up.
    """
    if window.beginning.held_up_by:
        return True
    heard, ranked = spoken(window), _ranked(window)
    if (heard & ranked).any() and (not heard[ranked].all() or (window.silent_s > SILENT_S).any()):
        return True
    if window.earlier is None:
        return False
    return computing(window) is False or not any(metric.startswith("gpu_") for metric in window.device)


@once
def spoken(window: Window) -> NDArray[np.bool_]:
    """Return which ranks' hooks have reported in this attempt: (S,)."""
    heard = np.array([bool(name) for name in window.phase], dtype=np.bool_) | (window.silent_s > 0)
    sequence = window.device.get("nccl_sequence")
    return heard if sequence is None else heard | np.isfinite(sequence).any(axis=0)


@once
def missing_nodes(window: Window) -> set[int]:
    """Return the nodes, as indexes, with ranks that never reported although those of most other nodes all did.

    The launcher's report on who holds the start up comes first, then the ranks' own reports; if there are none, the
    processes that agents have seen.
    """
    ranked, heard = _ranked(window), _heard(window)
    if heard is None:
        return set()
    without = set(range(len(window.nodes))) - {int(node) for node in np.unique(window.node_of[ranked])}
    missing = {int(node) for node in np.unique(window.node_of[ranked & ~heard])}
    missing = missing if window.beginning.held_up_by else missing | without
    return missing if 2 * len(missing) < len(window.nodes) or window.beginning.held_up_by else set()


def missing_ranks(window: Window, node: int) -> list[int]:
    """Return the ranks of a node that never reported; [] also if it is not known which ranks it has."""
    heard = _heard(window)
    if heard is None:
        return []
    mine = np.flatnonzero((window.node_of == node) & _ranked(window) & ~heard)
    return sorted(window.series[column].rank for column in mine.tolist())


@once
def _heard(window: Window) -> NDArray[np.bool_] | None:
    """Return which ranks reported, by the first source with some but not all of them; None if there is none."""
    held_up, ranked = window.beginning.held_up_by, _ranked(window)
    if held_up:
        return np.array([series.rank not in held_up for series in window.series], dtype=np.bool_)
    sources = [heard for heard in (spoken(window), window.beginning.named) if len(heard) == len(ranked)]
    known = [heard for heard in sources if (heard & ranked).any()]
    return next((heard for heard in known if not heard[ranked].all()), known[-1] if known else None)


@once
def _ranked(window: Window) -> NDArray[np.bool_]:
    return np.array([series.rank >= 0 for series in window.series], dtype=np.bool_)
