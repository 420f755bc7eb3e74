"""Repeats firing alerts to each Alertmanager, which forgets alerts that are not repeated.

Each refresh is read from the store, so that a restart of either side loses nothing, and an alert whose end was not
delivered ends anyway once its last refresh has expired.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from eagle_eye.schema.backoff import doubled_s
from eagle_eye.server.delivery import events as outbound
from eagle_eye.server.delivery.notifiers.alertmanager_api import AlertmanagerApi
from eagle_eye.server.delivery.notifiers.alerts import Alert
from eagle_eye.server.delivery.notifiers.receipts import Notifier, Outcome, Receipt
from eagle_eye.server.delivery.notifiers.targets import Targets
from eagle_eye.server.delivery.settings import WebhookSettings
from eagle_eye.server.delivery.silencing import in_force, told
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.records import Subscription
from eagle_eye.server.model.silences import covering_incident
from eagle_eye.server.model.subscription_filters import wants
from eagle_eye.server.store.store import EVENTS, Store
from eagle_eye.server.telemetry.counters import Telemetry

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
        silences = in_force(self._store, now_s)
        found = {}
        for incident in self._store.open_incidents():
            if incident.ended_s is not None or incident.id in but:
                continue
            event = outbound.incident_opened(incident, now_s)
            if wants(subscription, event) or (
                wants(subscription, event, reported=True) and self._store.reported(subscription.id, incident.id)
            ):
                if covering_incident(silences, incident) is not None:
                    last = told(self._store, subscription.id, incident.id)
                    known = None if last is None else self._store.get(EVENTS, last.event_id)
                    if known is None:
                        continue
                    event = known
                found[incident.id] = self._form.alerts(event)[:1]
        return found

    async def tell(self, subscription: Subscription, firing: Mapping[str, Sequence[Alert]]) -> Receipt:
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
