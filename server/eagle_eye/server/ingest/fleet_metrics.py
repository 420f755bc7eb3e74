"""Fleet metrics on ``/metrics``: node counts, freshness and clock offsets."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.telemetry.counters import metric_name


class FleetCollector(Collector):
    """Node counts and each node's clock offset, read when scraped."""

    def __init__(self, fleet: Fleet, now_s: Callable[[], float], fresh_s: float) -> None:
        self._fleet = fleet
        self._now_s = now_s
        self._fresh_s = fresh_s

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        known, fresh = self._fleet.counts(self._now_s(), self._fresh_s)
        yield GaugeMetricFamily(metric_name("nodes_known"), "Nodes that were ever heard of.", value=known)
        yield GaugeMetricFamily(
            metric_name("nodes_vouched"),
            "Nodes heard since the start for which somebody vouches: what the fleet's budgets go by.",
            value=self._fleet.vouched_count,
        )
        yield GaugeMetricFamily(metric_name("nodes_fresh"), "Nodes heard of just now.", value=fresh)
        yield GaugeMetricFamily(
            metric_name("nodes_disputed"),
            "Node names under which two machines report at once; they accuse nobody.",
            value=sum(1 for _ in self._fleet.claims.disputes(self._now_s())),
        )
        newest_s = self._fleet.newest_s()
        if newest_s is not None:
            yield GaugeMetricFamily(
                metric_name("ingest_age_seconds"),
                "Time since anything was received of any node.",
                value=max(self._now_s() - newest_s, 0.0),
            )
        offsets = GaugeMetricFamily(
            metric_name("agent_clock_offset_seconds"), "The server's clock minus the node's.", labels=["node"]
        )
        for node, offset_s in self._fleet.offsets().items():
            offsets.add_metric([node], offset_s)
        yield offsets
        notes = self._fleet.clock_notes
        steps = CounterMetricFamily(
            metric_name("agent_clock_steps"), "Times that a node's clock was set, by who knew it.", labels=["seen_by"]
        )
        for who, count in notes.steps.items():
            steps.add_metric([who], count)
        yield steps
        moved = CounterMetricFamily(
            metric_name("ingest_moved_times"),
            "Times that cannot be, in the future or a decade old, and were moved, by what had them.",
            labels=["of"],
        )
        for what, count in notes.moved.items():
            moved.add_metric([what], count)
        yield moved
