"""Detects a process that ended unreported, from its GPU's freed memory while the other ranks wait."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.signs.counters import grown
from eagle_eye.detectors.signs.gpu_activity import waiting
from eagle_eye.detectors.signs.gpu_errors import kernel_word_s
from eagle_eye.detectors.signs.progress import Patience, progress
from eagle_eye.detectors.signs.silence import silence
from eagle_eye.detectors.signs.without_hook import (
    MEMORY_METRIC,
    Freed,
    freed_memory,
    held_until_s,
    idle_since_s,
    node_of,
)
from eagle_eye.detectors.types import Evidence, Floats, Verdict, Window

HOLDING_RATIO = 0.5  # of the other nodes must still hold their memory: an intended end frees all
LATER_S = 3.0  # others' exits that come this much later, plus two intervals, are echoes
UNORDERED_S = 45.0  # schedulers kill remaining processes 30 s after a job was told to end
SEEN_BEFORE_S = 60.0  # an exit this close to the start of the window may have followed an unseen one
TOGETHER_S = 10.0  # the others began to wait at the same moment...
STEP_S_MAX = 60.0  # ...or as much later as pipeline stages go on without one of them
CONFIDENCE_EARLY, CONFIDENCE = 0.85, 0.9  # while the kernel log may still name the cause, and afterwards
CONFIDENCE_RESTARTED = 0.95
COUNTER = "gpu_ecc_uncorrected_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGone:
    """Finds ``process_crash`` in a job without the hook, from ``gpu_memory_used_bytes`` (T, S) and GPU activity.

    A process that ends frees its GPU's memory (to below a tenth and 2 GiB) while its peers wait in a collective: they
    keep theirs, and their activity falls to waiting, at once or, with pipeline stages that go on for a while, for a
    whole floor. One node must have been first by three seconds and two intervals while most of the others are seen to
    keep their memory; if all freed it together the job has ended, and only the scheduler knows whether that was
    intended. If a few freed it together no node is named, and most must have kept theirs for longer than a scheduler
    allows. In a job of two nodes the other must still run kernels, since the last rank of an ending job may save for
    minutes. Asks for a restart and never accuses hardware: reported at once and acted on when the kernel would have
    named a cause; if a GPU of the node counts an uncorrected memory error, that detector takes precedence. If the exit
    happened while the node was away it was not observed, and the wait for the kernel log starts at the node's return.
    If by then none of its GPUs holds memory and its agent has started again without a goodbye, the node has rebooted:
    ``node_unreachable``, by its silence, its memory and the others' wait. No verdict where ranks report steps or exits,
    nor in jobs of one node. Cannot see: why the process ended.
    """

    patience: Patience
    intervals: float
    floor_s: float
    name: str = "process_gone"

    def detect(self, window: Window) -> list[Verdict]:
        """Return at most one verdict."""
        if np.isfinite(window.last_step) or len(window.nodes) < 2:
            return []
        freed = freed_memory(window)
        if not freed or any(event.kind == "process_exit" for event in window.events):
            return []
        since_s = np.full(len(window.nodes), np.inf)
        np.minimum.at(since_s, node_of(window, freed), [item.since_s for item in freed])
        first_s, later_s = float(since_s.min()), max(LATER_S, 2 * window.interval_s)
        if not self._stopped_with(window, first_s):
            return []
        opens_s = float(window.times_s[0])
        if window.started_s < opens_s - window.interval_s and first_s < opens_s + SEEN_BEFORE_S:
            return []
        ended = np.flatnonzero(since_s - first_s < later_s)
        alone = len(ended) == 1
        holding_s = later_s if alone else UNORDERED_S + later_s
        until_s = np.minimum(since_s, _holding_s(window, first_s))
        # A node whose readings are missing may have ended when the others did.
        free_s = max(item.free_s for item in freed if item.since_s - first_s < later_s)
        held = int((until_s >= max(first_s + holding_s, free_s)).sum())
        if held < HOLDING_RATIO * (len(window.nodes) - len(ended)) or held < len(ended):
            return []
        if len(window.nodes) == 2 and not self._others_spin(window, int(ended[0]), first_s):
            return []
        if self._failing_memory(window, {window.nodes[node] for node in ended}, first_s):
            return []
        back_s = _back_s(window, int(ended[0]), first_s, self._silent_s(window)) if alone else None
        if back_s is not None and _restarted(window, int(ended[0]), freed, first_s):
            return [self._restarted_verdict(window, window.nodes[int(ended[0])], first_s, back_s)]
        first = min((item for item in freed if item.since_s == first_s), key=lambda item: item.column)
        names = [window.nodes[node] for node in ended]
        return [self._verdict(window, names, first.column, first_s, back_s or first_s, held)]

    def _stopped_with(self, window: Window, ended_s: float) -> bool:
        """Whether the others have only waited since that exit, or since later if it cannot be their own pause."""
        idle_s = idle_since_s(window)
        near_s = TOGETHER_S + 2 * window.interval_s
        if idle_s is None or not -near_s <= idle_s - ended_s <= STEP_S_MAX + near_s:
            return False
        return idle_s - ended_s <= near_s or progress(window, self.patience).ripe

    def _others_spin(self, window: Window, ended: int, since_s: float) -> bool:
        """Whether every GPU of the other node runs a kernel that can only be waiting."""
        spins = waiting(window, since_s)
        return spins is not None and bool((spins[window.node_of != ended] == 1.0).all())

    def _failing_memory(self, window: Window, nodes: set[str], since_s: float) -> bool:
        """Whether a GPU of these nodes counts errors that its own detector may yet name as the cause."""
        counter = window.device.get(COUNTER)
        if counter is None or window.now_s >= since_s + window.interval_s + 2 * kernel_word_s(window):
            return False
        return any(window.series[column].node in nodes for column in grown(counter).tolist())

    def _verdict(
        self, window: Window, ended: list[str], column: int, since_s: float, seen_s: float, held: int
    ) -> Verdict:
        series = window.series[column]
        alone = len(ended) == 1
        who = f"the process on {series} has" if alone else f"processes of {len(ended)} nodes have"
        waits = f"{held} other node{' still waits' if held == 1 else 's still wait'}"
        return Verdict(
            detector=self.name,
            fault="process_crash",
            job=window.job,
            nodes=(series.node,) if alone else (),
            node=series.node if alone else None,
            device=series.device if alone else None,
            confidence=CONFIDENCE if window.now_s >= seen_s + kernel_word_s(window) else CONFIDENCE_EARLY,
            onset_s=since_s,
            summary=f"{who} ended while {waits} for {'it' if alone else 'them'}",
            evidence=(
                Evidence(MEMORY_METRIC, series.node, series.device, "freed", None, None, "bytes"),
                Evidence("gpu_power_watts", None, None, "fell to that of waiting"),
            ),
            kinds=frozenset({"gpu_memory_freed", "gpu_activity"}),
        )

    def _silent_s(self, window: Window) -> float:
        return silence(window, self.intervals, self.floor_s).limit_s

    def _restarted_verdict(self, window: Window, node: str, since_s: float, back_s: float) -> Verdict:
        away_s = back_s - since_s
        return Verdict(
            detector=self.name,
            fault="node_unreachable",
            job=window.job,
            nodes=(node,),
            node=node,
            device=None,
            confidence=CONFIDENCE_RESTARTED,
            onset_s=since_s,
            summary=(
                f"{node} fell silent as the job stopped and came back {away_s:.0f} s later, its agent started anew and"
                " none of its processes there: it has restarted"
            ),
            evidence=(
                Evidence("node_silence_seconds", node, None, away_s, 0.0, self._silent_s(window), "seconds"),
                Evidence(MEMORY_METRIC, node, None, "freed", None, None, "bytes"),
                Evidence("gpu_power_watts", None, None, "fell to that of waiting"),
            ),
            kinds=frozenset({"silence", "gpu_memory_freed", "gpu_activity"}),
        )


def _back_s(window: Window, node: int, since_s: float, away_s: float) -> float | None:
    """Return when a node that fell silent at ``since_s`` reported again; None if it was not away for that long."""
    own = np.isfinite(window.device[MEMORY_METRIC][:, window.node_of == node]).any(axis=1)
    heard_s = window.times_s[own & (window.times_s > since_s)]
    return float(heard_s[0]) if len(heard_s) and heard_s[0] - since_s > away_s else None


def _restarted(window: Window, node: int, freed: list[Freed], since_s: float) -> bool:
    """Whether the node's agent has started since, without a goodbye, and none of its GPUs holds its earlier memory."""
    name = window.nodes[node]
    kinds = {event.kind for event in window.events if event.node == name and event.time_s > since_s}
    held = set(np.flatnonzero(window.node_of == node).tolist()) - {item.column for item in freed}
    return not held and "agent_start" in kinds and "agent_stop" not in kinds


def _holding_s(window: Window, since_s: float) -> Floats:
    """Return until when each node has held memory without a break after ``since_s``: (N,), -inf if never."""
    result = np.full(len(window.nodes), -np.inf)
    np.maximum.at(result, window.node_of, held_until_s(window, since_s))
    return result
