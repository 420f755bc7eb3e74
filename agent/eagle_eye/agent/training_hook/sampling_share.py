"""Chooses how often to sample a step, so that sampling costs at most a share of the training time."""

from __future__ import annotations

import math
from collections import deque

LOOKS_JUDGED = 8  # the first steps, all sampled; after that as many recent samples decide


class Share:
    """``every``: sample every, every second, every fourth step and so on.

    Powers of two, so that the ranks of a job mostly sample the same steps.
    """

    __slots__ = ("_cost_ratios", "_every_max", "_ratio_max", "every")

    def __init__(self, ratio_max: float, every_max: int) -> None:
        """``ratio_max``: sampling's largest share of all steps' time. Every ``every_max``-th step is always sampled."""
        self.every = 1
        self._ratio_max = ratio_max
        self._every_max = every_max
        self._cost_ratios: deque[float] = deque(maxlen=LOOKS_JUDGED)

    def looked(self, cost_s: float, step_s: float) -> None:
        """Record that sampling a step of ``step_s`` cost ``cost_s``: choose the rate again."""
        self._cost_ratios.append(cost_s / step_s)
        if len(self._cost_ratios) == LOOKS_JUDGED:
            # The least of several, since a process that was preempted meanwhile measures others' work too.
            affordable = min(self._cost_ratios) / self._ratio_max
            every = 1 << math.ceil(math.log2(affordable)) if affordable > 1.0 else 1
            self.every = min(self._every_max, every)

    def seldom(self) -> None:
        """Nothing to sample: use the lowest rate."""
        self.every = self._every_max
