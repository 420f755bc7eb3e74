"""Metrics about raw segments, minutes and hours on ``/metrics``, read when scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.schema.metrics import PROMETHEUS_PREFIX
from eagle_eye.server.history.segments.segment_store import SegmentStore


class LevelsCollector(Collector):
    """The size of each level, and what was lost of it."""

    def __init__(self, segment_store: SegmentStore) -> None:
        self._segments = segment_store

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        segments = _gauge("level_segments", "Segments of a level on disk.")
        size = _gauge("level_bytes", "Their size.")
        oldest = _gauge("level_oldest_timestamp_seconds", "Where the oldest of them begins.")
        for level, kept in self._segments.kept().items():
            segments.add_metric([level], kept.segments)
            size.add_metric([level], kept.bytes)
            if kept.oldest_s is not None:
                oldest.add_metric([level], kept.oldest_s)
        yield from (segments, size, oldest)
        for name, text, value in (
            (
                "retired_unsummarized_frames",
                "Frames deleted of which nothing was downsampled.",
                self._segments.dropped_as_they_were,
            ),
            (
                "set_aside_level_segments",
                "Downsampled segments found broken; they are made anew where that can be.",
                self._segments.levels.set_aside_total,
            ),
        ):
            yield CounterMetricFamily(f"{PROMETHEUS_PREFIX}history_{name}", text, value=value)


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PROMETHEUS_PREFIX}history_{name}", text, labels=["level"])
