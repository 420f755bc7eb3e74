"""Which nodes have yet to send again what a former leader acknowledged; until then their recent past is not whole.

An agent keeps what was acknowledged for some minutes. It sends that again, newest first, to a server whose journal is
another one, and says with each such request how many frames follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import NamedTuple

# How much time a request of a minute of frames is given: a fleet's agents take turns, so that this costs a server half
# a core at most (benchmarks/ingest/resends.py).
REQUEST_S = 10e-3
EVERY_S_MIN = 1.0  # below it, agents pace themselves
EVERY_S_MAX = 300.0
REFILL_EVERY_S = 30.0  # windows are read anew so often at most: nodes may come one after the other
PATIENCE_S = 10.0  # how long to wait for a request that is due


class _Progress(NamedTuple):
    whole: bool
    heard_s: float


class Resends:
    """The nodes that send again, on the event loop; ``monotonic_s`` is its clock.

    ``nodes()`` counts the nodes known. Detection is shown frames of the last ``window_s``, of a large fleet at most
    ``frames_max``; ``begun_s`` is when this server began to take frames, Unix seconds.
    """

    def __init__(
        self,
        begun_s: float,
        window_s: float,
        frames_max: int,
        nodes: Callable[[], int],
        monotonic_s: Callable[[], float],
    ) -> None:
        self._begun_s = begun_s
        self._window_s = window_s
        self._frames_max = frames_max
        self._nodes = nodes
        self._monotonic_s = monotonic_s
        self._began_s = monotonic_s()
        self._awaited: set[str] = set()
        self._nodes_of: dict[str, _Progress] = {}
        self._news = False
        self._taken_in_s = -math.inf

    def expect(self, nodes: Collection[str]) -> None:
        """Wait a little for what these may send again: they are known, and this server has not heard them of late."""
        self._awaited.update(nodes)

    def every_s(self) -> float:
        """Return how often each agent is to send such a request."""
        return min(self._nodes() * REQUEST_S, EVERY_S_MAX)

    def note(self, node: str, left: int, oldest_s: float) -> None:
        """Note a durable request of a node: ``left`` frames follow it, its own first is of ``oldest_s``."""
        self._awaited.discard(node)
        whole = left == 0 or oldest_s <= self._begun_s - self._reach_s()
        before = self._nodes_of.get(node)
        self._nodes_of[node] = _Progress(whole or (before is not None and before.whole), self._monotonic_s())
        self._news = self._news or before is None or not before.whole

    def incomplete(self) -> set[str]:
        """Return the nodes of whose recent past more is to come."""
        now_s = self._monotonic_s()
        if now_s - self._began_s > self._reach_s():  # frames that came since then fill what detection is shown
            return set()
        patience_s = PATIENCE_S + 2.0 * self.every_s()
        awaited = self._awaited if now_s - self._began_s <= patience_s else set()
        sending = self._nodes_of.items()
        return awaited.union(node for node, at in sending if not at.whole and now_s - at.heard_s <= patience_s)

    def ready(self) -> bool:
        """Return whether windows read from the journal would reach further back than those in memory, for all nodes."""
        now_s = self._monotonic_s()
        due = self._news and now_s - self._taken_in_s >= REFILL_EVERY_S
        return due and now_s - self._began_s <= self._reach_s() and not self.incomplete()

    def taken_in(self) -> None:
        """Note that the windows have been read from the journal."""
        self._news, self._taken_in_s = False, self._monotonic_s()

    def problem(self) -> str:
        """Return whose recent past is not whole, "" if it is that of all."""
        missing = self.incomplete()
        if not missing:
            return ""
        return (
            f"the last minutes of {len(missing)} nodes are not complete yet, such as {min(missing)}: until they"
            " are, faults are still found, but no incident of their jobs is closed"
        )

    def _reach_s(self) -> float:
        return min(self._window_s, self._frames_max / max(self._nodes(), 1))
