"""What the server counts about itself, in Prometheus' text format."""

from __future__ import annotations

import shutil
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.schema.metrics import PROMETHEUS_PREFIX


class Latencies(Collector):
    """Seconds, counted by upper ``bounds_s``; written by one thread, read by any."""

    def __init__(self, name: str, text: str, bounds_s: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds_s = list(bounds_s)
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, value_s: float) -> None:
        """Record one observation."""
        self.observe_all((value_s,))

    def observe_all(self, values_s: Iterable[float]) -> None:
        """Record all of them."""
        for value_s in values_s:
            self._counts[bisect_left(self._bounds_s, value_s)] += 1
            self._sum_s += value_s

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*map(str, self._bounds_s), "+Inf"), self._counts.copy(), strict=True):
            total += count
            buckets.append((bound, total))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum_s)


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series beside each counter, which nobody queries


def metric_name(name: str) -> str:
    """Return the name of one of our metrics on ``/metrics``."""
    return PROMETHEUS_PREFIX + name


class Telemetry:
    """All of the server's counters. One registry per server, so that two in one process do not clash."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry(auto_describe=False)
        self.frames = Counter(metric_name("ingest_frames"), "Frames made durable.", registry=registry)
        self.duplicates = Counter(metric_name("ingest_duplicates"), "Frames that were here already.", registry=registry)
        self.resent = Counter(
            metric_name("ingest_resent_frames"),
            "Frames that agents sent again, since another server had acknowledged them.",
            registry=registry,
        )
        self.late = Counter(
            metric_name("ingest_late_frames"), "Frames kept that came after newer ones.", registry=registry
        )
        self.bytes = Counter(metric_name("ingest_bytes"), "Bytes of accepted requests.", registry=registry)
        self.rejected = Counter(
            metric_name("ingest_rejected"), "Requests refused, by reason.", ["reason"], registry=registry
        )
        self.unknown = Counter(
            metric_name("ingest_unknown"),
            "What newer agents sent that is not known here, and names and numbers that can be none, by kind.",
            ["kind"],
            registry=registry,
        )
        self.ingest_seconds = Latencies(
            metric_name("ingest_seconds"), "From a request's first byte to its durable answer.", _SECONDS
        )
        registry.register(self.ingest_seconds)
        self.remote_write_samples = Counter(
            metric_name("remote_write_samples"), "Samples that came by remote write.", registry=registry
        )
        self.remote_write_left_out = Counter(
            metric_name("remote_write_left_out"),
            "What came by remote write and became no value, by reason.",
            ["reason"],
            registry=registry,
        )
        self.remote_write_rejected = Counter(
            metric_name("remote_write_rejected"),
            "Remote writes refused whole, by reason.",
            ["reason"],
            registry=registry,
        )
        self.remote_write_seconds = Histogram(
            metric_name("remote_write_seconds"),
            "From a remote write's first byte to its durable answer.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.remote_write_series = Gauge(
            metric_name("remote_write_series"), "Series known by remote write.", registry=registry
        )
        self.remote_write_lag = Gauge(
            metric_name("remote_write_lag_seconds"),
            "Age of the newest row of the last remote write.",
            registry=registry,
        )
        self.refused = Counter(
            metric_name("http_refused"), "API requests refused, by reason.", ["reason"], registry=registry
        )
        self.failures = Counter(
            metric_name("internal_errors"), "Errors that were not foreseen, by place.", ["place"], registry=registry
        )
        self.model_errors = Counter(
            metric_name("model_errors"), "Model files that could not be used; the one before stays.", registry=registry
        )
        self.attempts = Counter(
            metric_name("webhook_attempts"), "Attempts to deliver, by outcome.", ["outcome"], registry=registry
        )
        self.deliveries = Counter(
            metric_name("webhook_deliveries"), "Deliveries that came to an end, by state.", ["state"], registry=registry
        )
        self.delivery_seconds = Histogram(
            metric_name("webhook_seconds"), "Duration of an attempt.", buckets=_SECONDS, registry=registry
        )
        self.evidence = Counter(
            metric_name("evidence"),
            "Requests for evidence that agents answered, by state.",
            ["state"],
            registry=registry,
        )
        self.node_checks = Counter(
            metric_name("node_checks"),
            "Active checks that ended, by what came of them.",
            ["state"],
            registry=registry,
        )
        self.delivery_failures = Counter(
            metric_name("webhook_failures"),
            "Deliveries that failed or expired, by reason.",
            ["reason"],
            registry=registry,
        )
        self.leader_pings = Counter(
            metric_name("leader_pings"),
            "Subscriptions to be told who leads before it was judged, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self.refreshes = Counter(
            metric_name("webhook_refreshes"),
            "Requests that refreshed an Alertmanager's firing alerts, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self.streams = Gauge(metric_name("event_streams"), "Readers of /api/v1/events.", registry=registry)
        self.rate_limited = Counter(
            metric_name("rate_limited"), "Requests refused because they came too often.", ["by"], registry=registry
        )
        self.sign_in_refused = Counter(
            metric_name("sign_in_refused"),
            "Sign-ins, and headers that name a person, that were not believed, by reason.",
            ["reason"],
            registry=registry,
        )
        self.connections_refused = Counter(
            metric_name("connections_refused"),
            "Connections that were not let in, by limit.",
            ["reason"],
            registry=registry,
        )
        for reason in ("total", "address", "rate"):
            self.connections_refused.labels(reason)
        self.connections_closed = Counter(
            metric_name("connections_closed"),
            "Connections closed for what their client sent or left undone, by reason.",
            ["reason"],
            registry=registry,
        )
        for reason in ("slow_head", "slow_reader", "unread_body", "malformed", "rate"):
            self.connections_closed.labels(reason)
        self.config_reload_success = Gauge(
            metric_name("config_reload_success"), "1 when the newest configuration is in force.", registry=registry
        )
        self.config_reload_success_time = Gauge(
            metric_name("config_reload_success_timestamp_seconds"),
            "When a configuration was last taken over.",
            registry=registry,
        )
        self.accounts_dropped = Counter(
            metric_name("accounts_dropped"),
            "GPUs and driver errors that agents reported and a limit kept out, by limit.",
            ["reason"],
            registry=registry,
        )
        self.job_source_answers = Counter(
            metric_name("job_source_answers"),
            "Questions to schedulers, by what came of them; ok: an answer.",
            ["source", "outcome"],
            registry=registry,
        )
        self.job_source_left_out = Counter(
            metric_name("job_source_left_out"),
            "What schedulers said and could not be used, by reason.",
            ["source", "reason"],
            registry=registry,
        )
        self.ready = Gauge(metric_name("ready"), "1 when the server can judge.", registry=registry)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class ServerHostCollector(Collector):
    """Read when scraped; yields nothing for a file system that does not answer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._version = version("eagle-eye")

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        build = GaugeMetricFamily(PROMETHEUS_PREFIX + "build_info", "1, with the version.", labels=["version"])
        build.add_metric([self._version], 1)
        yield build
        try:
            room = shutil.disk_usage(self._folder)
        except OSError:
            return
        yield GaugeMetricFamily(
            PROMETHEUS_PREFIX + "data_dir_free_bytes", "Room on the file system of data_dir.", value=room.free
        )
        yield GaugeMetricFamily(
            PROMETHEUS_PREFIX + "data_dir_size_bytes", "Size of the file system of data_dir.", value=room.total
        )
