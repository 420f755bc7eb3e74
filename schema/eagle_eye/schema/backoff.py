"""Exponential backoff with jitter, used by all our components.

Not a library (tenacity, backoff): those wrap a call and sleep by themselves, while our waits end when the process
stops, run on a test's clock, and follow what the other side asked for; and the agent should not gain another
dependency.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

DOUBLINGS_MAX = 64  # bounded before the power is computed: 2.0 ** failures overflows long before any sensible limit


def doubled_s(first_s: float, most_s: float, failures: int) -> float:
    """Return the wait after this many consecutive failures: ``first_s`` after one, then doubling up to ``most_s``."""
    return min(most_s, first_s * 2.0 ** min(failures - 1, DOUBLINGS_MAX))


@dataclass(slots=True)
class Backoff:
    """Waits that double from ``first_s`` up to ``most_s``, each shortened by up to half at random.

    The randomness keeps a fleet from reconnecting to a restarted server all at once. ``jitter`` returns uniform numbers
    from 0 to 1.
    """

    first_s: float
    most_s: float
    jitter: Callable[[], float] = random.random
    failures: int = 0

    def next_s(self) -> float:
        """Return the seconds to wait after one more failure."""
        self.failures += 1
        return doubled_s(self.first_s, self.most_s, self.failures) * (0.5 + 0.5 * self.jitter())

    def reset(self) -> None:
        """Make the next failure the first one again."""
        self.failures = 0
