"""How fast trouble is found and over, and how often policy was right, on ``/metrics``. From records, when scraped."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.schema.metrics import PROMETHEUS_PREFIX
from eagle_eye.server.accounts import trust
from eagle_eye.server.accounts.archive import Archive
from eagle_eye.server.accounts.hindsight import precision_of
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.records import Incident

TIMES_S = 7 * 86_400.0  # whose incidents count for the times
DECISIONS_S = 90 * 86_400.0
FRESH_S = 300.0
QUANTILES = (0.5, 0.95)


class ResponseCollector(Collector):
    """By fault, at most FRESH_S old; so the series are bounded by the catalogue of faults."""

    def __init__(self, archive: Archive, clock: Clock) -> None:
        self._archive = archive
        self._clock = clock
        self._lock = threading.Lock()
        self._made_s: float | None = None
        self._families: list[Metric] = []

    def collect(self) -> Iterator[Metric]:
        """Yield the families; nothing while the records cannot be read."""
        with self._lock:
            now_s = self._clock.now_s()
            if self._made_s is None or not 0 <= now_s - self._made_s < FRESH_S:
                try:
                    incidents = self._archive.incidents(now_s - TIMES_S)
                    decisions, _ = self._archive.decisions(now_s - DECISIONS_S)
                except StoreUnavailable:
                    return
                self._families = [*_times(incidents), *_decisions(trust.of_incidents(decisions))]
                self._made_s = now_s
            yield from self._families


def _times(incidents: Iterable[Incident]) -> Iterator[Metric]:
    to_detect: dict[str, list[float]] = defaultdict(list)
    to_recover: dict[str, list[float]] = defaultdict(list)
    for one in incidents:
        if one.state == "false" or one.merged_into:
            continue
        to_detect[one.fault].append(one.detected_s - one.onset_s)
        if one.ended_s is not None:
            to_recover[one.fault].append(one.ended_s - one.onset_s)
    for name, text, times in (
        ("time_to_detect_seconds", "From an incident's onset to its verdict; of seven days.", to_detect),
        ("time_to_recover_seconds", "From an incident's onset until it was over; of seven days.", to_recover),
    ):
        family = _family(name, text, ["fault", "quantile"])
        for fault, found in sorted(times.items()):
            for share in QUANTILES:
                family.add_metric([fault, str(share)], _quantile(sorted(found), share))
        yield family


def _decisions(decisions: Iterable[trust.JudgedDecision]) -> Iterator[Metric]:
    counts = _family(
        "ledger_decisions",
        "Incidents for which policy wanted an action, by whether that was right; of ninety days.",
        ["fault", "standing"],
    )
    low = _family(
        "ledger_precision_low_ratio",
        "Lower end of the 95% interval of right over right and wrong, where any is known.",
        ["fault"],
    )
    for fault, mine in sorted(trust.by_fault(decisions).items()):
        counted = precision_of(one.standing for one in mine)
        for standing, count in counted._asdict().items():
            counts.add_metric([fault, standing], count)
        if counted.interval is not None:
            low.add_metric([fault], counted.interval[0])
    yield from (counts, low)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile by the nearest rank: one of the values, also of few."""
    return ordered[math.ceil(share * len(ordered)) - 1]


def _family(name: str, help_: str, labels: list[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(PROMETHEUS_PREFIX + name, help_, labels=labels)
