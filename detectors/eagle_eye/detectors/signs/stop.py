"""Decides whether the job has stopped, and whether a device error came shortly before the stop, as a cause does."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eagle_eye.detectors.signs.exits import Exit, unplanned_exits
from eagle_eye.detectors.signs.gpu_errors import EXIT_AFTER_S, EXIT_BEFORE_S, exit_near
from eagle_eye.detectors.signs.progress import PROMPT_S, Patience, progress, typical_step_s
from eagle_eye.detectors.types import Blind, Evidence, Window

LEAD_S, LEAD_STEPS = 10.0, 2.0  # a part that broke this long before the last step may still have stopped the next
LAG_S = 30.0  # delay of device and CPU watchdogs (10 to 22 s, plus their own interval)


@dataclass(frozen=True, slots=True)
class Standstill:
    """The end of the job's progress.

    ``since_s`` is when it made its last step, ``died_s`` when the first rank ended (inf: none has), ``lead_s`` how long
    before ``since_s`` its cause may have occurred.
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
        """Whether an event on the node may be the stop's cause: never one that came after a rank's death."""
        if time_s > self.died_s + EXIT_BEFORE_S or time_s > self.since_s + LAG_S + self.lead_s:
            return False
        if time_s >= self.since_s - self.lead_s:
            return True
        # Ranks may live on for a moment. If one elsewhere died of its own error, that is the closer cause.
        causes = {item.node for item in self.exits if item.cause}
        return causes <= {node} and exit_near(self.exits, node, time_s) is not None


def stop_of(window: Window, patience: Patience) -> Standstill | None:
    """Return the job's stop; None while it goes on, while a pause may still end, and if unknown."""
    exits = tuple(unplanned_exits(window))
    lead_s = LEAD_S + LEAD_STEPS * max(typical_step_s(window), window.interval_s)
    if exits:
        first = exits[0]
        evidence = Evidence("process_exit", first.node, first.device, first.how)
        if math.isfinite(window.last_step):
            return Standstill(min(window.advanced_s, first.time_s), first.time_s, lead_s, exits, evidence)
        return Standstill(first.time_s, first.time_s, EXIT_AFTER_S, exits, evidence)
    try:
        state = progress(window, patience)
    except Blind:
        return None
    if not state.stopped or state.standstill_s < PROMPT_S:
        return None
    return Standstill(state.advanced_s, math.inf, lead_s, (), state.evidence)
