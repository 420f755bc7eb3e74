"""Learns when and for how long a job's training leaves the network idle, from its traffic. Pure.

Gemini (SOSP 2023, section 5) profiles the first iterations for the spans without collectives. Here every step is
profiled: the latest lengths of each idle span in a step are kept, by the number of bursts before it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from dataclasses import dataclass

STEPS_KEPT = 16  # so that what has changed counts after a few steps
STEPS_MIN = 3  # fewer say nothing of the next
LOW_QUANTILE = 0.2  # of an idle span's past lengths: the estimate is this short
BURSTS_MAX = 64  # per step


@dataclass(frozen=True)
class LinkState:
    """The link's current state.

    ``busy``: others' traffic passes. Else it is idle since ``began_s``, and until ``ends_s``; None: unknown.
    """

    busy: bool
    began_s: float
    ends_s: float | None


class IdleSpans:
    """The idle spans of a job's steps. Fed in order of observation; all times are of one clock."""

    def __init__(self) -> None:
        # By the number of bursts before it in the step: (length, whether the step ended in it).
        self._lengths: defaultdict[int, deque[tuple[float, bool]]] = defaultdict(lambda: deque(maxlen=STEPS_KEPT))
        self._steps: deque[float] = deque(maxlen=STEPS_KEPT)
        self._bursts_of_steps: deque[int] = deque(maxlen=STEPS_KEPT)
        self._bursts = 0
        self._busy_since_s: float | None = None
        self._idle_since_s: float | None = None
        self._marked_s: float | None = None

    @property
    def step_s(self) -> float | None:
        """How long a step takes, None before the first two marks."""
        return statistics.median(self._steps) if self._steps else None

    @property
    def lengths_s(self) -> list[float]:
        """The length that each idle span of most steps is taken to have, in order; unknown ones are left out."""
        bursts = statistics.median_high(self._bursts_of_steps) if self._bursts_of_steps else 0
        known = (self._shortest(burst, 0.0) for burst in range(bursts + 1))
        return [length for length in known if length is not None]

    def mark(self, now_s: float) -> None:
        """Mark the end of a step and the start of the next."""
        if self._marked_s is not None:
            self._steps.append(now_s - self._marked_s)
            self._bursts_of_steps.append(self._bursts)
        self._marked_s = now_s
        if self._idle_since_s is not None:
            self._lengths[self._bursts].append((max(0.0, now_s - self._idle_since_s), True))
            self._idle_since_s = now_s
        elif self._busy_since_s is None:
            self._idle_since_s = now_s
        self._bursts = 0

    def busy(self, began_s: float) -> None:
        """Traffic passes since then."""
        if self._idle_since_s is not None:
            self._lengths[self._bursts].append((max(0.0, began_s - self._idle_since_s), False))
        self._idle_since_s, self._busy_since_s = None, began_s

    def idle(self, began_s: float) -> None:
        """The link is idle since then."""
        if self._busy_since_s is not None and (self._marked_s is None or self._busy_since_s >= self._marked_s):
            self._bursts = min(self._bursts + 1, BURSTS_MAX)
        self._busy_since_s = None
        self._idle_since_s = began_s if self._marked_s is None else max(began_s, self._marked_s)

    def sight(self, now_s: float) -> LinkState:
        """Return the link's current state."""
        since_s = self._idle_since_s
        if since_s is None:
            return LinkState(busy=self._busy_since_s is not None, began_s=now_s, ends_s=None)
        length = self._shortest(self._bursts, now_s - since_s)
        return LinkState(busy=False, began_s=since_s, ends_s=None if length is None else since_s + length)

    def _shortest(self, burst: int, passed_s: float) -> float | None:
        """Return how long an idle span lasts that has lasted for so long; None where it has never been longer.

        What it was sometimes, and has outlasted, it is not this time: so steps of several kinds are told apart.
        """
        seen = self._lengths.get(burst, ())
        if len(seen) < STEPS_MIN:
            return None
        longer = sorted(one for one in seen if one[0] > passed_s)
        if not longer:
            return None
        length, step_ended = longer[int(LOW_QUANTILE * (len(longer) - 1))]
        if not step_ended or burst == 0:
            return length
        return length + (self._shortest(0, 0.0) or 0.0)
