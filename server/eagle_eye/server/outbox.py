"""Durable deliveries: at least once, in order within each incident, no subscription waiting for another."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from eagle_eye.schema.action import ACTION_REQUESTED, INCIDENT_OPENED, INCIDENT_UPDATED
from eagle_eye.server.alert_refresh import AlertRefresh
from eagle_eye.server.changes import Signal, wait
from eagle_eye.server.clock import Clock
from eagle_eye.server.config import WebhookSettings
from eagle_eye.server.errors import IllegalTransition, StoreUnavailable
from eagle_eye.server.notifiers.receipts import Notifier, Outcome, Receipt
from eagle_eye.server.notifiers.signing import without_expired
from eagle_eye.server.notifiers.targets import Targets
from eagle_eye.server.records import AuditEntry, Delivery, OutboundEvent, Subscription, SubscriptionHealth
from eagle_eye.server.store import ACTIONS, EVENTS, INCIDENTS, SUBSCRIPTION_HEALTH, SUBSCRIPTIONS, Change, Store
from eagle_eye.server.telemetry import Telemetry

HOUSEKEEPING_S = 10.0
PAUSE_S = 5.0  # after the store failed: an outcome that cannot be written down would be delivered again at once
EXPIRE_BATCH = 500
WHO = "server"  # in the audit trail
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
        targets: Targets,
        refresh: AlertRefresh,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._notifier = notifier
        self._settings = settings
        self._clock = clock
        self._telemetry = telemetry
        self._signal = signal
        self._retention_s = retention_s
        self._targets = targets
        self._refresh = refresh
        self._jitter = jitter
        self._serving: set[str] = set()
        self._rests: dict[tuple[str, str], float] = {}  # (subscription, URL) that asked for rest, until when
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
                        active = await self._guarded(asyncio.to_thread(self.housekeeping))
                        if active is not None:
                            self._know(active)
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
                self._refresh.forget(subscription_id)
                await asyncio.to_thread(self._fail_pending, subscription_id, "ended", reason)
                return
            if self._rest_s(subscription) > 0.0:
                return
            receipt = await self._refresh.refresh_if_due(subscription)
            if receipt is not None:
                self._mind_rest(subscription, receipt)
            heads = await asyncio.to_thread(
                self._store.due_deliveries,
                subscription_id,
                self._clock.now_s(),
                self._settings.concurrency_per_subscription,
            )
            if not heads or self._rest_s(subscription) > 0.0:
                return
            # Heads are of different groups, so they may overtake each other.
            await asyncio.gather(*(self._attempt(subscription, delivery) for delivery in heads))

    def housekeeping(self) -> list[Subscription]:
        """Void stale deliveries, bound each backlog, forget secrets that sign no more and records that are old.

        Return the subscriptions that are active.
        """
        now_s = self._clock.now_s()
        stale = self._store.expired_deliveries(now_s, EXPIRE_BATCH)
        self._settle([_expired(delivery, "the event is past its expiry", now_s) for delivery in stale])
        for backlog in self._store.backlog():
            if backlog.pending > self._settings.pending_max:
                waiting = self._store.subscription_deliveries(backlog.subscription_id)
                excess = max(0, len(waiting) - self._settings.pending_max)
                error = f"backlog: more than {self._settings.pending_max} waited (webhooks.pending_max)"
                self._settle([_failed(delivery, "backlog", error, now_s) for delivery in waiting[:excess]])
        active = [subscription for subscription in self._store.all(SUBSCRIPTIONS) if subscription.active]
        for subscription in active:
            if self._retired(subscription, now_s) is not subscription:
                self._retire(subscription.id, now_s)
        self._store.prune(now_s, self._retention_s)
        return active

    def _know(self, active: Sequence[Subscription]) -> None:
        """Have those refreshed that are to be, and forget what others, or their former URLs, asked for."""
        self._refresh.know(active)
        where = {(subscription.id, subscription.url) for subscription in active}
        self._rests = {key: until_s for key, until_s in self._rests.items() if key in where}

    async def _dispatch(self, tasks: asyncio.TaskGroup) -> float:
        """Start serving the subscriptions that something is due for; return how long to wait for the next."""
        if self._clock.monotonic_s() < self._paused_until_s:
            return self._paused_until_s - self._clock.monotonic_s()
        due = await self._guarded(asyncio.to_thread(self._store.next_due_s))
        now_s = self._clock.now_s()
        waits_s = {name: due_s - now_s for name, due_s in (due or {}).items()}
        for name, wait_s in self._refresh.waits_s().items():
            waits_s[name] = min(wait_s, waits_s.get(name, wait_s))
        for (name, _), until_s in self._rests.items():
            if name in waits_s:
                waits_s[name] = max(waits_s[name], until_s - self._clock.monotonic_s())
        for name in [name for name, wait_s in waits_s.items() if wait_s <= 0.0 and name not in self._serving]:
            self._serving.add(name)
            tasks.create_task(self._serve_one(name))
        return min((wait_s for wait_s in waits_s.values() if wait_s > 0.0), default=HOUSEKEEPING_S)

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
        async with self._targets.turn(subscription.url):
            # Only now: while it waited for its turn the event may have become stale.
            now_s = self._clock.now_s()
            event = await asyncio.to_thread(self._store.get, EVENTS, delivery.event_id)
            void = await asyncio.to_thread(self._void, subscription, event, now_s)
            if event is None or void:
                await asyncio.to_thread(self._settle, [_expired(delivery, void, now_s)])
                return
            timeout_s = self._settings.timeout_s
            if event.expires_s is not None:
                timeout_s = min(timeout_s, event.expires_s - now_s)
            started_s = self._clock.monotonic_s()
            receipt = await self._notifier.deliver(subscription, event, now_s, timeout_s)
        self._telemetry.delivery_seconds.observe(self._clock.monotonic_s() - started_s)
        self._telemetry.attempts.labels(receipt.outcome.value).inc()
        self._mind_rest(subscription, receipt)
        settled = after(delivery, receipt, self._clock.now_s(), self._settings, self._jitter())
        health = await asyncio.to_thread(self._record, settled, receipt)
        if receipt.outcome is Outcome.GONE:
            await asyncio.to_thread(self._end, subscription.id, "gone", receipt.error)
        elif hopeless(health, settled.updated_s, self._settings.disable_after_s):
            reason = f"nothing arrived for {self._settings.disable_after_s:g} s (webhooks.disable_after_s)"
            await asyncio.to_thread(self._end, subscription.id, "hopeless", f"{reason}: {receipt.error}")

    def _rest_s(self, subscription: Subscription) -> float:
        """Return for how many seconds the target wants nothing; below or at 0: it takes something."""
        until_s = self._rests.get((subscription.id, subscription.url))
        return 0.0 if until_s is None else until_s - self._clock.monotonic_s()

    def _mind_rest(self, subscription: Subscription, receipt: Receipt) -> None:
        """Keep what the target asked for: it concerns all that goes there, not only what was refused."""
        now_s = self._clock.monotonic_s()
        self._rests = {key: until_s for key, until_s in self._rests.items() if until_s > now_s}
        if receipt.retry_after_s:
            self._rests[subscription.id, subscription.url] = now_s + receipt.retry_after_s

    def _void(self, subscription: Subscription, event: OutboundEvent | None, now_s: float) -> str:
        """Return why the event must no longer be delivered, "" if it may."""
        if event is None:
            return "the event is no longer kept"
        if event.expires_s is not None and event.expires_s <= now_s:
            return "the event is past its expiry"
        if event.type == ACTION_REQUESTED:
            action = self._store.get(ACTIONS, event.subject)
            if action is not None and action.state not in _ASKING_STATES:
                return f"the action is {action.state}"
        if subscription.format == "alertmanager_api" and event.type in (INCIDENT_OPENED, INCIDENT_UPDATED):
            incident = self._store.get(INCIDENTS, event.subject)
            if incident is not None and incident.ended_s is not None:
                return "the incident is over, its alert must not fire any more"
        return ""

    def _record(self, settled: Delivery, receipt: Receipt) -> SubscriptionHealth:
        """Write down what came of an attempt, for the delivery and for its subscription, whose health is returned."""
        name = settled.subscription_id

        def tried(store: Store) -> Change:
            health = store.get(SUBSCRIPTION_HEALTH, name) or SubscriptionHealth(subscription_id=name)
            return Change(deliveries=(settled,), subscription_health=(fared(health, receipt, settled.updated_s),))

        change = self._store.update(tried)
        self._count((settled,))
        return change.subscription_health[0]

    def _settle(self, deliveries: Sequence[Delivery]) -> None:
        if deliveries:
            self._store.commit(Change(deliveries=tuple(deliveries)))
            self._count(deliveries)

    def _count(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            if delivery.state != "pending":
                self._telemetry.deliveries.labels(delivery.state).inc()
            if delivery.reason:
                self._telemetry.delivery_failures.labels(delivery.reason).inc()

    def _retired(self, subscription: Subscription, now_s: float) -> Subscription:
        return without_expired(subscription, now_s, self._settings.rotation_overlap_s)

    def _retire(self, subscription_id: str, now_s: float) -> None:
        def retired(store: Store) -> Change:
            old = store.get(SUBSCRIPTIONS, subscription_id)
            new = None if old is None else self._retired(old, now_s)
            if new is None or new is old:
                return Change()
            entry = AuditEntry(time_s=now_s, who=WHO, verb="retire secrets", subject=subscription_id)
            return Change(subscriptions=(new,), audit=(entry,))

        self._store.update(retired)

    def _end(self, subscription_id: str, word: str, reason: str) -> None:
        now_s = self._clock.now_s()

        def ended(store: Store) -> Change:
            subscription = store.get(SUBSCRIPTIONS, subscription_id)
            if subscription is None or not subscription.active:
                return Change()
            entry = AuditEntry(time_s=now_s, who=WHO, verb="unsubscribe", subject=subscription_id, detail=reason)
            return Change(subscriptions=(replace(subscription, active=False, ended_reason=reason),), audit=(entry,))

        if not self._store.update(ended).empty:
            _log.warning("a subscription has ended", extra={"subscription": subscription_id, "reason": reason})
        self._fail_pending(subscription_id, word, reason)

    def _fail_pending(self, subscription_id: str, word: str, reason: str) -> None:
        now_s = self._clock.now_s()
        waiting = self._store.subscription_deliveries(subscription_id)
        self._settle([_failed(delivery, word, reason, now_s) for delivery in waiting])


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
        reason="",
        updated_s=now_s,
    )
    if receipt.outcome is Outcome.DELIVERED:
        return replace(tried, state="delivered")
    if receipt.outcome is not Outcome.RETRY:
        return replace(tried, state="failed", reason=receipt.outcome.value)
    if tried.attempts >= settings.attempts_max:
        return _failed(tried, "attempts", f"gave up after {tried.attempts} attempts: {receipt.error}", now_s)
    # Bounded before it is computed: 2.0**attempts overflows long before attempts_max has to be small.
    ceiling_s = min(settings.backoff_max_s, settings.backoff_base_s * 2.0 ** min(tried.attempts - 1, 64))
    delay_s = max(jitter * ceiling_s, receipt.retry_after_s or 0.0)
    due_s = now_s + delay_s
    return replace(tried, due_s=due_s if delivery.expires_s is None else min(due_s, delivery.expires_s))


def again(delivery: Delivery, now_s: float) -> Delivery:
    """Return the delivery as due now, with all its attempts before it. Raises IllegalTransition for a stale event."""
    if delivery.expires_s is not None and delivery.expires_s <= now_s:
        raise IllegalTransition(f"delivery {delivery.id} is of an event past its expiry; stale events are not sent")
    return replace(delivery, state="pending", attempts=0, due_s=now_s, last_error="", reason="", updated_s=now_s)


def fared(health: SubscriptionHealth, receipt: Receipt, now_s: float) -> SubscriptionHealth:
    """Return a subscription's health after one more attempt."""
    if receipt.outcome is Outcome.DELIVERED:
        return SubscriptionHealth(subscription_id=health.subscription_id, delivered_s=now_s, last_status=receipt.status)
    return replace(
        health,
        failures=health.failures + 1,
        failing_since_s=now_s if health.failing_since_s is None else health.failing_since_s,
        last_status=receipt.status,
        last_error=receipt.error,
    )


def hopeless(health: SubscriptionHealth, now_s: float, limit_s: float) -> bool:
    """Return whether attempts made as long as ``limit_s`` apart, and all between, have failed; 0: that is no reason."""
    since_s = health.failing_since_s
    return limit_s > 0.0 and since_s is not None and now_s - since_s >= limit_s


def _failed(delivery: Delivery, reason: str, error: str, now_s: float) -> Delivery:
    return replace(delivery, state="failed", reason=reason, last_error=error, updated_s=now_s)


def _expired(delivery: Delivery, error: str, now_s: float) -> Delivery:
    return replace(delivery, state="expired", reason="expired", last_error=error, updated_s=now_s)
