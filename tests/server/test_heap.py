from __future__ import annotations

import asyncio
import gc
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
