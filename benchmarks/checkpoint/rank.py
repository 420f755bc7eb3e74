"""What every rank of a measurement does first and last."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

PlanT = TypeVar("PlanT", bound=msgspec.Struct)


def begun(kind: type[PlanT]) -> tuple[int, Path, Path, Path, PlanT]:
    """Return the rank, its folder, those of stores and disk, and the plan; the process group is there."""
    work, stores, disk = (Path(word) for word in sys.argv[1:4])
    plan = msgspec.json.decode((work / "plan.json").read_bytes(), type=kind)
    dist.init_process_group("gloo")
    return dist.get_rank(), work, stores, disk, plan


def ended(work: Path, rank: int, found: Any) -> None:
    """What this rank has found is written; no rank is gone before all have."""
    (work / f"rank{rank}.json").write_bytes(msgspec.json.encode(found))
    dist.barrier()
    dist.destroy_process_group()
