"""Connections on ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.schema.metrics import PROMETHEUS_PREFIX
from eagle_eye.server.transport.connections import Connections


class ConnectionCollector(Collector):
    """The number of open connections, read when scraped."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        """Yield one family."""
        family = GaugeMetricFamily(
            PROMETHEUS_PREFIX + "connections",
            "Open connections, by whether somebody who may ask has asked on them.",
            labels=["client"],
        )
        unauthenticated = self._connections.unauthenticated
        family.add_metric(["unauthenticated"], unauthenticated)
        family.add_metric(["known"], self._connections.count - unauthenticated)
        yield family
