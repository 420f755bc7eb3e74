"""Per-node columns for whole fleets: when each node was last heard, its interval, and whether it said goodbye. Pure.

Nodes get places (column indexes) when first named, including members that were never heard. The place of a long-gone
node is reused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.intp]
PACE_S_MAX = 120.0  # upper bound on the interval that a node reports
FORGET_S = 86_400.0  # nodes without a job that were not heard for this long are forgotten; also how often to check
SLOW_INTERVALS = 1.5  # of a job: a node with a longer interval has its own patience
_ROOM = 256


class NodeTracks:
    """All nodes recently heard or named."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._free: list[int] = []  # unused places below the highest
        self._heard_s: Floats = np.full(_ROOM, -np.inf)
        self._interval_s: Floats = np.full(_ROOM, np.nan)
        self._farewell: NDArray[np.bool_] = np.zeros(_ROOM, dtype=np.bool_)
        self._looked_s: float | None = None

    def __contains__(self, node: object) -> bool:
        """Whether the node has a place."""
        return node in self._places

    @property
    def count(self) -> int:
        """Number of nodes heard."""
        return int(np.count_nonzero(self._heard_s > -np.inf))

    def place(self, node: str) -> int:
        """Return the node's place."""
        place = self._places.get(node)
        if place is None:
            place = self._places[node] = self._free.pop() if self._free else len(self._places)
            if place >= len(self._heard_s):
                self._heard_s = _longer(self._heard_s, -np.inf)
                self._interval_s = _longer(self._interval_s, np.nan)
                self._farewell = _longer(self._farewell, False)
        return place

    def places(self, nodes: Iterable[str]) -> Places:
        """Return the nodes' places, in their order: (N,)."""
        return np.array([self.place(node) for node in nodes], dtype=np.intp)

    def members(self, nodes: Iterable[str], memo: dict[Any, Any]) -> Places:
        """Return the places of a job's nodes; ``memo`` is emptied when a member joins."""
        known: Places | None = memo.get(NodeTracks)
        if known is None:
            known = memo[NodeTracks] = self.places(nodes)
        return known

    def meet(self, node: str, received_s: float, interval_s: float) -> int:
        """Record a node that reports, with its interval if it is new; return its place."""
        place = self.place(node)
        if self._heard_s[place] == -np.inf:
            self._heard_s[place] = received_s
            self._interval_s[place] = interval_s
        return place

    def forget_gone(self, now_s: float, in_jobs: Callable[[], Collection[str]]) -> bool:
        """Forget, once a day, nodes not heard for a day and not in ``in_jobs()``, those that have a job.

        Return whether it ran: then stored places are void, except for those of ``in_jobs()``.
        """
        if self._looked_s is None or now_s < self._looked_s:
            self._looked_s = now_s
        if now_s - self._looked_s < FORGET_S:
            return False
        self._looked_s = now_s
        kept = in_jobs()
        gone = [n for n, place in self._places.items() if self._heard_s[place] < now_s - FORGET_S and n not in kept]
        for node in gone:
            place = self._places.pop(node)
            self._heard_s[place], self._interval_s[place], self._farewell[place] = -np.inf, np.nan, False
            self._free.append(place)
        return True

    def hear(self, place: int, received_s: float, *, farewell: bool) -> None:
        """Record that a node was heard; ``farewell``: it said goodbye."""
        self._heard_s[place] = max(self._heard_s[place], received_s)
        self._farewell[place] = farewell

    def hear_all(self, places: Places, received_s: Floats) -> None:
        """Record that nodes were heard, none of them with a goodbye."""
        np.maximum.at(self._heard_s, places, received_s)
        self._farewell[places] = False

    def interval_s(self, node: str) -> float | None:
        """Return the node's reporting interval; None if never heard."""
        place = self._places.get(node)
        return None if place is None or self._heard_s[place] == -np.inf else float(self._interval_s[place])

    def longest_interval_s(self, nodes: Iterable[str]) -> float:
        """Return the longest interval of the nodes' agents, 1 s if none was heard yet."""
        known = [interval_s for interval_s in map(self.interval_s, nodes) if interval_s is not None]
        return max(known, default=1.0)

    def pace_s(self, node: str) -> float:
        """Return the reporting interval of a node that was heard."""
        return float(self._interval_s[self._places[node]])

    def set_interval_s(self, place: int, interval_s: float) -> bool:
        """Set a node's reporting interval; return whether it changed."""
        if self._interval_s[place] == interval_s:
            return False
        self._interval_s[place] = interval_s
        return True

    def farewell(self, places: Places) -> NDArray[np.bool_]:
        """Return whether each of the nodes has said goodbye: (N,)."""
        said: NDArray[np.bool_] = self._farewell[places]
        return said

    def heard_s(self, places: Places, interval_s: float, silent_intervals: float) -> Floats:
        """Return when each of the nodes was last heard, for a job of this interval: (N,), -inf for never.

        A node that reports far less often than the job's others (scraped by Prometheus, among agents) counts as heard
        for as long as its own interval allows.
        """
        own_s = self._interval_s[places]
        patience_s = silent_intervals * (np.minimum(own_s, PACE_S_MAX) - interval_s)
        found: Floats = self._heard_s[places] + np.where(own_s > SLOW_INTERVALS * interval_s, patience_s, 0.0)
        return found


def _longer(column: NDArray[Any], rest: object) -> NDArray[Any]:
    return np.concatenate([column, np.full(len(column), rest, dtype=column.dtype)])
