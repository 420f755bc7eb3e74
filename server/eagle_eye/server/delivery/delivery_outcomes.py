"""Records the outcomes of requests to subscribers; those that end close together share a commit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from eagle_eye.server.delivery.delivery_states import fared
from eagle_eye.server.delivery.notifiers.receipts import Receipt
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.records import Delivery, SubscriptionHealth
from eagle_eye.server.store.store import SUBSCRIPTION_HEALTH, Change, Store
from eagle_eye.server.telemetry.counters import Telemetry


class _Entry(NamedTuple):
    subscription_id: str
    receipt: Receipt
    settled: Delivery | None
    written: asyncio.Future[SubscriptionHealth]


class DeliveryOutcomes:
    """One commit at a time: outcomes that arrive meanwhile wait for the next, in no thread. On one event loop only."""

    def __init__(self, store: Store, clock: Clock, telemetry: Telemetry) -> None:
        self._store = store
        self._clock = clock
        self._telemetry = telemetry
        self._waiting: list[_Entry] = []
        self._commit_ends: asyncio.Future[None] | None = None  # of the commit in progress

    async def write(
        self, subscription_id: str, receipt: Receipt, settled: Delivery | None = None
    ) -> SubscriptionHealth:
        """Return the subscription's new health once it and the delivery, if any, are on disk.

        Raises StoreUnavailable: then neither is.
        """
        loop = asyncio.get_running_loop()
        written: asyncio.Future[SubscriptionHealth] = loop.create_future()
        self._waiting.append(_Entry(subscription_id, receipt, settled, written))
        while not written.done():
            if self._commit_ends is not None:
                await asyncio.wait({self._commit_ends})
                continue
            self._commit_ends = ends = loop.create_future()
            try:
                await self._write_waiting()
            finally:
                self._commit_ends = None
                ends.set_result(None)
        return await written

    def count(self, deliveries: Sequence[Delivery]) -> None:
        """Count the deliveries that are over, and why."""
        for delivery in deliveries:
            if delivery.state != "pending":
                self._telemetry.deliveries.labels(delivery.state).inc()
            if delivery.reason:
                self._telemetry.delivery_failures.labels(delivery.reason).inc()

    async def _write_waiting(self) -> None:
        entries, self._waiting = self._waiting, []
        try:
            healths = await asyncio.to_thread(self._commit, entries)
        except asyncio.CancelledError:
            for entry in entries:
                entry.written.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - each waiter gets it
            for entry in entries:
                entry.written.set_exception(error)
            return
        for entry, health in zip(entries, healths, strict=True):
            entry.written.set_result(health)

    def _commit(self, entries: Sequence[_Entry]) -> list[SubscriptionHealth]:
        now_s = self._clock.now_s()
        deliveries = tuple(entry.settled for entry in entries if entry.settled is not None)
        healths: list[SubscriptionHealth] = []

        def tried(store: Store) -> Change:
            latest: dict[str, SubscriptionHealth] = {}
            for entry in entries:
                name = entry.subscription_id
                before = latest.get(name) or store.get(SUBSCRIPTION_HEALTH, name)
                latest[name] = fared(before or SubscriptionHealth(subscription_id=name), entry.receipt, now_s)
                healths.append(latest[name])
            return Change(deliveries=deliveries, subscription_health=tuple(latest.values()))

        self._store.update(tried)
        self.count(deliveries)
        return healths
