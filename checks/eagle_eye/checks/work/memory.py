"""Writes patterns to all usable memory of a device and reads them back."""

from __future__ import annotations

import os
import time
from typing import Any

from .lines import WORKING, WorkerOutput

CHUNK_BYTES = 256 << 20
CPU_CHUNK_BYTES = 8 << 20
FREE_SHARE = 0.8  # of a GPU's free memory; what is left serves the comparison
QUICK_FREE_SHARE = 0.2
CPU_BYTES_MAX = 64 << 20
CPU_AVAILABLE_SHARE = 0.1
# All bits off, all on, and each bit unlike its neighbours, both ways. Then each word its own place, for addresses that
# lead to another's memory.
PATTERNS = (0, -1, 0x5555_5555_5555_5555, -0x5555_5555_5555_5556)
_WORD_BYTES = 8


def memory(torch: Any, device: Any, job: dict[str, Any], _worker: int, line: WorkerOutput) -> dict[str, float]:
    """Return how many bytes were tried, in how many passes, how many words were wrong, and the speed."""
    until_s = time.monotonic() + float(job["seconds"])
    chunks = _chunks(torch, device, quick=bool(job["quick"]), line=line)
    words = sum(len(chunk) for chunk in chunks)
    wrong = passes = 0
    begin_s = time.perf_counter()
    while passes == 0 or time.monotonic() < until_s:
        pattern = PATTERNS[passes % (len(PATTERNS) + 1)] if passes % (len(PATTERNS) + 1) < len(PATTERNS) else None
        for number, chunk in enumerate(chunks):
            _write(torch, chunk, pattern, number)
            line.phase(WORKING)
        for number, chunk in enumerate(chunks):
            wrong += _wrong(torch, chunk, pattern, number)
            line.phase(WORKING)
        passes += 1
    spent_s = time.perf_counter() - begin_s
    return {
        "bytes": words * _WORD_BYTES,
        "passes": passes,
        "wrong_words": wrong,
        "bytes_per_second": 2.0 * words * _WORD_BYTES * passes / spent_s,
    }


def _chunks(torch: Any, device: Any, *, quick: bool, line: WorkerOutput) -> list[Any]:
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        chunk_bytes, most = CHUNK_BYTES, int(free * (QUICK_FREE_SHARE if quick else FREE_SHARE))
    else:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        chunk_bytes, most = CPU_CHUNK_BYTES, min(CPU_BYTES_MAX, int(available * CPU_AVAILABLE_SHARE))
    chunks = []
    for _ in range(max(1, most // chunk_bytes)):
        chunks.append(torch.empty(chunk_bytes // _WORD_BYTES, dtype=torch.int64, device=device))
        line.phase(WORKING)
    return chunks


def _write(torch: Any, chunk: Any, pattern: int | None, number: int) -> None:
    if pattern is None:
        torch.arange(number * len(chunk), (number + 1) * len(chunk), out=chunk)
    else:
        chunk.fill_(pattern)


def _wrong(torch: Any, chunk: Any, pattern: int | None, number: int) -> int:
    if pattern is None:
        first = number * len(chunk)
        return int((chunk != torch.arange(first, first + len(chunk), device=chunk.device)).sum())
    return int((chunk != pattern).sum())
