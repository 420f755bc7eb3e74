"""Faults at moments drawn before the run, on whoever trains then; harmed nodes are repaired after a while."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import httpx
import psutil

from benchmarks.recovery.harm import Harm
from eagle_eye.demo.stack import StageFailed

KINDS = ("hang", "kill", "crash", "unreachable")
AGAIN_S = 0.5  # after a look at nodes of which none ran anything that could be harmed


class Fault(NamedTuple):
    """``at_s`` counts from the storm's begin; ``pick`` (0..1) chooses among the nodes that take part then."""

    at_s: float
    kind: str
    pick: float


class Arm(Protocol):
    """A training job on the site's nodes, and whoever keeps it running."""

    def members(self) -> Sequence[str]:
        """Return the nodes that take part."""
        ...

    def harm(self, kind: str, node: str) -> Harm:
        """The fault is there. Raises StageFailed where the node runs nothing that could be harmed."""
        ...

    def repair(self, node: str) -> None:
        """Nothing of what was done to the node is left."""
        ...

    def tick(self) -> None:
        """Whoever keeps the job running does what is due. May raise httpx.HTTPError."""
        ...


def draw(faults: int, every_s: float, seed: int) -> list[Fault]:
    """Return so many, ``every_s`` apart on average and sometimes at once; kinds come about equally often."""
    chance = random.Random(seed)
    kinds = [KINDS[number % len(KINDS)] for number in range(faults)]
    chance.shuffle(kinds)
    moments_s = sorted(chance.uniform(0.0, faults * every_s) for _ in kinds)
    return [Fault(round(at_s, 3), kind, chance.random()) for at_s, kind in zip(moments_s, kinds, strict=True)]


class Storm:
    """From ``begin`` on faults strike as ``tick`` is called; nodes are repaired ``repair_s`` after theirs.

    A fault waits until somebody runs ranks who is not being repaired.
    """

    def __init__(self, arm: Arm, faults: Sequence[Fault], repair_s: float) -> None:
        self._arm, self._left, self._repair_s = arm, list(faults), repair_s
        self._began_s = self._again_s = time.time()
        self._out_s: dict[str, float] = {}  # by node: when it is repaired
        self.harms: list[Harm] = []

    def begin(self) -> None:
        """The first fault's time runs."""
        self._began_s = time.time()

    @property
    def left(self) -> int:
        """Return how many faults are still to come."""
        return len(self._left)

    @property
    def by_kind(self) -> dict[str, int]:
        """Return how many there were of each kind."""
        return dict(Counter(harm.kind for harm in self.harms))

    def tick(self) -> None:
        """What is due has happened, as far as the job's server answers and processes stay to be looked at."""
        now_s = time.time()
        for node in [node for node, due_s in self._out_s.items() if due_s <= now_s]:
            self._arm.repair(node)
            del self._out_s[node]
        with contextlib.suppress(httpx.HTTPError, psutil.Error):
            if self._left and now_s >= max(self._began_s + self._left[0].at_s, self._again_s):
                self._strike(self._left[0])
            self._arm.tick()

    def _strike(self, fault: Fault) -> None:
        nodes = sorted(set(self._arm.members()) - {*self._out_s})
        first = int(fault.pick * len(nodes))
        for node in (*nodes[first:], *nodes[:first]):
            with contextlib.suppress(StageFailed):  # it runs nothing now
                self.harms.append(self._arm.harm(fault.kind, node))
                self._left.pop(0)
                self._out_s[node] = time.time() + self._repair_s
                return
        self._again_s = time.time() + AGAIN_S
