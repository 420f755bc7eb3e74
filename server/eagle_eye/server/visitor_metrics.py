"""Connections on ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.schema.metrics import PROMETHEUS_PREFIX
from eagle_eye.server.visitors import Visitors


class VisitorCollector(Collector):
    """How many are connected, read when scraped."""

    def __init__(self, visitors: Visitors) -> None:
        self._visitors = visitors

    def collect(self) -> Iterator[Metric]:
        """Yield one family."""
        family = GaugeMetricFamily(
            PROMETHEUS_PREFIX + "connections",
            "Open connections, by whether somebody who may ask has asked on them.",
            labels=["client"],
        )
        strangers = self._visitors.strangers
        family.add_metric(["stranger"], strangers)
        family.add_metric(["known"], self._visitors.count - strangers)
        yield family
