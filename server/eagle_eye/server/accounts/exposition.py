"""Recurrent nodes, goodput and lost GPU time on ``/metrics``; every family has a bounded number of series."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.schema.metrics import PROMETHEUS_PREFIX
from eagle_eye.server.accounts import goodput
from eagle_eye.server.accounts.archive import Archive
from eagle_eye.server.model.errors import StoreUnavailable

RECURRENT_MAX = 100
LOSSES_MAX = 1_000


class AccountsCollector(Collector):
    """Figures for daily use. All are gauges, even sums: the cause of a loss may change when more is known."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive

    def collect(self) -> Iterator[Metric]:
        """Yield the families; nothing while the records cannot be read."""
        recurrent = _family("node_recurrence_score", "Score of the nodes that keep failing, the worst ones.", ["node"])
        lemons = _family("node_lemon_score", "The former name of node_recurrence_score.", ["node"])
        ratio = _family(
            "job_goodput_ratio",
            "Share of the present run's known time that was training at full speed, of jobs that go on.",
            ["job"],
        )
        ettr = _family(
            "job_effective_training_ratio",
            "Share of the present run's known time that was spent on steps that counted, of jobs that go on.",
            ["job"],
        )
        lost = _family(
            "job_lost_gpu_seconds",
            "GPU time of the present run that was no training, by what it was lost to; of jobs that go on.",
            ["job", "part", "fault"],
        )
        try:
            worst = self._archive.scores().recurrent_by_score()[:RECURRENT_MAX]
            current = self._archive.current()
        except StoreUnavailable:
            return
        for node, score in worst:
            recurrent.add_metric([node], score)
            lemons.add_metric([node], score)
        series: list[tuple[float, list[str]]] = []
        for job, spans in current.items():
            sums = goodput.account(spans)
            if sums.goodput_ratio is not None and sums.ettr_ratio is not None:
                ratio.add_metric([job], sums.goodput_ratio)
                ettr.add_metric([job], sums.ettr_ratio)
            by_fault = goodput.grouped(goodput.losses(spans), "fault")
            for fault, parts in by_fault.items():
                series += [(amount.gpu_seconds, [job, part, fault]) for part, amount in parts.items()]
        for gpu_seconds, labels in sorted(series, reverse=True)[:LOSSES_MAX]:
            lost.add_metric(labels, gpu_seconds)
        yield from (recurrent, lemons, ratio, ettr, lost)


def _family(name: str, help_: str, labels: list[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(PROMETHEUS_PREFIX + name, help_, labels=labels)
