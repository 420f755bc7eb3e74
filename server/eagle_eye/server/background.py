"""What runs beside the requests: a part that fails starts again."""

from __future__ import annotations

import asyncio
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
