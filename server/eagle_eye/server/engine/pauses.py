"""The job's pace, and its harmless pauses without a step, from which patience is learned."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from eagle_eye.detectors.types import Pause, Reports, Verdict

PAUSES_KEPT, PACES_KEPT = 64, 32
PAUSE_STEPS = 3.0  # a gap of more than this many times what its steps usually take holds a pause...
LONG_STEP_STEPS, LONG_STEP_S = 1.5, 10.0  # ...or, where steps are long, so many times and so much longer
STEPS_FOR_PACE = 5  # steps before the pace is known well enough to recognise a pause
STANDSTILLS = frozenset({"hang", "network_hang"})


class PauseLog:
    """Keeps the newest pauses, oldest first, and the pace of one attempt, which defines a pause.

    ``earlier`` are those of earlier attempts.
    """

    def __init__(self, earlier: Sequence[Pause] = ()) -> None:
        self._pauses: deque[Pause] = deque(earlier, maxlen=PAUSES_KEPT)
        self._paces: deque[float] = deque(maxlen=PACES_KEPT)
        self._gaps_s: deque[float] = deque(maxlen=PACES_KEPT)
        self._steps_seen = 0
        self._accused = False

    @property
    def pauses(self) -> tuple[Pause, ...]:
        """Pauses that ended well, oldest first."""
        return tuple(self._pauses)

    @property
    def pace_s(self) -> float | None:
        """The recent median time of a step; None before the second."""
        return sorted(self._paces)[len(self._paces) // 2] if self._paces else None

    @property
    def reports(self) -> Reports:
        """How often progress is heard of in this attempt; phases without due steps are left out."""
        gaps_s = sorted(self._gaps_s)
        return Reports(self._steps_seen, gaps_s[len(gaps_s) // 2] if gaps_s else 0.0)

    def note_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        """Record whether a verdict names a node as holding the job up in the current standstill."""
        self._accused = self._accused or any(v.fault in STANDSTILLS and v.nodes for v in verdicts)

    def note_steps(self, gap_s: float, steps: float, interval_s: float) -> None:
        """Record that ``steps`` steps finished after ``gap_s``; a gap far beyond the pace is kept as a pause.

        Steps of which no row arrived are none: after an outage of the server the newest rows arrive first.
        """
        self._steps_seen += 1
        pace_s = self.pace_s or math.inf
        usual_s = pace_s * steps
        longer_s = min(PAUSE_STEPS * usual_s, max(LONG_STEP_STEPS * usual_s, usual_s + LONG_STEP_S))
        if self._steps_seen > STEPS_FOR_PACE and gap_s > max(longer_s, 2 * interval_s):
            self._pauses.append(Pause("", gap_s - (steps - 1) * pace_s, self._accused))
        self._paces.append(gap_s / steps)
        self._gaps_s.append(gap_s)
        self._accused = False

    def note_phase(self, phase: str, seconds: float) -> None:
        """Record a phase without due steps, now that it has ended."""
        self._pauses.append(Pause(phase, seconds, self._accused))
        self._accused = False
