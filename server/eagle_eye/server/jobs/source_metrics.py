"""The queried schedulers on ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.server.telemetry.counters import metric_name


class JobSourceCollector(Collector):
    """The age of each scheduler's report, and its number of jobs."""

    def __init__(self, ages_s: Callable[[], dict[str, float]], counts: Callable[[], dict[str, int]]) -> None:
        self._ages_s = ages_s
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Yield two families; a scheduler that never answered has no age."""
        ages = GaugeMetricFamily(
            metric_name("job_source_age_seconds"), "Time since this scheduler last answered.", labels=["source"]
        )
        for source, age_s in self._ages_s().items():
            ages.add_metric([source], age_s)
        yield ages
        jobs = GaugeMetricFamily(
            metric_name("job_source_jobs"), "Jobs of ours that this scheduler speaks for.", labels=["source"]
        )
        for source, count in self._counts().items():
            jobs.add_metric([source], count)
        yield jobs
