"""A training process that ended by itself, and which of several ends came first."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from eagle_eye.detectors.exits import Exit, unplanned_exits
from eagle_eye.detectors.types import Evidence, Verdict, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """Names the node whose process ended first, by how it ended and not by when.

    One rank's death kills its peers within milliseconds, so that clocks cannot order the ends; but the
    peers die of a communication error and say so, while the first dies of a signal or an error of its own.
    The verdict waits ``settle_s`` for the others' ends to arrive, and for a node that has gone silent to be
    known as such (``silent_s``). When no end stands out the job's crash is reported without a culprit. Cannot see:
    an exit that no agent watched.
    """

    settle_s: float
    silent_s: float
    name: str = "process_exit"

    def detect(self, window: Window) -> list[Verdict]:
        """Return at most one verdict: the crash of this attempt."""
        exits = unplanned_exits(window)
        if not exits:
            return []
        since_s = window.now_s - exits[0].time_s
        if since_s < self.settle_s:
            return []
        causes = [item for item in exits if item.cause]
        if not causes and since_s < self.silent_s + self.settle_s and self._someone_unheard(window, exits):
            return []  # its silence may be the cause; the next seconds tell
        out_of_memory = {e.node for e in window.events if e.kind == "oom_kill"}
        if not out_of_memory and _stopped_from_outside(causes):
            return []
        nodes = sorted({item.node for item in causes})
        if len(nodes) == 1:
            return [self._verdict(window, causes[0], (nodes[0],), len(exits), nodes[0] in out_of_memory)]
        return [self._verdict(window, (causes or exits)[0], (), len(exits), oom=False)]

    def _someone_unheard(self, window: Window, exits: list[Exit]) -> bool:
        gone = {item.node for item in exits}
        return any(
            node not in gone and heard_s < exits[0].time_s + window.interval_s
            for node, heard_s in zip(window.nodes, window.heard_s, strict=True)
        )

    def _verdict(self, window: Window, first: Exit, nodes: tuple[str, ...], count: int, oom: bool) -> Verdict:
        fault = "out_of_memory" if oom else "process_crash"
        if nodes:
            others = f"; {count - 1} other ranks followed" if count > 1 else ""
            summary = f"rank {first.rank} on {first.node} {first.how}{_quoted(first)}{others}"
        else:
            summary = f"{count} ranks ended and none stands out as the first{_quoted(first)}"
        return Verdict(
            detector=self.name,
            fault=fault,
            job=window.job,
            nodes=nodes,
            node=nodes[0] if nodes else None,
            device=first.device if nodes else None,
            confidence=0.99 if nodes else 0.8,
            onset_s=first.time_s,
            summary=summary,
            evidence=(
                Evidence("process_exit", first.node, first.device, first.how),
                Evidence("process_exits", None, None, float(count), None, 0.0, "processes"),
            ),
            kinds=frozenset({"exit"}),
            fact=True,
        )


def _stopped_from_outside(causes: list[Exit]) -> bool:
    """Whether ranks of several nodes died of SIGKILL and of nothing else: a scheduler ends jobs so, faults do not."""
    return len({item.node for item in causes}) > 1 and all(item.exit_code == -signal.SIGKILL for item in causes)


def _quoted(item: Exit) -> str:
    last = item.error.strip().splitlines()[-1:] or [""]
    return f" ({last[0][:160]})" if last[0] else ""
