"""Durable deliveries: at least once, in order within each incident; no incident or subscription blocks another.

Also what is withheld or repeated: news of silenced incidents, alerts that an Alertmanager would forget, and the ping by
which a new leader tells its epoch.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from msgspec.structs import replace
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.schema.action import ACTION_REQUESTED, INCIDENT_OPENED, INCIDENT_RESOLVED, INCIDENT_UPDATED
from eagle_eye.schema.backoff import doubled_s
from eagle_eye.schema.metrics import PROMETHEUS_PREFIX
from eagle_eye.server.delivery import events as outbound
from eagle_eye.server.delivery.attempts import (
    InFlight,
    Notifier,
    Outcome,
    Receipt,
    WebhookSettings,
    after,
    expired,
    failed,
    fared,
    hopeless,
    silenced,
)
from eagle_eye.server.delivery.message_formats import Alert, AlertmanagerApi
from eagle_eye.server.delivery.webhook import Targets, without_expired
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.event_filters import INCIDENT_TYPES, covering, covering_incident, silence_in_words, wants
from eagle_eye.server.model.records import (
    AuditEntry,
    Delivery,
    Incident,
    NewsSilence,
    OutboundEvent,
    Subscription,
    SubscriptionHealth,
)
from eagle_eye.server.store.store import (
    ACTIONS,
    DELIVERIES,
    EVENTS,
    INCIDENTS,
    PAGE_LIMIT_MAX,
    SILENCES,
    SUBSCRIPTION_HEALTH,
    SUBSCRIPTIONS,
    Change,
    ChangeSignal,
    Due,
    Store,
    wait_for_change,
)
from eagle_eye.server.telemetry.counters import Telemetry


class _Entry(NamedTuple):
    subscription_id: str
    receipt: Receipt
    settled: Delivery | None
    written: asyncio.Future[SubscriptionHealth]


class DeliveryOutcomes:
    """Records the outcomes of requests; those that arrive during a commit share the next. On one event loop only."""

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


# Silences withhold news of incidents, and send what still goes on once they are over.

ACTIVE_MAX = 100  # silences at a time, all of which a person must still be able to read
WHO = "server"  # in the audit trail


def silences_in_force(store: Store, now_s: float) -> list[NewsSilence]:
    """Return the silences whose time is not over, newest first."""
    return [one for one in _active_silences(store) if now_s < one.until_s]


def silence_of(store: Store, incident: Incident, now_s: float) -> NewsSilence | None:
    """Return the silence in force that covers an incident that is not over for good, or None."""
    return (
        None if incident.state in ("closed", "false") else covering_incident(silences_in_force(store, now_s), incident)
    )


def withhold(store: Store, delivery: Delivery, event: OutboundEvent, now_s: float) -> Delivery | None:
    """Settle the delivery if a silence withholds its event, and return it; else return None.

    Only news of incidents is withheld, never what asks for an action or takes it back. An end is delivered to whoever
    was told of the beginning: there the incident would go on for ever.
    """

    def settled(store: Store) -> Change:
        fault, nodes = str(event.data.get("fault", "")), event.data.get("nodes", ())
        found = covering(silences_in_force(store, now_s), fault, event.job, nodes)
        if found is None:
            return Change()
        if event.type == INCIDENT_RESOLVED and last_told(store, delivery.subscription_id, event.group) is not None:
            return Change()
        return Change(deliveries=(silenced(delivery, silence_in_words(found), now_s),))

    if event.type not in INCIDENT_TYPES or settled(store).empty:
        return None
    # In one transaction: a silence that ends meanwhile must find the delivery withheld, or not withhold it.
    return next(iter(store.update(settled).deliveries), None)


def last_told(store: Store, subscription_id: str, incident_id: str) -> Delivery | None:
    """Return the delivery by which the subscription last learnt that the incident goes on, None if it did not."""
    filters = {"group": incident_id, "subscription_id": subscription_id, "state": "delivered"}
    newest = store.page(DELIVERIES, filters, limit=1).items
    return newest[0] if newest and newest[0].type != INCIDENT_RESOLVED else None


def end_silences(store: Store, now_s: float) -> None:
    """End the silences whose time is over, and announce the incidents that go on and of which they withheld news."""
    if all(now_s < one.until_s for one in _active_silences(store)):
        return

    def ended(store: Store) -> Change:
        over = [one for one in _active_silences(store) if one.until_s <= now_s]
        left = silences_in_force(store, now_s)
        wanting = frozenset(one.id for one in store.all(SUBSCRIPTIONS) if one.active)
        going_on = [one for one in store.open_incidents() if one.ended_s is None]
        news = (_withheld_news(store, one, wanting, now_s) for one in going_on if covering_incident(left, one) is None)
        return Change(
            silences=tuple(replace(one, state="ended") for one in over),
            events=tuple(event for event in news if event is not None),
            audit=tuple(
                AuditEntry(time_s=now_s, who=WHO, verb="end silence", subject=one.id)
                for one in over
                if not one.ended_by
            ),
        )

    store.update(ended)


def _withheld_news(store: Store, incident: Incident, wanting: frozenset[str], now_s: float) -> OutboundEvent | None:
    """Return the incident as it is now if the newest of it was withheld from any of the subscriptions, else None."""
    withheld: list[Delivery] = []
    heard: set[str] = set()
    for delivery in store.page(DELIVERIES, {"group": incident.id}, limit=PAGE_LIMIT_MAX).items:
        if delivery.state != "silenced":
            heard.add(delivery.subscription_id)
        elif delivery.subscription_id in wanting - heard:
            withheld.append(delivery)
    if not withheld:
        return None
    opening = any(delivery.type == INCIDENT_OPENED for delivery in withheld)
    first = store.get(EVENTS, withheld[-1].event_id)
    return outbound.incident_unsilenced(incident, opening, {} if first is None else first.data.get("was", {}), now_s)


def _active_silences(store: Store) -> list[NewsSilence]:
    return store.page(SILENCES, {"state": "active"}, limit=PAGE_LIMIT_MAX).items


# Firing alerts are repeated to each Alertmanager, which forgets alerts that are not repeated.
#
# Each refresh is read from the store, so that a restart of either side loses nothing, and an alert whose end was not
# delivered ends anyway once its last refresh has expired.

REQUEST_ALERTS_MAX = 100  # per request


class AlertRefresh:
    """The subscriptions that are Alertmanagers, and when each is next due. On one event loop only."""

    def __init__(
        self,
        store: Store,
        notifier: Notifier,
        form: AlertmanagerApi,
        targets: Targets,
        settings: WebhookSettings,
        clock: Clock,
        telemetry: Telemetry,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._notifier = notifier
        self._form = form
        self._targets = targets
        self._settings = settings
        self._clock = clock
        self._telemetry = telemetry
        self._jitter = jitter
        self._due_s: dict[str, float] = {}  # by subscription, on the monotonic clock
        self._failures: dict[str, int] = {}  # by subscription, since the last success

    def know(self, subscriptions: Iterable[Subscription]) -> None:
        """Set the active subscriptions; new ones are due at once."""
        now_s = self._clock.monotonic_s()
        names = {one.id for one in subscriptions if one.format == "alertmanager_api"}
        self._due_s = {name: self._due_s.get(name, now_s) for name in names}
        self._failures = {name: count for name, count in self._failures.items() if name in names}

    def forget(self, subscription_id: str) -> None:
        """Stop refreshing this subscription; it has ended."""
        self._due_s.pop(subscription_id, None)
        self._failures.pop(subscription_id, None)

    def waits_s(self) -> dict[str, float]:
        """Return for each Alertmanager's subscription the seconds until it is due; below 0: overdue."""
        now_s = self._clock.monotonic_s()
        return {name: due_s - now_s for name, due_s in self._due_s.items()}

    def is_due(self, subscription_id: str) -> bool:
        """Return whether the subscription is an Alertmanager's and due now."""
        due_s = self._due_s.get(subscription_id)
        return due_s is not None and due_s <= self._clock.monotonic_s()

    def firing(self, subscription: Subscription, but: Collection[str]) -> dict[str, list[Alert]]:
        """Return the alerts to refresh for the subscription, by incident, without the incidents ``but``.

        Of a silenced incident that is the alert as it was last told, if it was: to let it end would be news, too.
        """
        now_s = self._clock.now_s()
        silences = silences_in_force(self._store, now_s)
        found = {}
        for incident in self._store.open_incidents():
            if incident.ended_s is not None or incident.id in but:
                continue
            event = outbound.incident_opened(incident, now_s)
            if wants(subscription, event) or (
                wants(subscription, event, reported=True) and self._store.reported(subscription.id, incident.id)
            ):
                if covering_incident(silences, incident) is not None:
                    last = last_told(self._store, subscription.id, incident.id)
                    known = None if last is None else self._store.get(EVENTS, last.event_id)
                    if known is None:
                        continue
                    event = known
                found[incident.id] = self._form.alerts(event)[:1]
        return found

    async def send_alerts(self, subscription: Subscription, firing: Mapping[str, Sequence[Alert]]) -> Receipt:
        """Send the subscription its firing alerts; return the receipt of the last request.

        If nothing fires the request is empty, so that an Alertmanager that is down is noticed before it is needed.
        After a failure the next refresh comes after a doubling delay with jitter, ``alert_refresh_s`` at most.
        Meanwhile no event of these incidents may be delivered to the subscription: an end would be undone.
        """
        name = subscription.id
        self._due_s[name] = self._clock.monotonic_s() + self._settings.alert_refresh_s
        alerts = [alert for of_one in firing.values() for alert in of_one]
        start = 0
        while True:
            receipt = await self._post(subscription, alerts[start : start + REQUEST_ALERTS_MAX], start)
            self._telemetry.refreshes.labels(receipt.outcome.value).inc()
            start += REQUEST_ALERTS_MAX
            if receipt.outcome is not Outcome.DELIVERED or start >= len(alerts):
                break
        if receipt.outcome is Outcome.DELIVERED:
            self._failures.pop(name, None)
        else:
            self._failures[name] = failures = self._failures.get(name, 0) + 1
            most_s = self._settings.alert_refresh_s
            delay_s = self._jitter() * doubled_s(self._settings.backoff_base_s, most_s, failures)
            if name in self._due_s:
                self._due_s[name] = self._clock.monotonic_s() + delay_s
        return receipt

    async def _post(self, subscription: Subscription, alerts: Sequence[Alert], start: int) -> Receipt:
        async with self._targets.turn(subscription.url):
            now_s = self._clock.now_s()
            message = self._form.push(subscription, f"refresh-{round(now_s * 1000)}-{start}", alerts, now_s)
            return await self._notifier.post(subscription, message, now_s, self._settings.timeout_s)


# The outbox.

HOUSEKEEPING_S = 10.0
PAUSE_S = 5.0  # after a store failure: an outcome that cannot be recorded would be delivered again at once
EXPIRE_BATCH = 500
_ASKING_STATES = ("requested", "accepted", "running")

ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Senders:
    """What makes an outbox's requests: ``notifier`` each delivery, in the order of ``targets``; ``refresh`` repeats.

    ``rise_above`` has this server lead under an epoch above the given one, and returns it; None where nothing changed.
    """

    notifier: Notifier
    targets: Targets
    refresh: AlertRefresh
    rise_above: Callable[[int], int | None] = lambda _: None


class Outbox:
    """Delivers pending deliveries from the store. ``jitter`` returns uniform numbers from 0 to 1."""

    def __init__(
        self,
        store: Store,
        senders: Senders,
        settings: WebhookSettings,
        clock: Clock,
        telemetry: Telemetry,
        signal: ChangeSignal,
        retention_s: float,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._rise_above = senders.rise_above
        self._store = store
        self._notifier = senders.notifier
        self._settings = settings
        self._clock = clock
        self._telemetry = telemetry
        self._signal = signal
        self._retention_s = retention_s
        self._targets = senders.targets
        self._refresh = senders.refresh
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
                    await wait_for_change(woken, delay_s)
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
        end_silences(self._store, now_s)
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
        receipt = await self._answer(self._refresh.send_alerts(subscription, firing))
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
        withheld = withhold(self._store, delivery, event, now_s)
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


# A server that begins to lead tells subscribers its epoch: what the one before has under way is refused then.

WITHIN_RATIO = 0.5  # of a lease, for which nothing is judged where a subscriber does not answer
RECORDS_PAUSE_S = 1.0  # between tries while the records cannot be used
REFUSED_FOR_EPOCH = 409  # of a delivery that is pending; other refusals with this status are final
NAMED_MAX = 10  # subscriptions in one line of the log


class LeaderPing:
    """One ping to each subscription whose events have an epoch; the outbox delivers it, and repeats it."""

    def __init__(
        self,
        store: Store,
        signal: ChangeSignal,
        clock: Clock,
        telemetry: Telemetry,
        lease_s: float,
        waiting: Callable[[asyncio.Event, float], Awaitable[bool]] = wait_for_change,
    ) -> None:
        self._store = store
        self._signal = signal
        self._clock = clock
        self._telemetry = telemetry
        self._within_s = WITHIN_RATIO * lease_s
        self._waiting = waiting
        self._over = False

    async def sent(self) -> None:
        """Return once each subscriber has answered or cannot be reached, after half a lease at the latest.

        While the records cannot be used it waits for them: nothing can be judged either. Later calls return at once.
        """
        if self._over:
            return
        woken = self._signal.waiter()
        try:
            pings = await self._committed()
            began_s = self._clock.monotonic_s()
            tried: dict[str, Delivery] = {}
            while len(tried) < len(pings):
                tried |= await asyncio.to_thread(self._tried, [ping for ping in pings if ping not in tried])
                left_s = began_s + self._within_s - self._clock.monotonic_s()
                if left_s <= 0.0:
                    break
                if len(tried) < len(pings):
                    await self._waiting(woken, left_s)
        finally:
            self._signal.forget(woken)
        self._over = True
        self._note(pings, tried, self._clock.monotonic_s() - began_s)

    async def _committed(self) -> dict[str, str]:
        """Have the outbox deliver the pings; return each one's subscription."""
        while True:
            try:
                return await asyncio.to_thread(self._commit)
            except StoreUnavailable as error:
                _log.warning("subscribers cannot be told who leads yet", extra={"error": str(error)})
                await asyncio.sleep(RECORDS_PAUSE_S)

    def _commit(self) -> dict[str, str]:
        now_s = self._clock.now_s()
        asked = [one for one in self._store.all(SUBSCRIPTIONS) if one.active and one.format == "cloudevents"]
        pings = tuple(outbound.ping(one, secrets.token_hex(8), now_s) for one in asked)
        if pings:
            self._store.commit(Change(events=pings))
        return {ping.id: ping.subject for ping in pings}

    def _tried(self, pings: Sequence[str]) -> dict[str, Delivery]:
        """Return those of the pings of which an attempt has ended; one that was refused for its epoch is repeated."""
        try:
            found = self._store.page(DELIVERIES, {"event_id": pings[:PAGE_LIMIT_MAX]}, limit=PAGE_LIMIT_MAX).items
        except StoreUnavailable:
            return {}
        return {
            one.event_id: one
            for one in found
            if one.state != "pending" or (one.attempts and one.last_status != REFUSED_FOR_EPOCH)
        }

    def _note(self, pings: dict[str, str], tried: dict[str, Delivery], took_s: float) -> None:
        answered = [ping for ping, delivery in tried.items() if delivery.state == "delivered"]
        counts = {
            "answered": len(answered),
            "failed": len(tried) - len(answered),
            "no_answer": len(pings) - len(tried),
        }
        for outcome, count in counts.items():
            self._telemetry.leader_pings.labels(outcome).inc(count)
        said = {**counts, "took_s": round(took_s, 3)}
        if len(answered) == len(pings):
            _log.info("subscribers were told who leads", extra=said)
            return
        untold = [name for ping, name in pings.items() if ping not in answered]
        named = ", ".join(untold[:NAMED_MAX]) + (f" and {len(untold) - NAMED_MAX} more" * (len(untold) > NAMED_MAX))
        _log.warning(
            "it is judged though not all subscribers could be told who leads; the pings are repeated",
            extra={**said, "subscriptions": named},
        )


class DeliveryCollector(Collector):
    """One series for each active subscription, of which there are at most ``webhooks.subscriptions_max``."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """Yield the families; nothing while the records cannot be read."""
        pending = _family("webhook_pending", "Deliveries that are due or wait.")
        oldest = _family("webhook_oldest_pending_seconds", "Age of the oldest event that waits; 0 when none does.")
        failing = _family("webhook_failing_seconds", "Since when every attempt has failed; 0 when the last succeeded.")
        now_s = self._clock.now_s()
        try:
            backlogs = {backlog.subscription_id: backlog for backlog in self._store.backlog()}
            healths = {health.subscription_id: health for health in self._store.all(SUBSCRIPTION_HEALTH)}
            silences = len(silences_in_force(self._store, now_s))
            names = [subscription.id for subscription in self._store.all(SUBSCRIPTIONS) if subscription.active]
        except StoreUnavailable:
            return
        for name in names:
            backlog, health = backlogs.get(name), healths.get(name)
            since_s = health.failing_since_s if health else None
            pending.add_metric([name], backlog.pending if backlog else 0)
            oldest.add_metric([name], max(0.0, now_s - backlog.oldest_s) if backlog else 0.0)
            failing.add_metric([name], 0.0 if since_s is None else max(0.0, now_s - since_s))
        yield from (pending, oldest, failing)
        yield GaugeMetricFamily(PROMETHEUS_PREFIX + "silences", "Silences in force.", value=silences)


def _family(name: str, help_: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PROMETHEUS_PREFIX + name, help_, labels=["subscription"])
