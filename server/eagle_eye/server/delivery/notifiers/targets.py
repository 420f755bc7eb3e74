"""Limits requests to one host and port, however many subscriptions send there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from eagle_eye.server.delivery.settings import WebhookSettings
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.security.limits import Rates


@dataclass(slots=True)
class _Lane:
    room: asyncio.Semaphore
    users: int = 0  # in flight or waiting


class Targets:
    """Grants turns. Waiting for one target does not delay requests to another. On one event loop only."""

    def __init__(
        self, settings: WebhookSettings, clock: Clock, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._lanes: dict[str, _Lane] = {}  # only those in use
        self._rates = Rates()

    @asynccontextmanager
    async def turn(self, url: str, urgent: bool = False) -> AsyncIterator[None]:
        """Wait until the URL's target has room and its rate limit allows a request; first come, first served.

        Urgent requests have their own places and rate, so that others never delay them.
        """
        target = f"{target_of(url)} urgent" if urgent else target_of(url)
        lane = self._lanes.setdefault(target, _Lane(asyncio.Semaphore(self._settings.target_concurrency)))
        lane.users += 1
        try:
            async with lane.room:
                while (wait_s := self._take(target)) > 0.0:
                    await self._sleep(wait_s)
                yield
        finally:
            lane.users -= 1
            if not lane.users:
                del self._lanes[target]

    def _take(self, target: str) -> float:
        settings = self._settings
        now_s = self._clock.monotonic_s()
        return self._rates.take(target, settings.target_requests_per_s, settings.target_burst, now_s)


def target_of(url: str) -> str:
    """Return the host and port of a URL in normalized form."""
    parsed = httpx.URL(url)
    port = parsed.port or (443 if parsed.scheme == "https" else 80)
    return f"{parsed.host.rstrip('.').lower()}:{port}"
