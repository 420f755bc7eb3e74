"""Keeps the peaks of one thread from staying for all time. Touches: this process's C allocator."""

from __future__ import annotations

import ctypes

# glibc begins with this limit and raises it, up to 32 MiB, to the size of whatever mapped block is freed: from then on
# such blocks lie in a heap, and stay there.
LARGE_BYTES = 128 << 10
# Otherwise each collector's thread has a heap of its own, which grows to that thread's peak and serves no other. They
# hardly wait for one another in a shared one: they run under the interpreter's lock.
HEAPS_MAX = 1

# malloc.h
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def share_heap() -> bool:
    """Have threads that start from now on share one heap, and large blocks go back to the kernel when they are freed.

    Return whether this C library can be told. It also no longer raises how much free memory the heap may hold at its
    end (mallopt(3)).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES) and mallopt(_M_ARENA_MAX, HEAPS_MAX))
