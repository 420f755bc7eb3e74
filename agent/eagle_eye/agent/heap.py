"""Returns the memory of one thread's peak to the system. Touches: this process's C allocator."""

from __future__ import annotations

import ctypes

# glibc starts with this threshold and raises it, up to 32 MiB, to the size of any freed mapped block: after that such
# blocks are allocated from a heap, and stay there.
LARGE_BYTES = 128 << 10
# Otherwise each collector's thread has its own heap, which grows to that thread's peak and serves no other. A shared
# one causes hardly any contention: threads run under the GIL.
HEAPS_MAX = 1

# malloc.h
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def share_heap() -> bool:
    """Make threads started from now on share one heap, and return large blocks to the kernel when freed.

    Return whether the C library supports this. It also stops raising the trim threshold (mallopt(3)).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES) and mallopt(_M_ARENA_MAX, HEAPS_MAX))
