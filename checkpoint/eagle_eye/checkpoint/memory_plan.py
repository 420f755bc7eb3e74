"""Calculates the copies' memory on each node, with the arithmetic shown to people. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eagle_eye.checkpoint.sizes import reported

KEPT_MAX = 100  # checkpoints per node: more is a typo
SPACED = 2  # the one that is old enough, and the one that takes its place: with one alone there would be a gap


class DoesNotFit(ValueError):
    """The copies need more memory than is free; the message has the arithmetic and what to do."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What one node holds: shards of ``shard_bytes``, its own and those of ``replicas`` - 1 others.

    Of each, the ``kept`` newest checkpoints that are whole, ``spaced`` older ones that reach further back, the one that
    is ``arriving``, and the one that is ``persisting`` (0 or 1), which must stay as it is until it is on disk.
    """

    shard_bytes: int
    replicas: int
    kept: int
    spaced: int
    arriving: int
    persisting: int

    @property
    def total_bytes(self) -> int:
        """The total memory."""
        return self.replicas * (self.kept + self.spaced + self.arriving + self.persisting) * self.shard_bytes

    def __str__(self) -> str:
        copies = f"{self.replicas} {'copy' if self.replicas == 1 else 'copies'}"
        parts = {"kept": self.kept, "spaced": self.spaced, "arriving": self.arriving, "persisting": self.persisting}
        held = " + ".join(f"{count} {name}" for name, count in parts.items() if count)
        return f"{copies} x ({held}) x {reported(self.shard_bytes)} = {reported(self.total_bytes)}"


def spaced_of(reach_s: float) -> int:
    """Return how many older checkpoints are needed so that one of them is always ``reach_s`` old; 0: none."""
    return SPACED if reach_s > 0 else 0


def plan_memory(shard_bytes: int, replicas: int, kept: int, *, persists: bool, reach_s: float = 0.0) -> MemoryPlan:
    """Return what a node with so many bytes of shards holds; ``persists``: some checkpoints go to disk, too.

    ``reach_s`` is how far back checkpoints reach; 0: no further than the newest. Raises ValueError.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes: expected 1 or more, got {shard_bytes}; it is what one node has of the state")
    if replicas < 1:
        raise ValueError(f"replicas: expected 1 or more, got {replicas}; 2 survive the loss of any one node")
    if not 1 <= kept <= KEPT_MAX:
        raise ValueError(f"kept: expected 1 to {KEPT_MAX}, got {kept}; with 1 the last whole checkpoint stays")
    if not 0 <= reach_s < math.inf:
        raise ValueError(f"reach: expected seconds, 0 or more, got {reach_s}; 0 keeps the newest alone")
    return MemoryPlan(shard_bytes, replicas, kept, spaced_of(reach_s), 1, int(persists))


def check_fits(plan: MemoryPlan, free_bytes: int) -> None:
    """Raise DoesNotFit if the free memory does not suffice."""
    if plan.total_bytes > free_bytes:
        raise DoesNotFit(
            f"{plan}, but {reported(free_bytes)} are free: keep fewer checkpoints, hold fewer copies,"
            " or spread the job's state over more nodes"
        )
