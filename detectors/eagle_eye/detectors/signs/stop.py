"""Whether the job has stopped, and whether a device's error lies where its cause does: shortly before, not after."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eagle_eye.detectors.signs.exits import Exit, unplanned_exits
from eagle_eye.detectors.signs.gpu_errors import EXIT_AFTER_S, EXIT_BEFORE_S, exit_near
from eagle_eye.detectors.signs.progress import PROMPT_S, Patience, progress, typical_step_s
from eagle_eye.detectors.types import Blind, Evidence, Window

LEAD_S, LEAD_STEPS = 10.0, 2.0  # what broke so long before the last step ended can still have stopped the next one
LAG_S = 30.0  # watchdogs of cards and CPUs tell so long after it happened (10 to 22 s, and their own interval)


@dataclass(frozen=True, slots=True)
class Stop:
    """The end of the job's progress.

    ``since_s`` is when it made its last step, ``died_s`` when the first rank ended (inf: none has), ``lead_s`` how long
    before ``since_s`` its cause may lie.
    """

    since_s: float
    died_s: float
    lead_s: float
    exits: tuple[Exit, ...]
    evidence: Evidence

    @property
    def kind(self) -> str:
        """The kind of evidence that it is."""
        return "exit" if self.exits else "standstill"

    def beside(self, node: str, time_s: float) -> bool:
        """Whether what happened on the node at a moment may be the stop's cause: never what came after a death."""
        if time_s > self.died_s + EXIT_BEFORE_S or time_s > self.since_s + LAG_S + self.lead_s:
            return False
        if time_s >= self.since_s - self.lead_s:
            return True
        # Ranks may live on for a moment. Where one elsewhere died of something of its own, that is the nearer cause.
        causes = {item.node for item in self.exits if item.cause}
        return causes <= {node} and exit_near(self.exits, node, time_s) is not None


def stop_of(window: Window, patience: Patience) -> Stop | None:
    """Return the job's stop; None while it goes on, while a pause may still end, and where nobody can tell."""
    exits = tuple(unplanned_exits(window))
    lead_s = LEAD_S + LEAD_STEPS * max(typical_step_s(window), window.interval_s)
    if exits:
        first = exits[0]
        evidence = Evidence("process_exit", first.node, first.device, first.how)
        if math.isfinite(window.last_step):
            return Stop(min(window.advanced_s, first.time_s), first.time_s, lead_s, exits, evidence)
        return Stop(first.time_s, first.time_s, EXIT_AFTER_S, exits, evidence)
    try:
        state = progress(window, patience)
    except Blind:
        return None
    if not state.stopped or state.standstill_s < PROMPT_S:
        return None
    return Stop(state.advanced_s, math.inf, lead_s, (), state.evidence)
