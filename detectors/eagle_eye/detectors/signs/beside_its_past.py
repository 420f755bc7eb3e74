"""Collects further evidence against a slow rank from its own past: its compute and its GPU's counters."""

from __future__ import annotations

from typing import NamedTuple

from eagle_eye.detectors.signs.busy_among_waiting import busy_among_waiting
from eagle_eye.detectors.signs.own_history import own_change
from eagle_eye.detectors.types import Evidence, Window


class PastEvidence(NamedTuple):
    """Kinds of evidence, their wording, and the numbers; empty if the past shows nothing."""

    kinds: frozenset[str] = frozenset()
    words: str = ""
    evidence: tuple[Evidence, ...] = ()


def beside_its_past(window: Window, index: int, onset: int, onset_s: float, slowdown: float) -> PastEvidence:
    """Return evidence that the rank was faster before; its GPU is examined too if steps are longer because of it."""
    change, series = own_change(window, index, onset), window.series[index]
    if change is None:
        return PastEvidence()
    was = Evidence("relative_compute_over_before", series.node, series.device, change.ratio, None, None, "ratio")
    words = f", {change.ratio:.2f} times as long as before beside them"
    busier = busy_among_waiting(window, index, onset_s, slowdown) if slowdown > 0 else None
    if busier is None:
        return PastEvidence(frozenset({"own_history"}), words, (was,))
    over_before = f"{busier.metric}_over_before"
    shows = Evidence(over_before, series.node, series.device, busier.own, busier.peers, None, "ratio")
    words += ", and its GPU works while theirs wait"
    return PastEvidence(frozenset({"own_history", "gpu_activity"}), words, (was, shows))
