"""Detection metrics on ``/metrics``: blind detectors, rows left out, and each series' newest value."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.metrics import MetricKind
from eagle_eye.server.monitor.watcher import Latest
from eagle_eye.server.telemetry.counters import metric_name


class BlindCollector(Collector):
    """The detectors that are currently blind."""

    def __init__(self, blind: Callable[[], dict[str, str]]) -> None:
        self._blind = blind

    def collect(self) -> Iterator[Metric]:
        """Yield one family; the reasons are on /readyz."""
        family = GaugeMetricFamily(
            metric_name("detector_blind"), "1 for a detector that could judge nothing.", labels=["detector"]
        )
        for detector in self._blind():
            family.add_metric([detector], 1)
        yield family


class DropsCollector(Collector):
    """What the detection loop left out of its windows; decreases when the job concerned is forgotten."""

    def __init__(self, drops: Callable[[], dict[str, int]]) -> None:
        self._drops = drops

    def collect(self) -> Iterator[Metric]:
        """Yield one family."""
        family = GaugeMetricFamily(
            metric_name("window_drops"), "Rows and events left out of what detectors see, by reason.", labels=["reason"]
        )
        for reason, count in self._drops().items():
            family.add_metric([reason], count)
        yield family


class LatestCollector(Collector):
    """The newest value of each series of the fleet. ``latest`` returns the values and whether there are more."""

    def __init__(self, latest: Callable[[], tuple[list[Latest], bool]]) -> None:
        self._latest = latest

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each metric that has values."""
        families: dict[str, Metric] = {}
        shown, more = self._latest()
        for value in shown:
            family = families.get(value.metric)
            if family is None:
                family = families[value.metric] = _family(value.metric)
            device = "" if value.device in (None, -1) else str(value.device)
            family.add_metric([value.job, value.node, device], value.value)  # type: ignore[attr-defined]
        yield from families.values()
        yield GaugeMetricFamily(
            metric_name("series_cut"), "1 when series_max keeps some series off this page.", value=more
        )


def _family(metric: str) -> Metric:
    spec = catalogue.BY_NAME[metric]
    labels = ["job", "node", "device"]
    if spec.kind is MetricKind.COUNTER:
        return CounterMetricFamily(metric_name(metric), spec.help, labels=labels)
    return GaugeMetricFamily(metric_name(metric), spec.help, labels=labels)
