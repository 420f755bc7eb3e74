"""A subscriber's own Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "eagle_eye_orchestrate_"


class Metrics:
    """Counters since the process started, and gauges that are read on scrape."""

    def __init__(self, kind: str) -> None:
        self._registry = CollectorRegistry()
        self._kind = kind
        self._deliveries = Counter(
            f"{_PREFIX}deliveries_total",
            "Webhook deliveries, by what became of them.",
            ["kind", "outcome"],
            registry=self._registry,
        )
        self._reports = Counter(
            f"{_PREFIX}reports_total",
            "Reports made on actions, by the action and what was reported.",
            ["kind", "action", "state"],
            registry=self._registry,
        )

        self._claims = Counter(
            f"{_PREFIX}claims_total",
            "Actions claimed at the server before they were begun, by what came of it.",
            ["kind", "outcome"],
            registry=self._registry,
        )

    def delivered(self, outcome: str) -> None:
        """Count an answered delivery."""
        self._deliveries.labels(self._kind, outcome).inc()

    def reported(self, action: str, state: str) -> None:
        """Count a report."""
        self._reports.labels(self._kind, action, state).inc()

    def claimed(self, outcome: str) -> None:
        """Count a claim."""
        self._claims.labels(self._kind, outcome).inc()

    def watch(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Add a gauge with the value returned by ``read``."""
        Gauge(_PREFIX + name, help_text, ["kind"], registry=self._registry).labels(self._kind).set_function(read)

    def page(self) -> bytes:
        """Return the page in Prometheus' format."""
        return generate_latest(self._registry)
