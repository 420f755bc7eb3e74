"""What every baseline is to the suite: learn from healthy and labelled traces, then name nodes in others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.detection.matrix import Floats, TraceMatrix

Setting = Mapping[str, float]  # one point of a baseline's grid


class Accusation(NamedTuple):
    """One claim: from ``time_s`` on, ``node`` is held to be faulty."""

    time_s: float
    node: str


class Baseline(Protocol):
    """A detector that names nodes. A node is named at most once a trace: after that it would have been taken out.

    ``grid`` holds the settings to choose from, as many for every baseline; ``fit`` learns whatever does not depend
    on them. Seeded: the same traces give the same accusations.
    """

    @property
    def name(self) -> str:
        """The name in tables."""
        ...

    @property
    def grid(self) -> Sequence[Setting]:
        """The settings that tuning tries."""
        ...

    def fit(self, healthy: Sequence[TraceMatrix], faulty: Sequence[TraceMatrix]) -> None:
        """Learn from traces without and with labelled faults; the latter only where the paper uses labels."""
        ...

    def judge_each(self, trace: TraceMatrix, settings: Sequence[Setting]) -> list[list[Accusation]]:
        """Return the accusations under each setting; what they share is computed once."""
        ...

    def judge(self, trace: TraceMatrix) -> list[Accusation]:
        """Return the accusations under the published, or the middle, setting."""
        ...


def once_each(accusations: Sequence[Accusation]) -> list[Accusation]:
    """Return each node's first accusation, in order of time."""
    first: dict[str, Accusation] = {}
    for accusation in sorted(accusations):
        first.setdefault(accusation.node, accusation)
    return list(first.values())


def runs(flags: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield (first, one past the last) of each unbroken run of True in a (T,) array."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    yield from ((int(a), int(b)) for a, b in list(pairwise(edges))[::2])


def persistent(flags: NDArray[np.bool_], trace: TraceMatrix, ends_s: Floats, lasting_s: float) -> list[Accusation]:
    """Accuse each node once its flag has been up for ``lasting_s`` without a break.

    ``flags`` (K, N) stand at the times ``ends_s`` (K,), which are evenly spaced.
    """
    spacing_s = float(ends_s[1] - ends_s[0]) if len(ends_s) > 1 else trace.interval_s
    lines = max(int(np.ceil(lasting_s / spacing_s - 1e-9)), 1)
    found = []
    for column, node in enumerate(trace.nodes):
        for start, stop in runs(flags[:, column]):
            if stop - start >= lines:
                found.append(Accusation(float(ends_s[start + lines - 1]), node))
                break
    return once_each(found)
