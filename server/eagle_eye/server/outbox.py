"""Durable deliveries: at least once, in order within each incident, no subscription waiting for another."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from msgspec.structs import replace

from eagle_eye.schema.action import ACTION_REQUESTED
from eagle_eye.server.changes import Signal, wait
from eagle_eye.server.clock import Clock
from eagle_eye.server.config import WebhookSettings
from eagle_eye.server.errors import IllegalTransition, StoreUnavailable
from eagle_eye.server.notifiers.receipts import Notifier, Outcome, Receipt
from eagle_eye.server.records import Delivery, OutboundEvent, Subscription
from eagle_eye.server.store import ACTIONS, EVENTS, SUBSCRIPTIONS, Change, Store
from eagle_eye.server.telemetry import Telemetry

HOUSEKEEPING_S = 10.0
PAUSE_S = 5.0  # after the store failed: an outcome that cannot be written down would be delivered again at once
EXPIRE_BATCH = 500
_ASKING_STATES = ("requested", "accepted", "running")

ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)


class Outbox:
    """Delivers what the store holds as pending. ``jitter`` returns uniform numbers from 0 to 1."""

    def __init__(
        self,
        store: Store,
        notifier: Notifier,
        settings: WebhookSettings,
        clock: Clock,
        telemetry: Telemetry,
        signal: Signal,
        retention_s: float,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._notifier = notifier
        self._settings = settings
        self._clock = clock
        self._telemetry = telemetry
        self._signal = signal
        self._retention_s = retention_s
        self._jitter = jitter
        self._serving: set[str] = set()
        self._paused_until_s = 0.0

    async def run(self) -> None:
        """Deliver until cancelled."""
        woken = self._signal.waiter()
        kept_s = -HOUSEKEEPING_S
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    now_s = self._clock.monotonic_s()
                    if now_s - kept_s >= HOUSEKEEPING_S:
                        kept_s = now_s
                        await self._guarded(asyncio.to_thread(self.housekeeping))
                    delay_s = await self._dispatch(tasks)
                    await wait(woken, delay_s)
        finally:
            self._signal.forget(woken)

    async def serve(self, subscription_id: str) -> None:
        """Deliver what is due to one subscription, until nothing more is."""
        while True:
            subscription = await asyncio.to_thread(self._store.get, SUBSCRIPTIONS, subscription_id)
            if subscription is None or not subscription.active:
                reason = "the subscription has ended"
                await asyncio.to_thread(self._fail_pending, subscription_id, reason)
                return
            heads = await asyncio.to_thread(
                self._store.due_deliveries,
                subscription_id,
                self._clock.now_s(),
                self._settings.concurrency_per_subscription,
            )
            if not heads:
                return
            # Heads are of different groups, so they may overtake each other.
            await asyncio.gather(*(self._attempt(subscription, delivery) for delivery in heads))

    def housekeeping(self) -> None:
        """Void stale deliveries, bound each subscription's backlog, forget what is old."""
        now_s = self._clock.now_s()
        stale = self._store.expired_deliveries(now_s, EXPIRE_BATCH)
        self._settle([replace(d, state="expired", updated_s=now_s) for d in stale])
        pending = 0
        for subscription in self._store.all(SUBSCRIPTIONS):
            waiting = self._store.subscription_deliveries(subscription.id)
            excess = max(0, len(waiting) - self._settings.pending_max)
            error = f"backlog: more than {self._settings.pending_max} waited (webhooks.pending_max)"
            self._settle([_failed(delivery, error, now_s) for delivery in waiting[:excess]])
            pending += len(waiting) - excess
        self._telemetry.pending.set(pending)
        self._store.prune(now_s, self._retention_s)

    async def _dispatch(self, tasks: asyncio.TaskGroup) -> float:
        """Start serving the subscriptions that something is due for; return how long to wait for the next."""
        if self._clock.monotonic_s() < self._paused_until_s:
            return self._paused_until_s - self._clock.monotonic_s()
        due = await self._guarded(asyncio.to_thread(self._store.next_due_s))
        now_s = self._clock.now_s()
        delay_s = HOUSEKEEPING_S
        for subscription_id, due_s in (due or {}).items():
            if subscription_id in self._serving:
                continue
            if due_s <= now_s:
                self._serving.add(subscription_id)
                tasks.create_task(self._serve_one(subscription_id))
            else:
                delay_s = min(delay_s, due_s - now_s)
        return delay_s

    async def _serve_one(self, subscription_id: str) -> None:
        try:
            await self._guarded(self.serve(subscription_id))
        finally:
            self._serving.discard(subscription_id)
            # What came due meanwhile was passed over while this one was being served.
            self._signal.notify()

    async def _guarded(self, work: Awaitable[ResultT]) -> ResultT | None:
        """Return what ``work`` returns; after an error pause deliveries, count it and return None."""
        try:
            return await work
        except StoreUnavailable as error:
            _log.warning("deliveries pause", extra={"pause_s": PAUSE_S, "error": str(error)})
            self._telemetry.failures.labels("store").inc()
        except Exception:  # noqa: BLE001 - one bug in one delivery must not end all deliveries for ever
            _log.exception("a delivery failed for a reason that was not foreseen")
            self._telemetry.failures.labels("outbox").inc()
        self._paused_until_s = self._clock.monotonic_s() + PAUSE_S
        return None

    async def _attempt(self, subscription: Subscription, delivery: Delivery) -> None:
        now_s = self._clock.now_s()
        event = await asyncio.to_thread(self._store.get, EVENTS, delivery.event_id)
        void = await asyncio.to_thread(self._void, event, now_s)
        if event is None or void:
            settled = replace(delivery, state="expired", last_error=void, updated_s=now_s)
            await asyncio.to_thread(self._settle, [settled])
            return
        timeout_s = self._settings.timeout_s
        if event.expires_s is not None:
            timeout_s = min(timeout_s, event.expires_s - now_s)
        started_s = self._clock.monotonic_s()
        receipt = await self._notifier.deliver(subscription, event, now_s, timeout_s)
        self._telemetry.delivery_seconds.observe(self._clock.monotonic_s() - started_s)
        self._telemetry.attempts.labels(receipt.outcome.value).inc()
        settled = after(delivery, receipt, self._clock.now_s(), self._settings, self._jitter())
        await asyncio.to_thread(self._settle, [settled])
        if receipt.outcome is Outcome.GONE:
            await asyncio.to_thread(self._end, subscription.id, receipt.error)

    def _void(self, event: OutboundEvent | None, now_s: float) -> str:
        """Return why the event must no longer be delivered, "" if it may."""
        if event is None:
            return "the event is no longer kept"
        if event.expires_s is not None and event.expires_s <= now_s:
            return "the event is past its expiry"
        if event.type == ACTION_REQUESTED:
            action = self._store.get(ACTIONS, event.subject)
            if action is not None and action.state not in _ASKING_STATES:
                return f"the action is {action.state}"
        return ""

    def _settle(self, deliveries: list[Delivery]) -> None:
        if not deliveries:
            return
        self._store.commit(Change(deliveries=tuple(deliveries)))
        for delivery in deliveries:
            if delivery.state != "pending":
                self._telemetry.deliveries.labels(delivery.state).inc()

    def _end(self, subscription_id: str, reason: str) -> None:
        def ended(store: Store) -> Change:
            subscription = store.get(SUBSCRIPTIONS, subscription_id)
            if subscription is None or not subscription.active:
                return Change()
            return Change(subscriptions=(replace(subscription, active=False, ended_reason=reason),))

        self._store.update(ended)
        self._fail_pending(subscription_id, reason)

    def _fail_pending(self, subscription_id: str, reason: str) -> None:
        now_s = self._clock.now_s()
        waiting = self._store.subscription_deliveries(subscription_id)
        self._settle([_failed(delivery, reason, now_s) for delivery in waiting])


def after(delivery: Delivery, receipt: Receipt, now_s: float, settings: WebhookSettings, jitter: float) -> Delivery:
    """Return the delivery after an attempt: delivered, failed, or due again.

    The delay is ``jitter`` (0 to 1) times the doubling backoff, but never less than the target asked for. It does
    not reach past the event's expiry, at which the delivery is voided.
    """
    tried = replace(
        delivery,
        attempts=delivery.attempts + 1,
        last_status=receipt.status,
        last_error=receipt.error,
        updated_s=now_s,
    )
    if receipt.outcome is Outcome.DELIVERED:
        return replace(tried, state="delivered")
    if receipt.outcome is not Outcome.RETRY:
        return replace(tried, state="failed")
    if tried.attempts >= settings.attempts_max:
        return _failed(tried, f"gave up after {tried.attempts} attempts: {receipt.error}", now_s)
    # Bounded before it is computed: 2.0**attempts overflows long before attempts_max has to be small.
    ceiling_s = min(settings.backoff_max_s, settings.backoff_base_s * 2.0 ** min(tried.attempts - 1, 64))
    delay_s = max(jitter * ceiling_s, receipt.retry_after_s or 0.0)
    due_s = now_s + delay_s
    return replace(tried, due_s=due_s if delivery.expires_s is None else min(due_s, delivery.expires_s))


def again(delivery: Delivery, now_s: float) -> Delivery:
    """Return the delivery as due now, with all its attempts before it. Raises IllegalTransition for a stale event."""
    if delivery.expires_s is not None and delivery.expires_s <= now_s:
        raise IllegalTransition(f"delivery {delivery.id} is of an event past its expiry; stale events are not sent")
    return replace(delivery, state="pending", attempts=0, due_s=now_s, last_error="", updated_s=now_s)


def _failed(delivery: Delivery, error: str, now_s: float) -> Delivery:
    return replace(delivery, state="failed", last_error=error, updated_s=now_s)
