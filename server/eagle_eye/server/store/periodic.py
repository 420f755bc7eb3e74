"""Periodic work on the records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from eagle_eye.server.model.errors import StoreUnavailable

_log = logging.getLogger(__name__)


async def repeat(
    work: Callable[[], Awaitable[object]], interval_s: float, failure: str, *, wait_first: bool = False
) -> None:
    """Await ``work()``, then wait ``interval_s``, repeatedly until cancelled; ``wait_first`` swaps the order.

    A pass that raises StoreUnavailable is logged as ``failure``, and the next one tries again. ``interval_s`` 0
    disables the work: then this only waits to be cancelled.
    """
    if interval_s <= 0:
        await asyncio.Event().wait()
    if wait_first:
        await asyncio.sleep(interval_s)
    while True:
        try:
            await work()
        except StoreUnavailable:
            _log.warning("%s: the records cannot be read or written; the next pass tries again", failure)
        await asyncio.sleep(interval_s)
