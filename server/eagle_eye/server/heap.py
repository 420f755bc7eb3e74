"""Keeps the memory of what comes and goes many times a second. Touches: this process's C allocator."""

from __future__ import annotations

import ctypes

# glibc maps a block this large anew each time, at most 32 MiB (malloc.h, DEFAULT_MMAP_THRESHOLD_MAX): every page of it
# is then cleared and faulted in. A second of a large fleet's rows is some 15 MB.
LARGE_BYTES = 32 << 20
FREE_BYTES_MAX = 256 << 20  # what a heap may keep free at its end; the rest goes back to the kernel

# malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_blocks() -> bool:
    """Have blocks up to ``LARGE_BYTES`` come from heaps that keep their pages; return whether this C library can."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES) and mallopt(_M_TRIM_THRESHOLD, FREE_BYTES_MAX))
