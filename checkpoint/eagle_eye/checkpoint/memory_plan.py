"""The memory that the copies take on each node, as arithmetic that people can follow. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_eye.checkpoint.sizes import told

KEPT_MAX = 100  # checkpoints of one node: more is a slip of the hand


class DoesNotFit(ValueError):
    """The copies need more memory than is free; the message has the arithmetic and what to do."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What one node holds: shards of ``shard_bytes``, its own and those of ``replicas`` - 1 others.

    Of each, the ``kept`` newest checkpoints that are whole, the one that is ``arriving``, and the one that is
    ``persisting`` (0 or 1), which must stay as it is until it is on disk.
    """

    shard_bytes: int
    replicas: int
    kept: int
    arriving: int
    persisting: int

    @property
    def total_bytes(self) -> int:
        """What all of it takes."""
        return self.replicas * (self.kept + self.arriving + self.persisting) * self.shard_bytes

    def __str__(self) -> str:
        copies = f"{self.replicas} {'copy' if self.replicas == 1 else 'copies'}"
        held = f"{self.kept} kept + {self.arriving} arriving" + (
            f" + {self.persisting} persisting" if self.persisting else ""
        )
        return f"{copies} x ({held}) x {told(self.shard_bytes)} = {told(self.total_bytes)}"


def plan_memory(shard_bytes: int, replicas: int, kept: int, *, persists: bool) -> MemoryPlan:
    """Return what a node with so many bytes of shards holds; ``persists``: some checkpoints go to disk, too.

    Raises ValueError.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes: expected 1 or more, got {shard_bytes}; it is what one node has of the state")
    if replicas < 1:
        raise ValueError(f"replicas: expected 1 or more, got {replicas}; 2 survive the loss of any one node")
    if not 1 <= kept <= KEPT_MAX:
        raise ValueError(f"kept: expected 1 to {KEPT_MAX}, got {kept}; with 1 the last whole checkpoint stays")
    return MemoryPlan(shard_bytes, replicas, kept, 1, int(persists))


def check_fits(plan: MemoryPlan, free_bytes: int) -> None:
    """So much memory suffices. Raises DoesNotFit."""
    if plan.total_bytes > free_bytes:
        raise DoesNotFit(
            f"{plan}, but {told(free_bytes)} are free: keep fewer checkpoints, hold fewer copies,"
            " or spread the job's state over more nodes"
        )
