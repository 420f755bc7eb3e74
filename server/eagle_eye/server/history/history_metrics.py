"""The history's health on ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.server.telemetry.counters import metric_name


class HistoryCollector(Collector):
    """The history's health, read when scraped. ``segments`` returns their number and total bytes."""

    def __init__(
        self,
        waiting_bytes: Callable[[], int],
        dropped: Callable[[], int],
        ok: Callable[[], bool],
        segments: Callable[[], tuple[int, int]],
        set_aside: Callable[[], int],
        failures: Callable[[], int],
    ) -> None:
        self._waiting_bytes = waiting_bytes
        self._dropped = dropped
        self._ok = ok
        self._segments = segments
        self._set_aside = set_aside
        self._failures = failures

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        yield GaugeMetricFamily(
            metric_name("history_waiting_bytes"), "Frames that wait for the disk.", value=self._waiting_bytes()
        )
        yield CounterMetricFamily(
            metric_name("history_retired_frames"), "Frames deleted for their age or the size.", value=self._dropped()
        )
        yield GaugeMetricFamily(metric_name("history_ok"), "1 when frames can be made durable.", value=self._ok())
        segments, size = self._segments()
        yield GaugeMetricFamily(metric_name("history_segments"), "Segments of the history on disk.", value=segments)
        yield GaugeMetricFamily(metric_name("history_segment_bytes"), "Their size.", value=size)
        yield CounterMetricFamily(
            metric_name("history_set_aside_segments"),
            "Segments found broken and read no more.",
            value=self._set_aside(),
        )
        yield CounterMetricFamily(
            metric_name("history_compaction_failures"),
            "Times that the journal could not be made into segments; it keeps its frames.",
            value=self._failures(),
        )
