from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref

from eagle_eye.server.heap import collect_young


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
from eagle_eye.server.heap import keep_blocks, trim

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

assert keep_blocks()
blocks = [bytearray(64 << 10) for _ in range(2_000)]
del blocks[::2]
before = resident_bytes()

async def wait():
    trimming = asyncio.create_task(trim(every_s=0.01))
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
