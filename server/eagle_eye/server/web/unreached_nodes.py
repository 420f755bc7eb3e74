"""The nodes whose frames a standby could not pass on, for it did not reach the leader. Times are passed in."""

from __future__ import annotations

from collections.abc import Callable

NODES_MAX = 131_072  # beyond it the oldest are forgotten


class UnreachedNodes:
    """Noted on the event loop, counted from any thread."""

    def __init__(self, within_s: float, monotonic_s: Callable[[], float]) -> None:
        """A node counts for ``within_s`` after it has asked."""
        self._within_s = within_s
        self._monotonic_s = monotonic_s
        self._asked_s: dict[str, float] = {}  # the latest last

    def note(self, node: str) -> None:
        """Note that the node's agent has asked in vain."""
        self._asked_s.pop(node, None)
        if len(self._asked_s) >= NODES_MAX:
            del self._asked_s[next(iter(self._asked_s))]
        self._asked_s[node] = self._monotonic_s()

    def count(self) -> int:
        """Return how many nodes have asked in vain lately."""
        since_s = self._monotonic_s() - self._within_s
        return sum(asked_s >= since_s for asked_s in tuple(self._asked_s.values()))
