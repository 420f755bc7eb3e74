"""A node that is silent: its agent sends nothing and said no goodbye."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.exits import unplanned_exits
from eagle_eye.detectors.progress import Patience, progress
from eagle_eye.detectors.types import Blind, Evidence, Verdict, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSilent:
    """Names nodes that have fallen silent, and says whether the job stopped with them.

    Silence alone is never guilt: an upgrade, an expired token and a management network that reconverges are
    silent too. Only when the job has stopped as well (no step although one is due, or ranks elsewhere
    died) does the verdict carry a second kind of evidence. When most of a job's nodes are silent the fault is
    likelier between them and us: Blind. Cannot see: a node whose agent lives on while its GPUs are gone.
    """

    patience: Patience
    intervals: float
    floor_s: float
    name: str = "node_silent"

    def detect(self, window: Window) -> list[Verdict]:
        """Return one verdict for each silent node, [] when all were heard."""
        heard_s = np.maximum(window.heard_s, window.watching_since_s)
        silence_s = np.where(window.farewell, 0.0, window.now_s - heard_s)
        limit_s = max(self.floor_s, self.intervals * window.interval_s)
        silent = np.flatnonzero(silence_s > limit_s)
        if len(silent) == 0:
            return []
        if 2 * len(silent) > len(window.nodes):
            raise Blind(f"{len(silent)} of {len(window.nodes)} nodes are silent: likelier the way to them than they")
        stopped, why = self._stopped(window)
        return [self._verdict(window, int(i), float(silence_s[i]), limit_s, stopped, why) for i in silent]

    def _stopped(self, window: Window) -> tuple[bool, Evidence | None]:
        exits = unplanned_exits(window)
        if exits:
            first = exits[0]
            return True, Evidence("process_exit", first.node, first.device, f"rank {first.rank} {first.how}")
        try:
            state = progress(window, self.patience)
        except Blind:
            return False, None
        return state.prompt, Evidence(
            "train_step_standstill_seconds", None, None, state.standstill_s, None, state.due_s, "seconds"
        )

    def _verdict(
        self,
        window: Window,
        index: int,
        silence_s: float,
        limit_s: float,
        stopped: bool,
        why: Evidence | None,
    ) -> Verdict:
        node = window.nodes[index]
        evidence = [Evidence("node_silence_seconds", node, None, silence_s, 0.0, limit_s, "seconds")]
        if why is not None:
            evidence.append(why)
        tail = "and the job has stopped" if stopped else "while the job goes on"
        return Verdict(
            detector=self.name,
            fault="node_unreachable",
            job=window.job,
            nodes=(node,),
            node=node,
            device=None,
            confidence=0.97 if stopped else 0.5,
            onset_s=window.now_s - silence_s,
            summary=f"{node} has been silent for {silence_s:.1f} s without a goodbye, {tail}",
            evidence=tuple(evidence),
            kinds=frozenset({"silence", "standstill"} if stopped else {"silence"}),
        )
