"""Chooses how often ranks capture a step, alike on all, by how many recent captures became whole. Pure.

A step is whole only where every rank has captured it. Where copies take longer than a step, a rank without a free slot
skips one, and ranks may skip different steps, so that none ever becomes whole. Fewer captures, made by all ranks,
become whole more often.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

LOOK_BACK = 8
SHRINK_AFTER = 32  # captures that all became whole
SETTLING = 4  # captures that were in progress when the interval changed
HEARD_WITHIN = 4  # missed steps, within which every rank has reported whether it missed the one before them
EVERY_MAX = 256


@dataclass
class CaptureInterval:
    """A rank makes the last of each ``every`` captures. Doubles when fewer than half of them become whole.

    Steps that all ranks skip do not count as lost: they capture the next one together. Nor do steps while a rank's
    store is unavailable. It is a power of two: captures due at the longer of two intervals are also due at the shorter
    one, so ranks that switch at different steps still share some.
    """

    ranks: frozenset[int]
    every: int = 1
    _unsettled: int = 0
    _judged_step: int = -1
    _missed_by: dict[int, set[int]] = field(default_factory=dict)
    _heard: dict[int, int] = field(default_factory=dict)
    _outcomes: deque[bool] = field(default_factory=lambda: deque(maxlen=SHRINK_AFTER))

    def heard(self, rank: int, step: int) -> None:
        """Record that a rank's store has reported on a step."""
        self._heard[rank] = max(step, self._heard.get(rank, -1))

    def whole(self) -> None:
        """Record that a captured step has become whole."""
        self._came_out(whole=True)

    def missed(self, step: int, rank: int | None) -> None:
        """Record that a step will not become whole: the rank has not captured it, or an unknown one (None)."""
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
