"""How the processes beside the server that write segments are started."""

from __future__ import annotations

import ctypes
import gc
import os
import signal

import pyarrow as pa

# They allocate arrays of some MiB again and again: what is freed is kept for the next one, since memory that comes
# anew from the system costs as much as what is done in it.
_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
# A library for matrices starts threads that nobody needs there.
_THREADS = {"OPENBLAS_NUM_THREADS": "1"}
_PARENT = "EE_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def environment() -> dict[str, str]:
    """Return the variables of such a process; what the operator has set of them stays."""
    return {**_MEMORY, **_THREADS, **os.environ, _PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Have this process be killed when the server that started it ends, and end it now where that has happened.

    A server that is started anew then finds nobody who still writes to its folder.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = os.environ.get(_PARENT)
    if parent is not None and int(parent) != os.getppid():
        raise SystemExit(1)


def settle(niceness: int) -> None:
    """Have this process end with the server, yield to others, use one core, and look less often for cycles."""
    end_with_parent()
    os.nice(niceness)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
