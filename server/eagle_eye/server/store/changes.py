"""Wakes coroutines when something changed, from any thread."""

from __future__ import annotations

import asyncio


class Signal:
    """Any number of waiters; each ``notify`` wakes all current waiters and sets the events of all others."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: set[asyncio.Event] = set()

    def attach(self) -> None:
        """Bind to the running loop; before this, ``notify`` does nothing."""
        self._loop = asyncio.get_running_loop()

    def detach(self) -> None:
        """Release the loop, which is about to close."""
        self._loop = None

    def waiter(self) -> asyncio.Event:
        """Return an event that every later ``notify`` sets; pass it to ``forget`` when done."""
        event = asyncio.Event()
        self._waiters.add(event)
        return event

    def forget(self, event: asyncio.Event) -> None:
        """Stop setting the event."""
        self._waiters.discard(event)

    def notify(self) -> None:
        """Set all waiters' events; may be called from any thread."""
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(self._set)
        except RuntimeError:
            # The loop closed since the check: no waiter is left.
            return

    def _set(self) -> None:
        for event in self._waiters:
            event.set()


async def wait(event: asyncio.Event, timeout_s: float) -> bool:
    """Return True once the event is set, which clears it, or False after ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    event.clear()
    return True
