"""Which of several servers on one database leads, on ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.server.store.leadership import Leadership
from eagle_eye.server.telemetry.counters import metric_name


class LeaseCollector(Collector):
    """The lease as this server has it."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        of = self._leadership
        yield GaugeMetricFamily(metric_name("leads"), "1 for the server that leads, 0 for a standby.", value=of.leads)
        yield GaugeMetricFamily(metric_name("epoch"), "Rises with each change of the leader.", value=of.epoch)
        yield GaugeMetricFamily(
            metric_name("lease_left_seconds"), "For how long this server may still decide.", value=of.left_s()
        )
        yield CounterMetricFamily(
            metric_name("takeovers"), "Times that this server began to lead since it started.", value=of.takeovers
        )
        yield CounterMetricFamily(
            metric_name("step_downs"), "Times that it gave way to a standby that more nodes reach.", value=of.step_downs
        )
        yield GaugeMetricFamily(
            metric_name("nodes_in_vain"),
            "Nodes that ask this standby and do not reach the leader.",
            value=of.nodes_in_vain(),
        )
        yield CounterMetricFamily(
            metric_name("epoch_rises"), "Times that it raised its epoch while it led.", value=of.rises
        )
