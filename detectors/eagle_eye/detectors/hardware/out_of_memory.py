"""Detects a training process killed by the kernel for memory, if exits are not reported."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.signs.exits import unplanned_exits
from eagle_eye.detectors.signs.gpu_errors import went_on
from eagle_eye.detectors.signs.memory_kills import MemoryKill, memory_kills
from eagle_eye.detectors.signs.progress import Patience, progress
from eagle_eye.detectors.signs.without_hook import freed_memory
from eagle_eye.detectors.types import Evidence, Verdict, Window

RANK_METRICS = ("train_step", "nccl_sequence")
GONE_LINES = 2  # consecutive rows in which a rank reports nothing while others do
BEFORE_LINES = 8
CONFIDENCE_GONE, CONFIDENCE_STOPPED, CONFIDENCE_EARLY = 0.97, 0.95, 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """Finds ``out_of_memory`` without a ``process_exit``: an OOM kill on a node after which the job made no more steps.

    The kernel may kill any process (an exporter, a log shipper), so a kill alone means nothing. It counts if a rank of
    that node stops reporting while others do not (``train_step`` or ``nccl_sequence`` (T, S) missing for two rows), or
    if the killed process is named like a training process and the job has stood still since. Blind as ``progress`` is.
    If exits are reported, ProcessExit handles it. Cannot see: a kill that is not in the kernel log.
    """

    patience: Patience
    name: str = "out_of_memory"

    def detect(self, window: Window) -> list[Verdict]:
        """Return one verdict for each node on which a kill ended the training."""
        kills = memory_kills(window) if window.events else []
        if not kills or unplanned_exits(window):
            return []
        latest = {kill.node: kill for kill in kills if not went_on(window, kill.time_s)}
        return [verdict for kill in latest.values() for verdict in self._judge(window, kill)]

    def _judge(self, window: Window, kill: MemoryKill) -> list[Verdict]:
        freed = [item.column for item in freed_memory(window) if window.series[item.column].node == kill.node]
        if freed:
            series = window.series[freed[0]]
            evidence = Evidence("gpu_memory_used_bytes", series.node, series.device, "freed")
            return [
                self._verdict(window, kill, CONFIDENCE_GONE, evidence, "gpu_memory_freed", "its GPU's memory is free")
            ]
        gone = _rank_gone(window, kill)
        if gone is not None:
            evidence = Evidence("train_step", kill.node, window.series[gone].device, "not reported any more")
            reason = f"rank {window.series[gone].rank} on it says nothing any more"
            return [self._verdict(window, kill, CONFIDENCE_GONE, evidence, "rank_gone", reason)]
        if not kill.of_training:
            return []
        state = progress(window, self.patience)
        if not state.stopped:
            return []
        evidence = state.evidence
        confidence = CONFIDENCE_STOPPED if state.prompt else CONFIDENCE_EARLY
        reason = str(state)
        return [self._verdict(window, kill, confidence, evidence, "standstill", reason)]

    def _verdict(
        self, window: Window, kill: MemoryKill, confidence: float, other: Evidence, kind: str, reason: str
    ) -> Verdict:
        return Verdict(
            detector=self.name,
            fault="out_of_memory",
            job=window.job,
            nodes=(kill.node,),
            node=kill.node,
            device=other.device,
            confidence=confidence,
            onset_s=min(kill.time_s, window.now_s),
            summary=f"the kernel killed {kill.process or 'a process'} on {kill.node} for memory, and {reason}",
            evidence=(kill.evidence, other),
            kinds=frozenset({"oom_kill", kind}),
        )


def _rank_gone(window: Window, kill: MemoryKill) -> int | None:
    """Return a rank of the node that has reported nothing since the kill while others do, None if all still report."""
    mine = np.flatnonzero(window.node_of == window.nodes.index(kill.node))
    for metric in RANK_METRICS:
        values = window.device.get(metric)
        if values is None or len(values) <= GONE_LINES or window.times_s[-GONE_LINES] < kill.time_s:
            continue
        now = np.isfinite(values[-GONE_LINES:]).sum(axis=0) > 0
        before = np.isfinite(values[-GONE_LINES - BEFORE_LINES : -GONE_LINES][:, mine]).sum(axis=0) > 0
        gone = mine[before & ~now[mine]]
        if len(gone) and 2 * int(now.sum()) > len(now):
            return int(gone[0])
    return None
