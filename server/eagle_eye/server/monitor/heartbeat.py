"""Sends subscribers a heartbeat at every interval while the server can detect faults; silence means that it cannot."""

from __future__ import annotations

import asyncio

from eagle_eye.server.delivery import events
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.subscription_filters import wants
from eagle_eye.server.monitor.readiness import Doctor
from eagle_eye.server.store.periodic import repeat
from eagle_eye.server.store.store import SUBSCRIPTIONS, Change, Store


class Heartbeat:
    """The heartbeat; ``interval_s`` 0 disables it."""

    def __init__(self, store: Store, doctor: Doctor, clock: Clock, interval_s: float, public_url: str) -> None:
        self._store = store
        self._doctor = doctor
        self._clock = clock
        self._interval_s = interval_s
        self._public_url = public_url

    async def run(self) -> None:
        """Send a heartbeat at every interval until cancelled."""
        await repeat(lambda: asyncio.to_thread(self.beat), self._interval_s, "no heartbeat", wait_first=True)

    def beat(self) -> None:
        """Commit one heartbeat, if the server is ready and any subscription wants it. Raises StoreUnavailable."""
        event = events.heartbeat(self._clock.now_s(), self._interval_s, self._public_url)
        subscriptions = self._store.all(SUBSCRIPTIONS)
        if any(known.active and wants(known, event) for known in subscriptions) and self._doctor.is_ready():
            self._store.commit(Change(events=(event,)))
