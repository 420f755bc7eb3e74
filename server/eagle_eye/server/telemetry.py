"""The server's own metrics, and the fleet's newest values beside them, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.metrics import PROMETHEUS_PREFIX, Kind
from eagle_eye.server.errors import StoreUnavailable
from eagle_eye.server.fleet import Fleet
from eagle_eye.server.latencies import Latencies
from eagle_eye.server.records import Incident
from eagle_eye.server.watching import IncidentCounts, Latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series beside each counter, of which nobody asks anything


def _name(name: str) -> str:
    return PROMETHEUS_PREFIX + name


class Telemetry:
    """Everything that the server counts. One registry per server, so that two in one process do not clash."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry(auto_describe=False)
        self.frames = Counter(_name("ingest_frames"), "Frames made durable.", registry=registry)
        self.duplicates = Counter(_name("ingest_duplicates"), "Frames that were here already.", registry=registry)
        self.late = Counter(_name("ingest_late_frames"), "Frames kept that came after newer ones.", registry=registry)
        self.bytes = Counter(_name("ingest_bytes"), "Bytes of accepted requests.", registry=registry)
        self.rejected = Counter(_name("ingest_rejected"), "Requests refused, by reason.", ["reason"], registry=registry)
        self.unknown = Counter(
            _name("ingest_unknown"),
            "What newer agents sent that is not known here, and names and numbers that can be none, by kind.",
            ["kind"],
            registry=registry,
        )
        self.ingest_seconds = Latencies(
            _name("ingest_seconds"), "From a request's first byte to its durable answer.", _SECONDS
        )
        registry.register(self.ingest_seconds)
        self.remote_write_samples = Counter(
            _name("remote_write_samples"), "Samples that came by remote write.", registry=registry
        )
        self.remote_write_left_out = Counter(
            _name("remote_write_left_out"),
            "What came by remote write and became no value, by reason.",
            ["reason"],
            registry=registry,
        )
        self.remote_write_rejected = Counter(
            _name("remote_write_rejected"), "Remote writes refused whole, by reason.", ["reason"], registry=registry
        )
        self.remote_write_seconds = Histogram(
            _name("remote_write_seconds"),
            "From a remote write's first byte to its durable answer.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.remote_write_series = Gauge(
            _name("remote_write_series"), "Series known by remote write.", registry=registry
        )
        self.remote_write_lag = Gauge(
            _name("remote_write_lag_seconds"), "Age of the newest row of the last remote write.", registry=registry
        )
        self.refused = Counter(_name("http_refused"), "API requests refused, by reason.", ["reason"], registry=registry)
        self.failures = Counter(
            _name("internal_errors"), "Errors that were not foreseen, by place.", ["place"], registry=registry
        )
        self.model_errors = Counter(
            _name("model_errors"), "Model files that could not be used; the one before stays.", registry=registry
        )
        self.attempts = Counter(
            _name("webhook_attempts"), "Attempts to deliver, by outcome.", ["outcome"], registry=registry
        )
        self.deliveries = Counter(
            _name("webhook_deliveries"), "Deliveries that came to an end, by state.", ["state"], registry=registry
        )
        self.delivery_seconds = Histogram(
            _name("webhook_seconds"), "Duration of an attempt.", buckets=_SECONDS, registry=registry
        )
        self.evidence = Counter(
            _name("evidence"), "Requests for evidence that agents answered, by state.", ["state"], registry=registry
        )
        self.node_checks = Counter(
            _name("node_checks"),
            "Active checks that ended, by what came of them.",
            ["state"],
            registry=registry,
        )
        self.delivery_failures = Counter(
            _name("webhook_failures"), "Deliveries that failed or expired, by reason.", ["reason"], registry=registry
        )
        self.refreshes = Counter(
            _name("webhook_refreshes"),
            "Requests that told an Alertmanager what still fires, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self.streams = Gauge(_name("event_streams"), "Readers of /api/v1/events.", registry=registry)
        self.rate_limited = Counter(
            _name("rate_limited"), "Requests refused because they came too often.", ["by"], registry=registry
        )
        self.connections_refused = Counter(
            _name("connections_refused"), "Connections that were not let in, by limit.", ["reason"], registry=registry
        )
        for reason in ("total", "address", "rate"):
            self.connections_refused.labels(reason)
        self.connections_closed = Counter(
            _name("connections_closed"),
            "Connections closed for what their client sent or left undone, by reason.",
            ["reason"],
            registry=registry,
        )
        for reason in ("slow_head", "slow_reader", "unread_body", "malformed", "rate"):
            self.connections_closed.labels(reason)
        self.config_reload_success = Gauge(
            _name("config_reload_success"), "1 when the newest configuration is in force.", registry=registry
        )
        self.config_reload_success_time = Gauge(
            _name("config_reload_success_timestamp_seconds"),
            "When a configuration was last taken over.",
            registry=registry,
        )
        self.accounts_dropped = Counter(
            _name("accounts_dropped"),
            "GPUs and driver errors that agents told of and a limit kept out, by limit.",
            ["reason"],
            registry=registry,
        )
        self.job_source_answers = Counter(
            _name("job_source_answers"),
            "Questions to schedulers, by what came of them; ok: an answer.",
            ["source", "outcome"],
            registry=registry,
        )
        self.job_source_left_out = Counter(
            _name("job_source_left_out"),
            "What schedulers said and could not be used, by reason.",
            ["source", "reason"],
            registry=registry,
        )
        self.ready = Gauge(_name("ready"), "1 when the server can judge.", registry=registry)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class FleetCollector(Collector):
    """Counts of nodes and the clock offset of each, read when scraped."""

    def __init__(self, fleet: Fleet, now_s: Callable[[], float], fresh_s: float) -> None:
        self._fleet = fleet
        self._now_s = now_s
        self._fresh_s = fresh_s

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        known, fresh = self._fleet.counts(self._now_s(), self._fresh_s)
        yield GaugeMetricFamily(_name("nodes_known"), "Nodes that were ever heard of.", value=known)
        yield GaugeMetricFamily(
            _name("nodes_vouched"),
            "Nodes heard since the start for which somebody vouches: what the fleet's budgets go by.",
            value=self._fleet.vouched_count,
        )
        yield GaugeMetricFamily(_name("nodes_fresh"), "Nodes heard of just now.", value=fresh)
        newest_s = self._fleet.newest_s()
        if newest_s is not None:
            yield GaugeMetricFamily(
                _name("ingest_age_seconds"),
                "Time since anything was received of any node.",
                value=max(self._now_s() - newest_s, 0.0),
            )
        offsets = GaugeMetricFamily(
            _name("agent_clock_offset_seconds"), "The server's clock minus the node's.", labels=["node"]
        )
        for node, offset_s in self._fleet.offsets().items():
            offsets.add_metric([node], offset_s)
        yield offsets
        notes = self._fleet.clock_notes
        steps = CounterMetricFamily(
            _name("agent_clock_steps"), "Times that a node's clock was set, by who knew it.", labels=["seen_by"]
        )
        for who, count in notes.steps.items():
            steps.add_metric([who], count)
        yield steps
        moved = CounterMetricFamily(
            _name("ingest_moved_times"),
            "Times that cannot be, in the future or a decade old, and were moved, by what had them.",
            labels=["of"],
        )
        for what, count in notes.moved.items():
            moved.add_metric([what], count)
        yield moved


class HistoryCollector(Collector):
    """The history's health, read when scraped. ``segments`` returns how many there are, and their bytes."""

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
        """Yield the families."""
        yield GaugeMetricFamily(
            _name("history_waiting_bytes"), "Frames that wait for the disk.", value=self._waiting_bytes()
        )
        yield CounterMetricFamily(
            _name("history_retired_frames"), "Frames deleted for their age or the size.", value=self._dropped()
        )
        yield GaugeMetricFamily(_name("history_ok"), "1 when frames can be made durable.", value=self._ok())
        segments, size = self._segments()
        yield GaugeMetricFamily(_name("history_segments"), "Segments of the history on disk.", value=segments)
        yield GaugeMetricFamily(_name("history_segment_bytes"), "Their size.", value=size)
        yield CounterMetricFamily(
            _name("history_set_aside_segments"), "Segments found broken and read no more.", value=self._set_aside()
        )
        yield CounterMetricFamily(
            _name("history_compaction_failures"),
            "Times that the journal could not be made into segments; it keeps its frames.",
            value=self._failures(),
        )


class BlindCollector(Collector):
    """The detectors that cannot judge at the moment."""

    def __init__(self, blind: Callable[[], dict[str, str]]) -> None:
        self._blind = blind

    def collect(self) -> Iterator[Metric]:
        """Yield one family; the reasons are on /readyz."""
        family = GaugeMetricFamily(
            _name("detector_blind"), "1 for a detector that could judge nothing.", labels=["detector"]
        )
        for detector in self._blind():
            family.add_metric([detector], 1)
        yield family


class IncidentCollector(Collector):
    """What is open, what a rule of policy holds back, and what was kept from subscribers, read when scraped."""

    def __init__(self, known: Callable[[], list[Incident]], counts: Callable[[], IncidentCounts]) -> None:
        self._known = known
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Yield the families; of the incidents none while the records cannot be read."""
        kept_back, escalations = self._counts()
        yield CounterMetricFamily(
            _name("incident_events_suppressed"),
            "Events about incidents that come and go, or change their story, too often.",
            value=kept_back,
        )
        yield CounterMetricFamily(
            _name("incident_escalations"), "Times that people had to look at an incident.", value=escalations
        )
        try:
            incidents = [incident for incident in self._known() if incident.state != "recovered"]
        except StoreUnavailable:
            return
        for name, text, label, values in (
            ("incidents", "Open incidents, by state.", "state", [str(one.state) for one in incidents]),
            (
                "incidents_held",
                "Open incidents that this rule of policy holds back.",
                "rule",
                [incident.hold_rule for incident in incidents if incident.hold_rule],
            ),
        ):
            family = GaugeMetricFamily(_name(name), text, labels=[label])
            for value in sorted(set(values)):
                family.add_metric([value], values.count(value))
            yield family
        escalated = sum(bool(incident.escalation) for incident in incidents)
        yield GaugeMetricFamily(_name("incidents_escalated"), "Open incidents that people have to look at.", escalated)
        flapping = sum(incident.flapping for incident in incidents)
        yield GaugeMetricFamily(_name("incidents_flapping"), "Open incidents that come and go.", flapping)


class JobSourceCollector(Collector):
    """The schedulers that are asked about jobs."""

    def __init__(self, ages_s: Callable[[], dict[str, float]], counts: Callable[[], dict[str, int]]) -> None:
        self._ages_s = ages_s
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Yield two families; a scheduler that never answered has no age."""
        ages = GaugeMetricFamily(
            _name("job_source_age_seconds"), "Time since this scheduler last answered.", labels=["source"]
        )
        for source, age_s in self._ages_s().items():
            ages.add_metric([source], age_s)
        yield ages
        jobs = GaugeMetricFamily(
            _name("job_source_jobs"), "Jobs of ours that this scheduler speaks for.", labels=["source"]
        )
        for source, count in self._counts().items():
            jobs.add_metric([source], count)
        yield jobs


class DropsCollector(Collector):
    """What the detection loop left out of its windows; falls when the job that it concerned is forgotten."""

    def __init__(self, drops: Callable[[], dict[str, int]]) -> None:
        self._drops = drops

    def collect(self) -> Iterator[Metric]:
        """Yield one family."""
        family = GaugeMetricFamily(
            _name("window_drops"), "Rows and events left out of what detectors see, by reason.", labels=["reason"]
        )
        for reason, count in self._drops().items():
            family.add_metric([reason], count)
        yield family


class LatestCollector(Collector):
    """The newest value of each series of the fleet. ``latest`` returns what is shown and whether there is more."""

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
        yield GaugeMetricFamily(_name("series_cut"), "1 when series_max keeps some series off this page.", value=more)


def _family(metric: str) -> Metric:
    spec = catalogue.BY_NAME[metric]
    labels = ["job", "node", "device"]
    if spec.kind is Kind.COUNTER:
        return CounterMetricFamily(_name(metric), spec.help, labels=labels)
    return GaugeMetricFamily(_name(metric), spec.help, labels=labels)
