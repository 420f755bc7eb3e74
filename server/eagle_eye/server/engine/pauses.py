"""The job's pace, and the pauses in which it made no step and yet nothing was wrong: its patience is learnt of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from eagle_eye.detectors.types import Pause, Verdict

PAUSES_KEPT, PACES_KEPT = 64, 32
PAUSE_STEPS = 3.0  # a gap between steps longer than this many typical ones is a pause
STEPS_FOR_PACE = 5  # steps before the pace is known well enough to call a gap a pause
STANDSTILLS = frozenset({"hang", "network_hang"})


class PauseLog:
    """Keeps the newest pauses, oldest first, and the pace of one attempt that tells a pause from a step.

    ``earlier`` are those of the attempts before.
    """

    def __init__(self, earlier: Sequence[Pause] = ()) -> None:
        self._pauses: deque[Pause] = deque(earlier, maxlen=PAUSES_KEPT)
        self._paces: deque[float] = deque(maxlen=PACES_KEPT)
        self._steps_seen = 0
        self._accused = False

    @property
    def pauses(self) -> tuple[Pause, ...]:
        """What ended well, oldest first."""
        return tuple(self._pauses)

    @property
    def pace_s(self) -> float | None:
        """The median time of a step lately; None before the second."""
        return sorted(self._paces)[len(self._paces) // 2] if self._paces else None

    def note_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        """Remember of the standstill under way that a node was told of as the one that holds the job up."""
        self._accused = self._accused or any(v.fault in STANDSTILLS and v.nodes for v in verdicts)

    def note_steps(self, gap_s: float, steps: float, interval_s: float) -> None:
        """Take in that so many steps ended so long after those before; keep a gap far beyond the pace as a pause."""
        self._steps_seen += 1
        pace_s = self.pace_s or math.inf
        if self._steps_seen > STEPS_FOR_PACE and gap_s > max(PAUSE_STEPS * pace_s, 2 * interval_s):
            self._pauses.append(Pause("", gap_s, self._accused))
        self._paces.append(gap_s / steps)
        self._accused = False

    def note_phase(self, phase: str, seconds: float) -> None:
        """Keep a phase in which no step was due, now that it has ended."""
        self._pauses.append(Pause(phase, seconds, self._accused))
        self._accused = False
