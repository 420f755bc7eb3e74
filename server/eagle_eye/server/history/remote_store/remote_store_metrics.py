"""Metrics of the remote store on ``/metrics``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from eagle_eye.schema.metrics import PROMETHEUS_PREFIX


def _name(name: str) -> str:
    return f"{PROMETHEUS_PREFIX}remote_store_{name}"


class Figures:
    """Counters and gauges, registered with ``registry``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.samples = Counter(_name("samples"), "Samples that the remote store has taken.", registry=registry)
        self.refused = Counter(
            _name("refused_samples"),
            "Samples that the remote store will never take, by reason.",
            ["reason"],
            registry=registry,
        )
        self.retries = Counter(
            _name("retries"), "Requests that will be tried again, by reason.", ["reason"], registry=registry
        )
        self.lost = Counter(
            _name("lost_segments"),
            "Segments of the history that could not be sent, by reason.",
            ["reason"],
            registry=registry,
        )
        self.failures = Counter(
            _name("sender_failures"), "Times that the sender ended before all was sent.", registry=registry
        )
        self.ok = Gauge(_name("ok"), "1 when the last request to the remote store was answered.", registry=registry)
        self.ok.set(1)
        self.waiting = Gauge(_name("waiting_segments"), "Segments that are not sent yet.", registry=registry)
        self.lag = Gauge(
            _name("lag_seconds"), "Age of the oldest segment that is not sent; 0: none is.", registry=registry
        )
        self.read_failures = Counter(
            _name("read_failures"), "Questions that the remote store did not answer.", registry=registry
        )
