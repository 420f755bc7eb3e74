"""Open incidents, recent actions and running jobs on ``/metrics``, one series each, for annotations and alerts.

Read from the records when scraped; every family has a bounded number of series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.schema.metrics import PROMETHEUS_PREFIX
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.event_labels import severity
from eagle_eye.server.model.records import Action, Incident
from eagle_eye.server.monitor.watcher import IncidentCounts, JobProgress
from eagle_eye.server.store.store import Store
from eagle_eye.server.telemetry.counters import metric_name

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
        onsets = _family(
            "incident_onset_timestamp_seconds",
            "When the trouble of an open incident began.",
            ("incident", "job", "node", "fault", "severity", "state", "acknowledged"),
        )
        for incident in _newest(incidents, lambda one: one.onset_s, INCIDENTS_MAX):
            onsets.add_metric(_incident_labels(incident), incident.onset_s)
        asked = _family(
            "action_asked_timestamp_seconds",
            "When an action was asked for, or would have been; of the last hour.",
            ("action", "incident", "job", "node", "kind", "fault", "state"),
        )
        for action in _newest(actions, lambda one: one.created_s, ACTIONS_MAX):
            asked.add_metric(_action_labels(action), action.created_s)
        left_out = _family("listed_left_out", "What a limit keeps off the lists of this page.", ("list",))
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
        nodes = _family("job_nodes", "Nodes that take part in a running job.", ("job",))
        gpus = _family("job_gpus", "GPUs that take part in a running job.", ("job",))
        age = _family("job_progress_age_seconds", "Time since a running job's last step was seen to finish.", ("job",))
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


def _family(name: str, help_: str, labels: Sequence[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(PROMETHEUS_PREFIX + name, help_, labels=labels)
