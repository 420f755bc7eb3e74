"""Repeated matrix products with exactly known results: counts wrong numbers, and measures speed."""

from __future__ import annotations

import time
from typing import Any

from .lines import WORKING, WorkerOutput

# Products and sums of -1 and 1 are whole numbers up to INNER, which float16 holds exactly up to 2,048: every order of
# summation gives the same bits.
ROWS, INNER = 4_096, 2_048
CPU_ROWS, CPU_INNER = 512, 512
LOAD_ROWS = 8_192  # large enough for a GPU's full speed and power
LOAD_BATCH = 8
COPY_BYTES = 64 << 20
KNOWN_SHARE = 0.3  # of the time for products with known results; the rest is for speed and heat
SEED = 20_260_301


def gemm(torch: Any, device: Any, job: dict[str, Any], _worker: int, line: WorkerOutput) -> dict[str, float]:
    """Return how many rows were not as known, how many numbers differed between repetitions, and the speed."""
    begin_s, seconds = time.monotonic(), float(job["seconds"])
    on_gpu = device.type == "cuda"
    known_s = seconds * KNOWN_SHARE if on_gpu else seconds
    values = _known(torch, device, begin_s + known_s, line)
    if on_gpu:
        loaded = _under_load(torch, device, begin_s + seconds, line)
        loaded["differing"] += values["differing"]
        loaded["repetitions"] += values["repetitions"]
        values |= loaded
    return values


def _known(torch: Any, device: Any, until_s: float, line: WorkerOutput) -> dict[str, float]:
    """Repeat one product until the time is over; every row is verified (Freivalds, 1977)."""
    on_gpu = device.type == "cuda"
    rows, inner = (ROWS, INNER) if on_gpu else (CPU_ROWS, CPU_INNER)
    source = torch.Generator().manual_seed(SEED)
    left, right, weights = (
        torch.randint(0, 2, shape, generator=source, dtype=torch.int8) * 2 - 1
        for shape in ((rows, inner), (inner, rows), (rows,))
    )
    weights = weights.double()
    expected = left.double() @ (right.double() @ weights)  # exact: whole numbers far below 2**53
    number = torch.float16 if on_gpu else torch.float32
    left, right = left.to(device, number), right.to(device, number)
    first = torch.matmul(left, right)
    result = torch.empty_like(first)
    wrong = int((first.cpu().double() @ weights != expected).sum())
    differing = repetitions = 0
    spent_s = 0.0
    while repetitions == 0 or time.monotonic() < until_s:
        begin_s = time.perf_counter()
        torch.matmul(left, right, out=result)
        if on_gpu:
            torch.cuda.synchronize()
        spent_s += time.perf_counter() - begin_s
        differing += int((result != first).sum())
        repetitions += 1
        line.phase(WORKING)
    return {
        "wrong_rows": wrong,
        "differing": differing,
        "repetitions": repetitions,
        "flops_per_second": 2.0 * rows * rows * inner * repetitions / spent_s,
    }


def _under_load(torch: Any, device: Any, until_s: float, line: WorkerOutput) -> dict[str, float]:
    """Repeat one large product of ordinary numbers, with copies over PCIe in between, until the time is over.

    cuBLAS gives the same bits at every run on one GPU (cuBLAS, Results reproducibility).
    """
    source = torch.Generator(device=device).manual_seed(SEED)
    left, right = (
        torch.randn((LOAD_ROWS, LOAD_ROWS), generator=source, device=device, dtype=torch.float16) for _ in range(2)
    )
    first = torch.matmul(left, right)
    result = torch.empty_like(first)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    here = torch.zeros(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    differing = repetitions = copies = 0
    spent_s = copied_s = 0.0
    torch.cuda.synchronize()
    while repetitions == 0 or time.monotonic() < until_s:
        begin_s = time.perf_counter()
        for _ in range(LOAD_BATCH):
            torch.matmul(left, right, out=result)
        torch.cuda.synchronize()
        spent_s += time.perf_counter() - begin_s
        repetitions += LOAD_BATCH
        differing += int((result != first).sum())
        begin_s = time.perf_counter()
        there.copy_(here)
        torch.cuda.synchronize()
        copied_s += time.perf_counter() - begin_s
        copies += 1
        line.phase(WORKING)
    return {
        "differing": differing,
        "repetitions": repetitions,
        "flops_per_second": 2.0 * LOAD_ROWS**3 * repetitions / spent_s,
        "host_to_device_bytes_per_second": COPY_BYTES * copies / copied_s,
    }
