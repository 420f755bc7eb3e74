"""Plain records of one rank's PyTorch flight-recorder dump."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

COMPLETED = "completed"
_PEERS = re.compile(r"\b(send|recv) (\d+)(->|<-)(\d+)$")


@dataclass(frozen=True, slots=True)
class Group:
    """A process group; ``ranks`` are its global ranks ordered by rank in the group, () unknown."""

    name: str
    description: str
    ranks: tuple[int, ...]

    def __hash__(self) -> int:
        """Return a hash that walks no ranks, and differs between groups of one name."""
        return hash((self.name, len(self.ranks), self.ranks[:1]))

    def __str__(self) -> str:
        """Return the display name, such as "39 PIPELINE_MODEL_PARALLEL_GROUP"."""
        return f"{self.name} {self.description}".strip()


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of one rank.

    ``sequence`` counts the collectives of the group that this rank has enqueued, or its point-to-point operations.
    ``name`` is PyTorch's: "nccl:all_reduce", "nccl:send 0->1" (ranks in the group). ``state`` is scheduled, started or
    completed. Sizes are shapes, one per tensor; ``dtypes`` are the input's, then the output's.
    """

    group: Group
    sequence: int
    name: str
    state: str
    point_to_point: bool = False
    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()

    def peers(self) -> tuple[int, int] | None:
        """Return the global ranks (sender, receiver) of a point-to-point operation, None if not stated."""
        match = _PEERS.search(self.name)
        if match is None:
            return None
        ends = (int(match[2]), int(match[4]))
        if max(ends) >= len(self.group.ranks):
            return None
        own, other = (self.group.ranks[end] for end in ends)
        return (own, other) if match[1] == "send" else (other, own)

    def signature(self) -> tuple[object, ...]:
        """Return what must be equal on all ranks of a collective.

        Numbers of elements count, not shapes. Where ranks may give different amounts (all_to_all, gather, lists of
        tensors) only the operation and the types count.
        """
        kind = self.name.rpartition(":")[2]
        if kind not in EVEN_COLLECTIVES:
            return kind, self.dtypes
        return (
            kind,
            self.dtypes,
            tuple(math.prod(shape) for shape in self.input_sizes),
            tuple(math.prod(shape) for shape in self.output_sizes),
        )


# Collectives to which every rank gives the same amount.
EVEN_COLLECTIVES = frozenset(
    {
        "all_reduce",
        "all_reduce_barrier",
        "broadcast",
        "_broadcast_oop",
        "reduce",
        "_all_gather_base",
        "_reduce_scatter_base",
    }
)


@dataclass(frozen=True, slots=True)
class ReducedDump:
    """One rank's dump, reduced to what the analysis needs, so that thousands fit in memory.

    ``unfinished`` are its operations that have not completed, oldest first. ``collectives`` and ``exchanges`` are the
    highest sequences by group over all operations, finished or not, of collectives and of point-to-point operations.
    ``enqueued`` is the highest sequence by group that the process groups themselves report ({}: not reported); it does
    not say which of the two it counts.
    """

    rank: int
    groups: tuple[Group, ...]
    unfinished: tuple[Operation, ...]
    collectives: Mapping[Group, int]
    exchanges: Mapping[Group, int]
    enqueued: Mapping[Group, int]

    @classmethod
    def of(
        cls,
        rank: int,
        groups: Iterable[Group],
        operations: Iterable[Operation],
        enqueued: Mapping[Group, int] | None = None,
    ) -> ReducedDump:
        """Return the recording of a rank's operations, given oldest first; they need not be held in memory."""
        unfinished: list[Operation] = []
        collectives: dict[Group, int] = {}
        exchanges: dict[Group, int] = {}
        for operation in operations:
            highest = exchanges if operation.point_to_point else collectives
            highest[operation.group] = max(highest.get(operation.group, -1), operation.sequence)
            if operation.state != COMPLETED:
                unfinished.append(operation)
        return cls(rank, tuple(groups), tuple(unfinished), collectives, exchanges, enqueued or {})
