"""A rank of the reference job: ``capture.py`` says what it does. Run as ``-m`` with its folder, stores and disk."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint.capture import BUSY, CAPTURE_IN_BLOCK, MODES, CapturePlan
from benchmarks.checkpoint.machine import Memcpy
from benchmarks.checkpoint.rank import begun, ended
from benchmarks.checkpoint.reference_job import Job
from benchmarks.checkpoint.site import await_that
from eagle_eye.checkpoint import MemoryCheckpointer

WHOLE_WITHIN_S = 30.0


class Rank:
    """The job, its checkpointer, and what was found so far."""

    def __init__(self, plan: CapturePlan, disk: Path) -> None:
        self.plan = plan
        self.job = Job(plan.width, plan.blocks, plan.step_s, plan.seed)
        self.checkpointer = MemoryCheckpointer(self.job.state, disk / "checkpoints", job="reference")
        self.step = self.checkpointer.restore()
        self.captured: set[int] = set()
        self.behind: list[int] = []

    def block(self, mode: str) -> dict[str, list[Any]]:
        """Return the times of the steps and captures of a block; of its first step, which warms up, no time counts."""
        self.settle()
        dist.barrier()
        steps: list[float] = []
        blocked: list[tuple[int, float, float]] = []
        for number in range(self.plan.block_steps + 1):
            began_s = time.perf_counter()
            self.job.step()
            self.step += 1
            tenth = number == min(CAPTURE_IN_BLOCK, self.plan.block_steps)
            if mode == "each" or (mode == "tenth" and tenth):
                at_s, cpu_s = time.perf_counter(), time.thread_time()
                took = self._captures()
                took_s, cpu_s = time.perf_counter() - at_s, time.thread_time() - cpu_s
                if number and took:
                    blocked.append((self.step, took_s, cpu_s))
                if number:
                    self.behind.append(self.step - (self.checkpointer.whole_step or 0))
            if number:
                steps.append(time.perf_counter() - began_s)
        return {"steps_s": steps, "blocked_s": blocked}

    def _captures(self) -> bool:
        """Whether this step was captured, and not skipped."""
        before = self.checkpointer.counts["captured"]
        self.checkpointer.capture(self.step)
        if self.checkpointer.counts["captured"] == before:
            return False
        self.captured.add(self.step)
        return True

    def settle(self) -> None:
        """What all ranks captured is whole, so that no block pays for the one before."""
        reported: list[set[int]] = [set()] * dist.get_world_size()
        dist.all_gather_object(reported, self.captured)
        last = max(set.intersection(*reported), default=0)
        self.captured.clear()
        one = self.checkpointer
        await_that(lambda: (one.whole_step or 0) >= last, WHOLE_WITHIN_S, f"step {last} whole")


def main() -> None:
    """Measure, and write what was found."""
    rank, work, _, disk, plan = begun(CapturePlan)
    job = Rank(plan, disk)
    job.block("each")  # the first captures make pages and plans
    shard_bytes = round(job.checkpointer.counts["bytes"] / job.checkpointer.counts["captured"])
    memcpy = Memcpy(shard_bytes)
    order, copies = random.Random(plan.seed), []
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in BUSY}
    behind: dict[str, list[int]] = {name: [] for name in BUSY}
    for _ in range(plan.rounds):
        for name, ratio in BUSY.items():
            job.job.busy_ratio = ratio
            modes = list(MODES)
            order.shuffle(modes)
            rounds[name].append({mode: job.block(mode) for mode in modes})
            behind[name] += job.behind
            job.behind.clear()
            job.settle()
            dist.barrier()
            copies.append(min(memcpy.cpu_seconds() for _ in range(3)))
    skipped = int(job.checkpointer.counts["skipped"] + job.checkpointer.counts["not_due"])
    job.checkpointer.close()
    tensors = sum(isinstance(value, torch.Tensor) for value in job.job.optimizer.state_dict()["state"][0].values())
    count = sum(1 for _ in job.job.model.parameters()) * (1 + tensors)
    ended(
        work, rank,
        {"rounds": rounds, "memcpy_cpu_s": copies, "shard_bytes": shard_bytes, "skipped": skipped, "tensors": count,
         "behind_steps": behind},
    )  # fmt: skip


if __name__ == "__main__":
    main()
