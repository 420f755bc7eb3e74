"""How often to look into a step, so that looking costs no more than a share of the training's time."""

from __future__ import annotations

import math
from collections import deque

LOOKS_JUDGED = 8  # the first so many steps are all looked at; from then on the last so many looks decide


class Share:
    """``every``: which steps to look at. Each, every second, every fourth and so on.

    Powers of two, so that the ranks of a job mostly agree on the steps that they look at.
    """

    __slots__ = ("_cost_ratios", "_every_max", "_ratio_max", "every")

    def __init__(self, ratio_max: float, every_max: int) -> None:
        """``ratio_max``: what looking may cost of all steps' time. However dear, each ``every_max``-th is looked at."""
        self.every = 1
        self._ratio_max = ratio_max
        self._every_max = every_max
        self._cost_ratios: deque[float] = deque(maxlen=LOOKS_JUDGED)

    def looked(self, cost_s: float, step_s: float) -> None:
        """Looking at a step that took ``step_s`` cost ``cost_s`` of it: choose anew how often to look."""
        self._cost_ratios.append(cost_s / step_s)
        if len(self._cost_ratios) == LOOKS_JUDGED:
            # The least of several, since a process that lost its CPU meanwhile measures others' work too.
            affordable = min(self._cost_ratios) / self._ratio_max
            every = 1 << math.ceil(math.log2(affordable)) if affordable > 1.0 else 1
            self.every = min(self._every_max, every)

    def seldom(self) -> None:
        """There is nothing to see: look as seldom as may be."""
        self.every = self._every_max
