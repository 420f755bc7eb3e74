"""A host that failed: its kernel panicked, or its processor or memory reported an error that nothing corrected."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from eagle_eye.detectors.signs.attributes import text
from eagle_eye.detectors.signs.exits import unplanned_exits
from eagle_eye.detectors.signs.gpu_errors import BEFORE_START_S, went_on
from eagle_eye.detectors.signs.progress import Patience, progress
from eagle_eye.detectors.types import Blind, Evidence, Happening, Verdict, Window

SILENT_INTERVALS = 1.5  # missed: with a panic that is certain, silence need not last longer
SILENT_S = 1.5  # at least
NEAR_S = 60.0  # a panic's record may carry the time of the crash or of the boot after it
CONFIDENCE = 0.99
# What the kernel calls errors that were corrected or put off, and hurt nobody (Linux, EDAC and MCE messages).
CORRECTED = re.compile(
    r"(?<!un)correct(ed|able) (error|memory|events?)|\bCE\b|deferred error|no action required", re.IGNORECASE
)
UNCORRECTED = re.compile(r"uncorrect|fatal|\bUE\b|\bPCC\b|processor context corrupt", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostErrors:
    """Finds ``node_unreachable`` by its cause: a kernel panic, or an uncorrected machine check that took the node.

    A panic is a fact once the node is silent or the job makes no more step; the same holds for a machine check when
    both are seen. An uncorrected machine check of a node that lives asks for a drain: the fault named is what comes
    next (the kernel panics on the next one that it cannot contain), and its repair, a reboot, is the right one.
    Corrected errors are no news (every fleet has them daily). Reads events; ``heard_s`` (N,) and the job's progress
    tell the rest. Source: Linux, x86 MCE handling; ByteRobust (SOSP 2025): kernel faults known within 2 s. Cannot see:
    panics that nobody records; NodeSilent then finds the silence.
    """

    patience: Patience
    name: str = "host_errors"

    def detect(self, window: Window) -> list[Verdict]:
        """Return one verdict for each node whose host failed."""
        found: dict[str, Happening] = {}
        for event in window.events:
            if (
                event.kind not in ("kernel_panic", "machine_check")
                or event.node is None
                or event.node not in window.nodes
            ):
                continue
            if event.time_s < window.started_s - BEFORE_START_S or not _serious(event):
                continue
            known = found.get(event.node)
            if known is None or (known.kind == "machine_check" and event.kind == "kernel_panic"):
                found[event.node] = event
        return [verdict for node, event in found.items() for verdict in self._judge(window, node, event)]

    def _judge(self, window: Window, node: str, event: Happening) -> list[Verdict]:
        silence_s = self._silence_s(window, node)
        limit_s = max(SILENT_S, SILENT_INTERVALS * window.interval_s)
        silent = silence_s > limit_s
        stopped = self._stopped(window, event)
        evidence = [Evidence(event.kind, node, None, text(event.attributes, "text")[:160] or event.kind)]
        kinds = {event.kind}
        if silent:
            evidence.append(Evidence("node_silence_seconds", node, None, silence_s, 0.0, limit_s, "seconds"))
            kinds.add("silence")
        if stopped:
            evidence.append(Evidence("train_step", None, None, "none since"))
            kinds.add("standstill")
        asks: Literal["drain_node"] | None = None
        what = "the kernel panicked" if event.kind == "kernel_panic" else "a machine check was not corrected"
        if event.kind == "kernel_panic" and (silent or stopped):
            tail = "the node is silent" if silent else "the job has stopped"
        elif event.kind == "machine_check" and silent and stopped:
            tail = "the node is silent and the job has stopped"
        elif event.kind == "machine_check" and not silent:
            tail, asks = "the node lives and the job may go on", "drain_node"
        else:
            return []
        return [self._verdict(window, node, event, f"{what} on {node}: {tail}", evidence, kinds, asks)]

    def _verdict(
        self,
        window: Window,
        node: str,
        event: Happening,
        summary: str,
        evidence: list[Evidence],
        kinds: set[str],
        asks: Literal["drain_node"] | None,
    ) -> Verdict:
        return Verdict(
            detector=self.name,
            fault="node_unreachable",
            job=window.job,
            nodes=(node,),
            node=node,
            device=None,
            confidence=CONFIDENCE,
            onset_s=min(event.time_s, window.now_s),
            summary=summary,
            evidence=tuple(evidence),
            kinds=frozenset(kinds),
            fact=True,
            asks=asks,
        )

    def _silence_s(self, window: Window, node: str) -> float:
        index = window.nodes.index(node)
        if window.farewell[index]:
            return 0.0
        return window.now_s - max(float(window.heard_s[index]), window.watching_since_s)

    def _stopped(self, window: Window, event: Happening) -> bool:
        if any(item.time_s >= event.time_s - NEAR_S for item in unplanned_exits(window)):
            return True
        try:
            state = progress(window, self.patience)
        except Blind:
            return False
        return state.stopped and not went_on(window, event.time_s)


def _serious(event: Happening) -> bool:
    """Whether the event is a panic, or a machine check not said to be corrected: exceptions are raised for no less."""
    said = text(event.attributes, "text", "severity")
    return event.kind == "kernel_panic" or bool(UNCORRECTED.search(said)) or not CORRECTED.search(said)
