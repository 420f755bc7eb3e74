"""Repeated all-reduces among the node's own devices, each number of each sum compared with its exact value."""

from __future__ import annotations

import time
from typing import Any

from .all_reduce import join
from .lines import WORKING, WorkerOutput

BYTES = 64 << 20
CPU_BYTES = 1 << 20
# (type, up to which whole numbers are exact in it, and so in every order of summation)
NUMBERS = (("float32", 1 << 24), ("bfloat16", 256))
CPU_NUMBERS = NUMBERS[:1]


def sdc_all_reduce(torch: Any, device: Any, job: dict[str, Any], worker: int, line: WorkerOutput) -> dict[str, float]:
    """Return how many all-reduces were made and how many numbers of their sums were wrong; each kind at least once."""
    on_gpu, ranks = device.type == "cuda", int(job["workers"])
    dist = join(device, job, worker, line)
    kinds = []
    for number, exact in NUMBERS if on_gpu else CPU_NUMBERS:
        ranks_sum = ranks * (ranks - 1) // 2
        if ranks_sum + ranks > exact:
            continue  # no sum of so many ranks is exact in it
        kind = getattr(torch, number)
        size = (BYTES if on_gpu else CPU_BYTES) // torch.empty(0, dtype=kind).element_size()
        places = torch.arange(size, device=device) % ((exact - ranks_sum) // ranks)
        sums = places * ranks + ranks_sum
        kinds.append((number, (places + worker).to(kind), sums.to(kind), torch.empty(size, dtype=kind, device=device)))
    begin_s = time.monotonic()
    until_s = begin_s + float(job["seconds"])
    over = torch.zeros(1, device=device)
    operations = wrong = 0
    while not over:
        for number, own, sums, buffer in kinds:
            buffer.copy_(own)
            dist.all_reduce(buffer)
            differing = buffer != sums
            count = int(differing.sum())
            if count:
                place = int(differing.int().argmax())
                line.finding(f"all-reduce {number}", [place], float(sums[place]), float(buffer[place]))
            wrong += count
            operations += 1
            line.phase(WORKING)
        # Agreed upon: a rank that stopped by its own clock would leave the others waiting.
        over.fill_(time.monotonic() >= until_s)
        dist.all_reduce(over)
    return {"operations": operations, "wrong": wrong, "seconds": time.monotonic() - begin_s}
