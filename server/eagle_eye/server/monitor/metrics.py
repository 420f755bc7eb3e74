"""Detection on ``/metrics``: blind detectors, newest values, incidents, actions, jobs, fleet budgets, and who leads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.metrics import PROMETHEUS_PREFIX, MetricKind
from eagle_eye.server.engine.policy import fleet_limit
from eagle_eye.server.engine.rules import Situation, counted
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.event_filters import severity
from eagle_eye.server.model.records import Action, Incident
from eagle_eye.server.monitor.watcher import IncidentCounts, JobProgress, Latest
from eagle_eye.server.store.leadership import Leadership
from eagle_eye.server.store.store import Store
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
                family = families[value.metric] = _sample_family(value.metric)
            device = "" if value.device in (None, -1) else str(value.device)
            family.add_metric([value.job, value.node, device], value.value)  # type: ignore[attr-defined]
        yield from families.values()
        yield GaugeMetricFamily(
            metric_name("series_cut"), "1 when series_max keeps some series off this page.", value=more
        )


def _sample_family(metric: str) -> Metric:
    spec = catalogue.BY_NAME[metric]
    labels = ["job", "node", "device"]
    if spec.kind is MetricKind.COUNTER:
        return CounterMetricFamily(metric_name(metric), spec.help, labels=labels)
    return GaugeMetricFamily(metric_name(metric), spec.help, labels=labels)


class FleetBudgetCollector(Collector):
    """The budgets as policy's mode for all counts them: in mode observe with what would have been done."""

    def __init__(
        self, store: Store, policy: Callable[[], PolicySettings], fleet_size: Callable[[], int], clock: Clock
    ) -> None:
        self._store = store
        self._policy = policy
        self._fleet_size = fleet_size
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """Yield the families; nothing while the records cannot be read."""
        settings, now_s = self._policy(), self._clock.now_s()
        try:
            actions = self._store.actions_since(now_s - settings.window_s)
        except StoreUnavailable:
            return
        # Only what the fleet's budgets depend on.
        situation = Situation(
            settings=settings, actions=actions, fleet_size=self._fleet_size(), now_s=now_s,
            members=0, job_state="", restart_owner="", blind="",
        )  # fmt: skip
        asked = counted(situation, settings.mode)
        used = GaugeMetricFamily(
            metric_name("fleet_budget_used"), "Of the fleet's budget, within policy.window_s.", labels=["budget"]
        )
        limit = GaugeMetricFamily(metric_name("fleet_budget_limit"), "The fleet's budget.", labels=["budget"])
        used.add_metric(["exclusions"], sum(len(action.exclude) for action in asked))
        limit.add_metric(["exclusions"], fleet_limit(situation))
        used.add_metric(["restarts"], sum(action.restart for action in asked))
        limit.add_metric(["restarts"], settings.restarts_fleet)
        yield from (used, limit)


# Open incidents, recent actions and running jobs on ``/metrics``, one series each, for annotations and alerts.
#
# Read from the records when scraped; every family has a bounded number of series.

RecordT = TypeVar("RecordT")

INCIDENTS_MAX = 200
ACTIONS_MAX = 200
JOBS_MAX = 1_000
ACTION_SHOWN_S = 3600.0  # after the request: long enough for any scrape to see how it ended


class IncidentCollector(Collector):
    """Open incidents, policy holds, and events kept from subscribers, read when scraped."""

    def __init__(self, known: Callable[[], list[Incident]], counts: Callable[[], IncidentCounts]) -> None:
        self._known = known
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Yield the families; those of incidents only while the records can be read."""
        kept_back, escalations = self._counts()
        yield CounterMetricFamily(
            metric_name("incident_events_suppressed"),
            "Events about incidents that come and go, or change their story, too often.",
            value=kept_back,
        )
        yield CounterMetricFamily(
            metric_name("incident_escalations"), "Times that people had to look at an incident.", value=escalations
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
            family = GaugeMetricFamily(metric_name(name), text, labels=[label])
            for value in sorted(set(values)):
                family.add_metric([value], values.count(value))
            yield family
        escalated = sum(bool(incident.escalation) for incident in incidents)
        yield GaugeMetricFamily(
            metric_name("incidents_escalated"), "Open incidents that people have to look at.", escalated
        )
        flapping = sum(incident.flapping for incident in incidents)
        yield GaugeMetricFamily(metric_name("incidents_flapping"), "Open incidents that come and go.", flapping)


class IncidentListCollector(Collector):
    """One series for each open incident, the newest INCIDENTS_MAX, and for each action of the last hour."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """Yield the families; nothing while the records cannot be read."""
        try:
            incidents = self._store.open_incidents()
            actions = self._store.actions_since(self._clock.now_s() - ACTION_SHOWN_S)
        except StoreUnavailable:
            return
        onsets = _record_family(
            "incident_onset_timestamp_seconds",
            "When the trouble of an open incident began.",
            ("incident", "job", "node", "fault", "severity", "state", "acknowledged"),
        )
        for incident in _newest(incidents, lambda one: one.onset_s, INCIDENTS_MAX):
            onsets.add_metric(_incident_labels(incident), incident.onset_s)
        asked = _record_family(
            "action_asked_timestamp_seconds",
            "When an action was asked for, or would have been; of the last hour.",
            ("action", "incident", "job", "node", "kind", "fault", "state"),
        )
        for action in _newest(actions, lambda one: one.created_s, ACTIONS_MAX):
            asked.add_metric(_action_labels(action), action.created_s)
        left_out = _record_family("listed_left_out", "What a limit keeps off the lists of this page.", ("list",))
        left_out.add_metric(["incidents"], max(0, len(incidents) - INCIDENTS_MAX))
        left_out.add_metric(["actions"], max(0, len(actions) - ACTIONS_MAX))
        yield from (onsets, asked, left_out)


class JobCollector(Collector):
    """The state of each running job, the first JOBS_MAX by name."""

    def __init__(self, courses: Callable[[], Iterable[JobProgress]], clock: Clock) -> None:
        self._courses = courses
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """Yield the families; a job without reported steps has no age of progress."""
        nodes = _record_family("job_nodes", "Nodes that take part in a running job.", ("job",))
        gpus = _record_family("job_gpus", "GPUs that take part in a running job.", ("job",))
        age = _record_family(
            "job_progress_age_seconds", "Time since a running job's last step was seen to finish.", ("job",)
        )
        now_s = self._clock.now_s()
        running = sorted((one for one in self._courses() if one.state == "running"), key=lambda one: one.job)
        for course in running[:JOBS_MAX]:
            nodes.add_metric([course.job], len(course.nodes))
            if course.gpus is not None:
                gpus.add_metric([course.job], course.gpus)
            if course.progressed_s is not None:
                age.add_metric([course.job], max(0.0, now_s - course.progressed_s))
        yield from (nodes, gpus, age)
        yield GaugeMetricFamily(PROMETHEUS_PREFIX + "jobs_running", "Jobs that run.", value=len(running))


def _incident_labels(incident: Incident) -> list[str]:
    reported = {"action": incident.action, "escalated": bool(incident.escalation)}
    acknowledged = "true" if incident.acknowledged_by else "false"
    node = incident.node or ""
    return [incident.id, incident.job, node, incident.fault, severity(reported), str(incident.state), acknowledged]


def _action_labels(action: Action) -> list[str]:
    node = action.node or (action.exclude[0] if len(action.exclude) == 1 else "")
    return [action.id, action.incident_id, action.job, node, str(action.kind), action.fault, str(action.state)]


def _newest(records: Sequence[RecordT], time_s: Callable[[RecordT], float], limit: int) -> list[RecordT]:
    return sorted(records, key=time_s, reverse=True)[:limit]


def _record_family(name: str, help_: str, labels: Sequence[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(PROMETHEUS_PREFIX + name, help_, labels=labels)


class LeaseCollector(Collector):
    """The lease as this server has it."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        of = self._leadership
        yield GaugeMetricFamily(metric_name("leads"), "1 for the server that leads, 0 for a standby.", value=of.leads)
        yield GaugeMetricFamily(metric_name("epoch"), "Rises with each change of the leader.", value=of.epoch)
        yield GaugeMetricFamily(
            metric_name("lease_left_seconds"), "For how long this server may still decide.", value=of.left_s()
        )
        yield CounterMetricFamily(
            metric_name("takeovers"), "Times that this server began to lead since it started.", value=of.takeovers
        )
        yield CounterMetricFamily(
            metric_name("step_downs"), "Times that it gave way to a standby that more nodes reach.", value=of.step_downs
        )
        yield GaugeMetricFamily(
            metric_name("nodes_in_vain"),
            "Nodes that ask this standby and do not reach the leader.",
            value=of.nodes_in_vain(),
        )
        yield CounterMetricFamily(
            metric_name("epoch_rises"), "Times that it raised its epoch while it led.", value=of.rises
        )
