"""A histogram that takes many observations at once: a fleet's acknowledgements, several thousand per group."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


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
