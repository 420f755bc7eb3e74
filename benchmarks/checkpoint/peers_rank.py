"""A rank of the reference job with one way of saving, as ``peers.py`` says. Run as ``-m`` with its folders."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from benchmarks.checkpoint.job import Job
from benchmarks.checkpoint.peers import PeersPlan
from benchmarks.checkpoint.rank import begun, ended

WARM_STEPS = 3


def main() -> None:
    """Measure, and write what was found."""
    if peers := os.environ.get("EAGLE_EYE_PEERS"):
        sys.path.append(peers)
    from benchmarks.checkpoint.savers import SAVERS

    rank, work, _, disk, plan = begun(PeersPlan)
    job = Job(plan.width, plan.blocks, plan.step_s, 1.0, plan.seed)
    saver = SAVERS[plan.way](job, disk)
    steps: list[float] = []
    blocked: list[float] = []
    behind: list[int] = []
    for step in range(1, plan.steps + WARM_STEPS + 1):
        began_s = time.perf_counter()
        job.step()
        before_s = time.perf_counter()
        took_s = None
        if _all_ready(saver.ready()):
            at_s = time.perf_counter()
            saver.save(step)
            took_s = time.perf_counter() - at_s
        if step > WARM_STEPS:
            # Of agreeing with the other rank, which the benchmark does, nothing counts.
            steps.append(before_s - began_s + (took_s or 0.0))
            behind.append(step - saver.newest())
            if took_s is not None and saver.saves:
                blocked.append(took_s)
    saver.close()
    found = {"steps_s": steps, "blocked_s": blocked, "behind_steps": behind, "survives": saver.survives}
    ended(work, rank, found)


def _all_ready(ready: bool) -> bool:
    told = torch.tensor(int(ready))
    dist.all_reduce(told, dist.ReduceOp.MIN)
    return bool(told)


if __name__ == "__main__":
    main()
