"""Every how many captures a step is kept, for all ranks alike: by how many of the last ones became whole. Pure.

A step is whole only where every rank has captured it. Where copies take longer than a step, a rank that finds no free
slot skips one; and what one rank has captured another may have skipped, step after step, so that none is ever whole.
Fewer captures, which all ranks make, are whole more often.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

LOOK_BACK = 8
SHRINK_AFTER = 32  # that all became whole
SETTLING = 4  # captures that were on their way when the interval changed
HEARD_WITHIN = 4  # missed steps, by which every rank has said whether it missed the one before them
EVERY_MAX = 256


@dataclass
class CaptureInterval:
    """Of each ``every`` captures a rank makes the last. It doubles where fewer than half of them become whole.

    What all ranks skip alike is no such loss: they capture the next step together. Nor is what becomes of steps while a
    rank's store is away. A power of two: what is due by the longer of two intervals is due by the shorter one, too, so
    ranks that hear of a change at different steps have common ones all the same.
    """

    ranks: frozenset[int]
    every: int = 1
    _unsettled: int = 0
    _judged_step: int = -1
    _missed_by: dict[int, set[int]] = field(default_factory=dict)
    _heard: dict[int, int] = field(default_factory=dict)
    _outcomes: deque[bool] = field(default_factory=lambda: deque(maxlen=SHRINK_AFTER))

    def heard(self, rank: int, step: int) -> None:
        """A rank's store has said something of a step."""
        self._heard[rank] = max(step, self._heard.get(rank, -1))

    def whole(self) -> None:
        """A captured step has become whole."""
        self._came_out(whole=True)

    def missed(self, step: int, rank: int | None) -> None:
        """A step will not become whole: the rank has not captured it, or one of which it is not known which (None)."""
        if rank is not None:
            self.heard(rank, step)
        if step <= self._judged_step:
            return
        self._missed_by.setdefault(step, set()).update(() if rank is None else (rank,))
        if len(self._missed_by) > HEARD_WITHIN:
            judged = self._judged_step = min(self._missed_by)
            missed_by_all = self._missed_by.pop(judged) >= self.ranks
            if not missed_by_all and all(self._heard.get(one, -1) >= judged for one in self.ranks):
                self._came_out(whole=False)

    def _came_out(self, *, whole: bool) -> None:
        if self._unsettled:
            self._unsettled -= 1
            return
        self._outcomes.append(whole)
        recent = list(self._outcomes)[-LOOK_BACK:]
        if len(recent) == LOOK_BACK and 2 * sum(recent) < LOOK_BACK and self.every < EVERY_MAX:
            self._change(2 * self.every)
        elif len(self._outcomes) == SHRINK_AFTER and all(self._outcomes) and self.every > 1:
            self._change(self.every // 2)

    def _change(self, every: int) -> None:
        self.every, self._unsettled = every, SETTLING
        self._outcomes.clear()
