"""An all-reduce among the node's own devices with an exactly known result."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from statistics import median
from typing import Any

from .lines import WORKING, WorkerOutput

BYTES = 128 << 20
CPU_BYTES = 4 << 20
WARM_UPS = 3  # connections are made at the first
REPETITIONS_MIN = 5
REPETITIONS_MAX = 200
_WAIT = timedelta(seconds=60)


def all_reduce(torch: Any, device: Any, job: dict[str, Any], worker: int, line: WorkerOutput) -> dict[str, float]:
    """Return how many numbers of the sums were wrong, and the bus bandwidth, as nccl-tests define it."""
    on_gpu, ranks = device.type == "cuda", int(job["workers"])
    dist = join(device, job, worker, line)
    size = BYTES if on_gpu else CPU_BYTES
    # Whole numbers below 2**24, which float32 holds exactly in every order of summation.
    own = (torch.arange(size // 4, device=device) % 1_024 + worker).float()
    sums = (torch.arange(size // 4, device=device) % 1_024 * ranks + ranks * (ranks - 1) // 2).float()
    buffer = torch.empty_like(own)
    wrong, took_s = 0, []
    # The same number on every rank: a rank's own clock must not decide how long the others wait.
    repetitions = max(REPETITIONS_MIN, min(REPETITIONS_MAX, int(float(job["seconds"]) * 10)))
    for repetition in range(WARM_UPS + repetitions):
        buffer.copy_(own)
        if on_gpu:
            torch.cuda.synchronize()
        begin_s = time.perf_counter()
        dist.all_reduce(buffer)
        if on_gpu:
            torch.cuda.synchronize()
        if repetition >= WARM_UPS:
            took_s.append(time.perf_counter() - begin_s)
        wrong += int((buffer != sums).sum())
        line.phase(WORKING)
    return {
        "wrong": wrong,
        "repetitions": len(took_s) + WARM_UPS,
        "bytes": size,
        "bus_bytes_per_second": 2.0 * (ranks - 1) / ranks * size / median(took_s),
    }


def join(device: Any, job: dict[str, Any], worker: int, line: WorkerOutput) -> Any:
    """Return torch.distributed with this worker as one rank of all; they meet in the job's ``folder``."""
    import torch.distributed as dist

    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # all ranks are here
    line.phase(WORKING)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{job['folder']}/rendezvous",
        rank=worker,
        world_size=int(job["workers"]),
        timeout=_WAIT,
    )
    line.phase(WORKING)
    return dist
