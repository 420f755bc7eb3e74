"""Tells each Alertmanager, again and again, which incidents go on: it forgets an alert that nobody repeats.

What is told is what the store says at that moment, so that a restart of either side loses nothing, and an end that did
not arrive is an end all the same once the last refresh has run out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from eagle_eye.server import outbound
from eagle_eye.server.clock import Clock
from eagle_eye.server.config import WebhookSettings
from eagle_eye.server.filters import wants
from eagle_eye.server.notifiers.alertmanager_api import AlertmanagerApi
from eagle_eye.server.notifiers.alerts import Alert
from eagle_eye.server.notifiers.receipts import Notifier, Outcome, Receipt
from eagle_eye.server.notifiers.targets import Targets
from eagle_eye.server.records import Subscription
from eagle_eye.server.store import Store
from eagle_eye.server.telemetry import Telemetry

REQUEST_ALERTS_MAX = 100  # of one request


class AlertRefresh:
    """Knows which subscriptions are Alertmanagers and when each is to be told next. On one event loop only."""

    def __init__(
        self,
        store: Store,
        notifier: Notifier,
        form: AlertmanagerApi,
        targets: Targets,
        settings: WebhookSettings,
        clock: Clock,
        telemetry: Telemetry,
    ) -> None:
        self._store = store
        self._notifier = notifier
        self._form = form
        self._targets = targets
        self._settings = settings
        self._clock = clock
        self._telemetry = telemetry
        self._due_s: dict[str, float] = {}  # by subscription, on the monotonic clock

    def know(self, subscriptions: Iterable[Subscription]) -> None:
        """Take these for all that are active; those that are new are due at once."""
        now_s = self._clock.monotonic_s()
        names = {one.id for one in subscriptions if one.format == "alertmanager_api"}
        self._due_s = {name: self._due_s.get(name, now_s) for name in names}

    def forget(self, subscription_id: str) -> None:
        """Tell this one no more; it has ended."""
        self._due_s.pop(subscription_id, None)

    def waits_s(self) -> dict[str, float]:
        """Return for each Alertmanager's subscription in how many seconds it is due; below 0: overdue."""
        now_s = self._clock.monotonic_s()
        return {name: due_s - now_s for name, due_s in self._due_s.items()}

    async def refresh_if_due(self, subscription: Subscription) -> Receipt | None:
        """Tell the subscription what fires now, if it is due; return what came of it, None when nothing was told.

        While this runs nothing else may be delivered to the subscription: an end that was delivered meanwhile would
        be undone.
        """
        due_s = self._due_s.get(subscription.id)
        if due_s is None or due_s > self._clock.monotonic_s():
            return None
        self._due_s[subscription.id] = self._clock.monotonic_s() + self._settings.alert_refresh_s
        alerts = await asyncio.to_thread(lambda: list(self._firing(subscription)))
        receipt = None
        for start in range(0, len(alerts), REQUEST_ALERTS_MAX):
            async with self._targets.turn(subscription.url):
                now_s = self._clock.now_s()
                part = alerts[start : start + REQUEST_ALERTS_MAX]
                message = self._form.push(subscription, f"refresh-{round(now_s * 1000)}-{start}", part, now_s)
                receipt = await self._notifier.post(subscription, message, now_s, self._settings.timeout_s)
            self._telemetry.refreshes.labels(receipt.outcome.value).inc()
            if receipt.outcome is not Outcome.DELIVERED:
                break
        return receipt

    def _firing(self, subscription: Subscription) -> Iterator[Alert]:
        now_s = self._clock.now_s()
        for incident in self._store.open_incidents():
            if incident.ended_s is not None:
                continue
            event = outbound.incident_opened(incident, now_s)
            if wants(subscription, event) or (
                wants(subscription, event, told=True) and self._store.told(subscription.id, incident.id)
            ):
                yield from self._form.alerts(event)
