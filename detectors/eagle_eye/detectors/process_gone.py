"""A process that ended where nobody reports how processes end: its GPU's memory is free, and the rest waits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.signs.without_hook import Freed, freed_memory, idle_since_s, node_of
from eagle_eye.detectors.types import Evidence, Verdict, Window

NODES_MIN = 3  # of two nodes nobody can say who followed whom
HOLDING_RATIO = 0.5  # of the other nodes must still hold their memory: ends that are meant take all along
LATER_S = 3.0  # others' ends that come this much later, and two intervals, are echoes
INTERVAL_S_MAX = 5.0  # rows further apart do not show who was first
TOGETHER_S = 10.0  # the others began to wait at the same moment
CONFIDENCE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGone:
    """Finds ``process_crash`` in a job without the hook, by ``gpu_memory_used_bytes`` (T, S) and the GPUs' work.

    A process that ends frees its GPU's memory (below a tenth and 2 GiB) while its peers wait in a collective: they hold
    theirs, and their power falls to that of waiting. One node must have been first by three seconds while most of the
    others still held on; where all let go together the job has ended, and whether that was meant only the scheduler
    knows. It asks for a restart and never accuses hardware. Silent where ranks report steps or ends, in jobs of fewer
    than three nodes and with rows more than five seconds apart. Cannot see: why the process ended.
    """

    name: str = "process_gone"

    def detect(self, window: Window) -> list[Verdict]:
        """Return at most one verdict."""
        if np.isfinite(window.last_step) or window.interval_s > INTERVAL_S_MAX or len(window.nodes) < NODES_MIN:
            return []
        freed = freed_memory(window)
        if not freed or any(event.kind == "process_exit" for event in window.events):
            return []
        first = min(freed, key=lambda item: (item.since_s, item.column))
        others = self._others(window, freed, first)
        later_s = max(LATER_S, 2 * window.interval_s)
        idle_s = idle_since_s(window)
        if others is None or idle_s is None or abs(idle_s - first.since_s) > TOGETHER_S + 2 * window.interval_s:
            return []
        held = sum(other_s - first.since_s >= later_s for other_s in others)
        if held < HOLDING_RATIO * len(others) or any(other_s - first.since_s < later_s for other_s in others):
            return []
        return [self._verdict(window, first, held)]

    def _others(self, window: Window, freed: list[Freed], first: Freed) -> list[float] | None:
        """Return until when each other node held its memory, None when that cannot be known yet."""
        mine = int(window.node_of[first.column])
        until_s = np.full(len(window.nodes), float(window.times_s[-1]))
        for node, item in zip(node_of(window, freed).tolist(), freed, strict=True):
            until_s[node] = min(until_s[node], item.since_s)
        return np.delete(until_s, mine).tolist()

    def _verdict(self, window: Window, first: Freed, held: int) -> Verdict:
        series = window.series[first.column]
        return Verdict(
            detector=self.name,
            fault="process_crash",
            job=window.job,
            nodes=(series.node,),
            node=series.node,
            device=series.device,
            confidence=CONFIDENCE,
            onset_s=first.since_s,
            summary=f"the process on {series} has ended while {held} other nodes still wait for it",
            evidence=(
                Evidence("gpu_memory_used_bytes", series.node, series.device, "freed", None, None, "bytes"),
                Evidence("gpu_power_watts", None, None, "fell to that of waiting"),
            ),
            kinds=frozenset({"gpu_memory_freed", "gpu_activity"}),
        )
