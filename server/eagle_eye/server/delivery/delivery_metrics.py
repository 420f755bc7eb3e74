"""Silences, and each subscription's pending deliveries and failures, read from the records at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.schema.metrics import PROMETHEUS_PREFIX
from eagle_eye.server.delivery.silencing import in_force
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.store.store import SUBSCRIPTION_HEALTH, SUBSCRIPTIONS, Store


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
            silences = len(in_force(self._store, now_s))
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
