"""Starts and sets up the helper processes that write segments and send them."""

from __future__ import annotations

import ctypes
import gc
import os
import signal

import pyarrow as pa

# These processes allocate arrays of some MiB repeatedly: freed memory is kept for the next one, since getting memory
# from the system costs as much as the work done in it.
_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
# The linear algebra library starts threads that are not needed there.
_THREADS = {"OPENBLAS_NUM_THREADS": "1"}
_PARENT = "EE_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def environment() -> dict[str, str]:
    """Return the environment variables of such a process; those that the operator has set are kept."""
    return {**_MEMORY, **_THREADS, **os.environ, _PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Arrange for this process to be killed when the server that started it ends; end it now if that has happened.

    A restarted server can then rely on no old process writing to its folder.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = os.environ.get(_PARENT)
    if parent is not None and int(parent) != os.getppid():
        raise SystemExit(1)


def settle(niceness: int) -> None:
    """Tie this process to the server's lifetime, lower its priority, use one core, and collect garbage less often."""
    end_with_parent()
    os.nice(niceness)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
