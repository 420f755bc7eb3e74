"""An attempt that has made no step yet: whether one was to be expected, and who has not been heard of."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.signs.without_hook import computing
from eagle_eye.detectors.types import Window

SILENT_S = 10.0  # a hook that missed some heartbeats is not yet one that stopped


@once
def steps_expected(window: Window) -> bool:
    """Whether the attempt's ranks have the hook, so that steps would be seen: absence of the hook is no fault.

    Its ground is that some ranks of this attempt have spoken and others never did, or one has stopped to; or that an
    earlier attempt of the job reported steps, unless this one's GPUs compute or nobody says whether they do.
    A launcher that names who holds the start up knows that it is overdue.
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
    """Return which ranks' hooks have said anything in this attempt: (S,)."""
    heard = np.array([bool(name) for name in window.phase], dtype=np.bool_) | (window.silent_s > 0)
    sequence = window.device.get("nccl_sequence")
    return heard if sequence is None else heard | np.isfinite(sequence).any(axis=0)


@once
def missing_nodes(window: Window) -> set[int]:
    """Return the nodes, as indexes, with ranks that were never heard of although those of most other nodes all were.

    The launcher's word on who holds the start up comes first, then what ranks say themselves; where none has spoken,
    which of their processes agents have seen.
    """
    ranked, heard = _ranked(window), _heard(window)
    if heard is None:
        return set()
    without = set(range(len(window.nodes))) - {int(node) for node in np.unique(window.node_of[ranked])}
    missing = {int(node) for node in np.unique(window.node_of[ranked & ~heard])}
    missing = missing if window.beginning.held_up_by else missing | without
    return missing if 2 * len(missing) < len(window.nodes) or window.beginning.held_up_by else set()


def missing_ranks(window: Window, node: int) -> list[int]:
    """Return the ranks of a node that were never heard of; [] too where it is not known which ranks it has."""
    heard = _heard(window)
    if heard is None:
        return []
    mine = np.flatnonzero((window.node_of == node) & _ranked(window) & ~heard)
    return sorted(window.series[column].rank for column in mine.tolist())


@once
def _heard(window: Window) -> NDArray[np.bool_] | None:
    """Return which ranks were heard of, by the first source that heard of any and not of all; None where none did."""
    held_up, ranked = window.beginning.held_up_by, _ranked(window)
    if held_up:
        return np.array([series.rank not in held_up for series in window.series], dtype=np.bool_)
    sources = [heard for heard in (spoken(window), window.beginning.named) if len(heard) == len(ranked)]
    known = [heard for heard in sources if (heard & ranked).any()]
    return next((heard for heard in known if not heard[ranked].all()), known[-1] if known else None)


@once
def _ranked(window: Window) -> NDArray[np.bool_]:
    return np.array([series.rank >= 0 for series in window.series], dtype=np.bool_)
