"""Durable deliveries: at least once, in order within each incident; no incident or subscription blocks another."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from msgspec.structs import replace

from eagle_eye.schema.action import ACTION_REQUESTED, INCIDENT_OPENED, INCIDENT_UPDATED
from eagle_eye.server.delivery import silencing
from eagle_eye.server.delivery.alert_refresh import AlertRefresh
from eagle_eye.server.delivery.delivery_outcomes import DeliveryOutcomes
from eagle_eye.server.delivery.delivery_states import after, expired, failed, hopeless
from eagle_eye.server.delivery.in_flight import InFlight
from eagle_eye.server.delivery.notifiers.alerts import Alert
from eagle_eye.server.delivery.notifiers.receipts import Notifier, Outcome, Receipt
from eagle_eye.server.delivery.notifiers.signing import without_expired
from eagle_eye.server.delivery.notifiers.targets import Targets
from eagle_eye.server.delivery.settings import WebhookSettings
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.records import AuditEntry, Delivery, OutboundEvent, Subscription
from eagle_eye.server.store.changes import Signal, wait
from eagle_eye.server.store.store import ACTIONS, EVENTS, INCIDENTS, SUBSCRIPTIONS, Change, Due, Store
from eagle_eye.server.telemetry.counters import Telemetry

HOUSEKEEPING_S = 10.0
PAUSE_S = 5.0  # after a store failure: an outcome that cannot be recorded would be delivered again at once
EXPIRE_BATCH = 500
WHO = "server"  # in the audit trail
_ASKING_STATES = ("requested", "accepted", "running")

ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)


class Outbox:
    """Delivers pending deliveries from the store. ``jitter`` returns uniform numbers from 0 to 1.

    ``rise_above`` has this server lead under an epoch above the given one, and returns it; None where nothing changed.
    """

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
        rise_above: Callable[[int], int | None] = lambda _: None,
    ) -> None:
        self._rise_above = rise_above
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
        self._outcomes = DeliveryOutcomes(store, clock, telemetry)
        # One subscription takes at most half of a target's places, so that one that hangs leaves some to others.
        self._usual_places = min(settings.concurrency_per_subscription, max(1, settings.target_concurrency // 2))
        self._serving: dict[str, asyncio.Event] = {}  # by subscription; set when there may be more to start
        self._rests: dict[tuple[str, str], float] = {}  # until when this (subscription, URL) asked for no requests
        self._paused_until_s = 0.0

    async def run(self) -> None:
        """Deliver until cancelled."""
        woken = self._signal.waiter()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_house())
                while True:
                    delay_s = await self._dispatch(tasks)
                    await wait(woken, delay_s)
        finally:
            self._signal.forget(woken)

    async def serve(self, subscription_id: str) -> None:
        """Deliver what is due to one subscription, until nothing is due or in flight."""
        woken = self._serving.setdefault(subscription_id, asyncio.Event())
        flight = InFlight(self._usual_places)
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    woken.clear()
                    flight.clear_ended()
                    await self._guarded(self._start_due(subscription_id, flight, tasks))
                    if not flight.busy:
                        return
                    await woken.wait()
        finally:
            del self._serving[subscription_id]

    def wake(self, subscription_id: str) -> None:
        """Check for due deliveries of a subscription being served; does nothing for others."""
        if subscription_id in self._serving:
            self._serving[subscription_id].set()

    def housekeeping(self) -> list[Subscription]:
        """Void stale deliveries, bound each backlog, end silences, and delete expired secrets and old records.

        Return the active subscriptions.
        """
        now_s = self._clock.now_s()
        stale = self._store.expired_deliveries(now_s, EXPIRE_BATCH)
        self._settle([expired(delivery, "the event is past its expiry", now_s) for delivery in stale])
        for backlog in self._store.backlog():
            if backlog.pending > self._settings.pending_max:
                waiting = self._store.subscription_deliveries(backlog.subscription_id)
                excess = max(0, len(waiting) - self._settings.pending_max)
                error = f"backlog: more than {self._settings.pending_max} waited (webhooks.pending_max)"
                self._settle([failed(delivery, "backlog", error, now_s) for delivery in waiting[:excess]])
        active = [subscription for subscription in self._store.all(SUBSCRIPTIONS) if subscription.active]
        for subscription in active:
            if self._retired(subscription, now_s) is not subscription:
                self._retire(subscription.id, now_s)
        silencing.end_silences(self._store, now_s)
        self._store.prune(now_s, self._retention_s)
        return active

    def _know(self, active: Sequence[Subscription]) -> None:
        """Register the Alertmanagers to refresh, and drop rests of ended subscriptions and former URLs."""
        self._refresh.know(active)
        where = {(subscription.id, subscription.url) for subscription in active}
        self._rests = {key: until_s for key, until_s in self._rests.items() if key in where}

    async def _keep_house(self) -> None:
        while True:
            active = await self._guarded(asyncio.to_thread(self.housekeeping))
            if active is not None:
                self._know(active)
                self._signal.notify()
            await asyncio.sleep(HOUSEKEEPING_S)

    async def _dispatch(self, tasks: asyncio.TaskGroup) -> float:
        """Start serving the subscriptions with due deliveries; return how long to wait for the next."""
        if self._clock.monotonic_s() < self._paused_until_s:
            return self._paused_until_s - self._clock.monotonic_s()
        now_s = self._clock.now_s()
        upcoming = await self._guarded(asyncio.to_thread(self._store.upcoming, now_s)) or {}
        waits_s = [one.next_s - now_s for one in upcoming.values() if one.next_s is not None]
        due = {name for name, one in upcoming.items() if one.due}
        for name, wait_s in self._refresh.waits_s().items():
            if wait_s <= 0.0:
                due.add(name)
            else:
                waits_s.append(wait_s)
        for (name, _), until_s in self._rests.items():
            rest_s = until_s - self._clock.monotonic_s()
            if name in due and rest_s > 0.0:
                due.discard(name)
                waits_s.append(rest_s)
        for name in due:
            self.wake(name)
            if name not in self._serving:
                self._serving[name] = asyncio.Event()
                tasks.create_task(self._serve_one(name))
        return min((wait_s for wait_s in waits_s if wait_s > 0.0), default=HOUSEKEEPING_S)

    async def _serve_one(self, subscription_id: str) -> None:
        try:
            await self.serve(subscription_id)
        finally:
            # What became due just before it ended was missed.
            self._signal.notify()

    async def _start_due(self, subscription_id: str, flight: InFlight, tasks: asyncio.TaskGroup) -> None:
        """Start the subscription's due deliveries for which there is a place."""
        if self._clock.monotonic_s() < self._paused_until_s:
            return
        subscription, due = await asyncio.to_thread(self._look, subscription_id, flight.ask_max)
        if subscription is None or not subscription.active:
            self._refresh.forget(subscription_id)
            await asyncio.to_thread(self._fail_pending, subscription_id, "ended", "the subscription has ended")
            return
        if self._rest_s(subscription) > 0.0:
            return
        wake = self._serving[subscription_id].set
        if not flight.refreshing and self._refresh.is_due(subscription_id):
            firing = await asyncio.to_thread(self._refresh.firing, subscription, flight.groups)
            flight.start_refresh(firing)
            tasks.create_task(self._tell(subscription, firing, flight, wake))
        for one in flight.start(due):
            tasks.create_task(self._deliver(subscription, one, flight, wake))

    def _look(self, subscription_id: str, ask_max: int) -> tuple[Subscription | None, list[Due]]:
        subscription = self._store.get(SUBSCRIPTIONS, subscription_id)
        return subscription, self._store.due_deliveries(subscription_id, self._clock.now_s(), ask_max)

    async def _tell(
        self,
        subscription: Subscription,
        firing: Mapping[str, Sequence[Alert]],
        flight: InFlight,
        wake: Callable[[], None],
    ) -> None:
        try:
            await self._guarded(self._told(subscription, firing))
        finally:
            flight.end_refresh()
            wake()

    async def _told(self, subscription: Subscription, firing: Mapping[str, Sequence[Alert]]) -> None:
        self._store.ensure_leading()
        receipt = await self._answer(self._refresh.tell(subscription, firing))
        await self._note(subscription, receipt)

    async def _deliver(self, subscription: Subscription, due: Due, flight: InFlight, wake: Callable[[], None]) -> None:
        try:
            await self._guarded(self._attempt(subscription, due))
        finally:
            flight.end(due.delivery.id)
            wake()

    async def _guarded(self, work: Awaitable[ResultT]) -> ResultT | None:
        """Return the result of ``work``; after an error pause deliveries, count it and return None."""
        try:
            return await work
        except StoreUnavailable as error:
            _log.warning("deliveries pause", extra={"pause_s": PAUSE_S, "error": str(error)})
            self._telemetry.failures.labels("store").inc()
        except Exception:  # noqa: BLE001 - a bug in one delivery must not end all deliveries for ever
            _log.exception("a delivery failed for a reason that was not foreseen")
            self._telemetry.failures.labels("outbox").inc()
        self._paused_until_s = self._clock.monotonic_s() + PAUSE_S
        return None

    async def _answer(self, request: Awaitable[Receipt]) -> Receipt:
        """Return the receipt of a request; an unexpected error counts as a failure of this subscription only."""
        try:
            return await request
        except Exception as error:  # noqa: BLE001 - errors that one subscriber can provoke must not pause the others
            _log.exception("a delivery failed for a reason that was not foreseen")
            self._telemetry.failures.labels("outbox").inc()
            return Receipt(Outcome.RETRY, error=type(error).__name__)

    async def _attempt(self, subscription: Subscription, due: Due) -> None:
        delivery = due.delivery
        async with self._targets.turn(subscription.url, due.urgent):
            # Checked only now: the event may have become stale while waiting.
            now_s = self._clock.now_s()
            event = await asyncio.to_thread(self._event, subscription, delivery, now_s)
            if event is None:
                return
            self._store.ensure_leading()
            timeout_s = self._settings.timeout_s
            if event.expires_s is not None:
                timeout_s = min(timeout_s, event.expires_s - now_s)
            started_s = self._clock.monotonic_s()
            receipt = await self._answer(self._notifier.deliver(subscription, event, now_s, timeout_s))
        self._telemetry.delivery_seconds.observe(self._clock.monotonic_s() - started_s)
        self._telemetry.attempts.labels(receipt.outcome.value).inc()
        settled = after(delivery, receipt, self._clock.now_s(), self._settings, self._jitter())
        await self._note(subscription, receipt, settled)

    async def _note(self, subscription: Subscription, receipt: Receipt, settled: Delivery | None = None) -> None:
        """Record the outcome of a request for its delivery, if any, and for the subscription's health."""
        self._mind_rest(subscription, receipt)
        if receipt.epoch_seen is not None:
            await asyncio.to_thread(self._mind_epoch, subscription, receipt.epoch_seen)
        health = await self._outcomes.write(subscription.id, receipt, settled)
        if receipt.outcome is Outcome.GONE:
            await asyncio.to_thread(self._end, subscription.id, "gone", receipt.error)
        elif hopeless(health, self._clock.now_s(), self._settings.disable_after_s):
            reason = f"nothing arrived for {self._settings.disable_after_s:g} s (webhooks.disable_after_s)"
            await asyncio.to_thread(self._end, subscription.id, "hopeless", f"{reason}: {receipt.error}")

    def _rest_s(self, subscription: Subscription) -> float:
        """Return for how many seconds the target wants no requests; 0 or less: none."""
        until_s = self._rests.get((subscription.id, subscription.url))
        return 0.0 if until_s is None else until_s - self._clock.monotonic_s()

    def _mind_rest(self, subscription: Subscription, receipt: Receipt) -> None:
        """Record the rest that the target asked for: it applies to everything sent there, not only to this request."""
        now_s = self._clock.monotonic_s()
        self._rests = {key: until_s for key, until_s in self._rests.items() if until_s > now_s}
        if receipt.retry_after_s:
            self._rests[subscription.id, subscription.url] = now_s + receipt.retry_after_s

    def _mind_epoch(self, subscription: Subscription, seen: int) -> None:
        """Lead under an epoch above the one that the subscriber has seen; the delivery is then repeated with it."""
        epoch = self._rise_above(seen)
        if epoch is not None:
            detail = f"to {epoch}: the subscription had seen {seen}"
            entry = AuditEntry(
                time_s=self._clock.now_s(), who=WHO, verb="raise epoch", subject=subscription.id, detail=detail
            )
            self._store.commit(Change(audit=(entry,)))

    def _event(self, subscription: Subscription, delivery: Delivery, now_s: float) -> OutboundEvent | None:
        """Return the event; None once the delivery is settled, because it must not be made any more or is silenced."""
        event = self._store.get(EVENTS, delivery.event_id)
        void = self._void(subscription, event, now_s)
        if event is None or void:
            self._settle([expired(delivery, void, now_s)])
            return None
        withheld = silencing.withhold(self._store, delivery, event, now_s)
        if withheld is not None:
            self._outcomes.count([withheld])
            return None
        return event

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

    def _settle(self, deliveries: Sequence[Delivery]) -> None:
        if deliveries:
            self._store.commit(Change(deliveries=tuple(deliveries)))
            self._outcomes.count(deliveries)

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
        self._settle([failed(delivery, word, reason, now_s) for delivery in waiting])
