"""Says at every interval that the server can judge, to whoever subscribed to it; silence says that it cannot."""

from __future__ import annotations

import asyncio

from eagle_eye.server.delivery import events
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.subscription_filters import wants
from eagle_eye.server.monitor.readiness import Doctor
from eagle_eye.server.store.periodic import repeat
from eagle_eye.server.store.store import SUBSCRIPTIONS, Change, Store


class Heartbeat:
    """``interval_s`` 0: there is none."""

    def __init__(self, store: Store, doctor: Doctor, clock: Clock, interval_s: float, public_url: str) -> None:
        self._store = store
        self._doctor = doctor
        self._clock = clock
        self._interval_s = interval_s
        self._public_url = public_url

    async def run(self) -> None:
        """Beat at every interval until cancelled."""
        await repeat(lambda: asyncio.to_thread(self.beat), self._interval_s, "no heartbeat", wait_first=True)

    def beat(self) -> None:
        """Commit one heartbeat, if the server can judge and somebody subscribed to it. Raises StoreUnavailable."""
        event = events.heartbeat(self._clock.now_s(), self._interval_s, self._public_url)
        subscriptions = self._store.all(SUBSCRIPTIONS)
        if any(known.active and wants(known, event) for known in subscriptions) and self._doctor.check().ready:
            self._store.commit(Change(events=(event,)))
