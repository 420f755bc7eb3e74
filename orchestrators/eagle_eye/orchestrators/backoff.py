"""How long to wait before the next try."""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass
class Backoff:
    """Waits that double from ``first_s`` up to ``most_s``, each shortened by up to half at random.

    The randomness keeps many subscribers from coming back to a restarted server all at once.
    """

    first_s: float = 0.2
    most_s: float = 15.0
    source: random.Random = field(default_factory=random.Random)
    _failures: int = 0

    def next_s(self) -> float:
        """Return the seconds to wait after one more failure."""
        full_s = min(self.most_s, self.first_s * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return full_s * (0.5 + 0.5 * self.source.random())

    def reset(self) -> None:
        """The next failure is the first one again."""
        self._failures = 0
