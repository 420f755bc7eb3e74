from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref

from eagle_eye.server.process import collect_young


class Ring:
    def __init__(self) -> None:
        self.itself = self


def test_a_ring_of_garbage_is_freed_while_little_else_comes() -> None:
    freed: list[int] = []

    async def wait() -> None:
        collecting = asyncio.create_task(collect_young(every_s=0.01))
        await asyncio.sleep(0)
        weakref.finalize(Ring(), freed.append, 1)
        for _ in range(1_000):
            if freed:
                break
            await asyncio.sleep(0.01)
        collecting.cancel()

    gc.disable()
    try:
        asyncio.run(wait())
    finally:
        gc.enable()
    assert freed == [1]


HOLES = """
import asyncio
from pathlib import Path
from eagle_eye.server.process import keep_heap_blocks, trim_heap

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

assert keep_heap_blocks()
blocks = [bytearray(64 << 10) for _ in range(2_000)]
del blocks[::2]
before = resident_bytes()

async def wait():
    trimming = asyncio.create_task(trim_heap(every_s=0.01))
    for _ in range(1_000):
        if resident_bytes() < before - (32 << 20):
            break
        await asyncio.sleep(0.01)
    trimming.cancel()

asyncio.run(wait())
print(before - resident_bytes())
"""


def test_free_memory_between_blocks_in_use_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 32 << 20


THREADS = """
import re, threading
from pathlib import Path
from eagle_eye.server.process import keep_heap_blocks

assert keep_heap_blocks()
kept, met = [], threading.Barrier(7)

def work():
    kept.append([bytearray(32 << 10) for _ in range(100)])
    met.wait()
    met.wait()

threads = [threading.Thread(target=work) for _ in range(6)]
for thread in threads:
    thread.start()
met.wait()
spans = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) ---p 00000000 00:00 0 *$", Path("/proc/self/maps").read_text(), re.M)
met.wait()
print(len({int(end, 16) >> 26 for begin, end in spans if int(end, 16) % (64 << 20) == 0}))
"""


def test_threads_share_one_heap() -> None:
    """What a heap of glibc's has reserved and not used ends where its 64 MiB do (malloc/arena.c)."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
