"""Detects a training process killed by the kernel for memory, if exits are not reported."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_eye.detectors.signs.exits import unplanned_exits
from eagle_eye.detectors.signs.gpu_errors import went_on
from eagle_eye.detectors.signs.memory_kills import MemoryKill, memory_kills
from eagle_eye.detectors.signs.progress import Patience, progress
from eagle_eye.detectors.signs.vanished import without_values
from eagle_eye.detectors.signs.without_hook import freed_memory
from eagle_eye.detectors.types import Evidence, Verdict, Window

RANK_METRICS = ("train_step", "nccl_sequence")
KILL_INTERVALS = 3.0  # between a rank's last report and the kernel's line
CONFIDENCE_GONE, CONFIDENCE_STOPPED, CONFIDENCE_EARLY = 0.97, 0.95, 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """Finds ``out_of_memory`` without a ``process_exit``: an OOM kill on a node after which the job made no more steps.

    The kernel may kill any process (an exporter, a log shipper), so a kill alone means nothing. It counts if a rank of
    that node stops reporting while others do not (its ``train_step`` and ``nccl_sequence`` (T, S) have vanished), or if
    the killed process is named like a training process and the job has stood still since. Blind as ``progress`` is. If
    exits are reported, ProcessExit handles it. Cannot see: a kill that is not in the kernel log.
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
    for item in without_values(window, RANK_METRICS):
        silent_since_kill = abs(item.since_s - kill.time_s) <= KILL_INTERVALS * window.interval_s
        if silent_since_kill and window.series[item.column].node == kill.node:
            return item.column
    return None
