"""The server's process: what runs in it beside the requests starts again when it fails, and its heap stays small.

Touches: this process's C allocator and garbage collector.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
from collections.abc import Awaitable, Callable

RESTART_S = 1.0

_log = logging.getLogger(__name__)


async def keep_running(name: str, work: Callable[[], Awaitable[None]], failed: Callable[[str], None]) -> None:
    """Run ``work`` again whenever it ends, until cancelled; ``failed(name)`` is called when it raised."""
    while True:
        try:
            await work()
        except Exception:  # noqa: BLE001 - a bug must not end detection or delivery for ever
            _log.exception("a part of the server failed and starts again", extra={"part": name})
            failed(name)
        await asyncio.sleep(RESTART_S)


# The heap: memory of what comes and goes many times a second is kept, rings of garbage are freed, and free memory goes
# back.

# glibc maps a block this large anew each time, at most 32 MiB (malloc.h, DEFAULT_MMAP_THRESHOLD_MAX): every page of it
# is then cleared and faulted in. A second of a large fleet's rows is some 15 MB.
LARGE_BYTES = 32 << 20
FREE_BYTES_MAX = 256 << 20  # what a heap may keep free at its end; the rest goes back to the kernel

# Frames live for seconds and go by their reference counts; looking through all that a fleet's agents have said for
# rings of garbage, some times a second, would cost as much as taking what they say.
GARBAGE_YOUNG, GARBAGE_MIDDLE, GARBAGE_OLD = 100_000, 50, 100  # of gc.set_threshold
# Where little comes, that many new objects take an hour, and each webhook leaves its connection in a ring meanwhile.
YOUNG_GARBAGE_S = 10.0

# How often free memory between what is in use goes back: what a heap of long and short lives keeps free becomes more.
TRIM_S = 60.0

# The main thread's and one for all others, which mostly wait for each other anyway: each heap keeps holes of its own.
ARENAS_MAX = 2

# malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def keep_heap_blocks() -> bool:
    """Have blocks up to ``LARGE_BYTES`` come from few heaps that keep their pages; return whether this C library can.

    Before threads are started: those that run already keep a heap each.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    done = mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES) and mallopt(_M_TRIM_THRESHOLD, FREE_BYTES_MAX)
    return bool(done and mallopt(_M_ARENA_MAX, ARENAS_MAX))


def collect_seldom() -> None:
    """Have rings of garbage looked for among many new objects only."""
    gc.set_threshold(GARBAGE_YOUNG, GARBAGE_MIDDLE, GARBAGE_OLD)


async def collect_young(every_s: float = YOUNG_GARBAGE_S) -> None:
    """Free the rings of garbage among new objects, which are never many, every so often until cancelled."""
    while True:
        gc.collect(0)
        await asyncio.sleep(every_s)


async def trim_heap(every_s: float = TRIM_S) -> None:
    """Give free memory back to the kernel every so often until cancelled, where this C library can (malloc_trim(3))."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while True:
        await asyncio.sleep(every_s)
        if give_back is not None:
            await asyncio.to_thread(give_back, 0)
