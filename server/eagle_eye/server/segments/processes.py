"""How the processes beside the server that write segments are started."""

from __future__ import annotations

import gc
import os

import pyarrow as pa

# They allocate arrays of some MiB again and again: what is freed is kept for the next one, since memory that comes
# anew from the system costs as much as what is done in it.
_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
# A library for matrices starts threads that nobody needs there.
_THREADS = {"OPENBLAS_NUM_THREADS": "1"}


def environment() -> dict[str, str]:
    """Return the variables of such a process; what the operator has set of them stays."""
    return {**_MEMORY, **_THREADS, **os.environ}


def settle(niceness: int) -> None:
    """Have this process yield to others, use one core, and look less often for cycles, of which it makes none."""
    os.nice(niceness)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
