"""Incidents, actions and jobs one by one on /metrics."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.monitor.metrics import ACTIONS_MAX, INCIDENTS_MAX, IncidentListCollector, JobCollector
from eagle_eye.server.monitor.watcher import JobProgress
from eagle_eye.server.store.sql_store import open_file
from eagle_eye.server.store.store import Change
from tests.server.builders import NOW, FakeClock, action, incident

ONSET, ASKED = "incident_onset_timestamp_seconds", "action_asked_timestamp_seconds"


def shown(collector: Any, family: str) -> list[tuple[dict[str, str], float]]:
    return [
        (sample.labels, sample.value)
        for metric in collector.collect()
        if metric.name == f"eagle_eye_{family}"
        for sample in metric.samples
    ]


def of(tmp_path: Path, change: Change) -> IncidentListCollector:
    store = open_file(tmp_path / "records.db")
    store.commit(change)
    return IncidentListCollector(store, FakeClock())


def test_an_open_incident_is_a_series_whose_value_is_its_onset(tmp_path: Path) -> None:
    assert shown(of(tmp_path, Change(incidents=(incident(),))), ONSET) == [
        (
            {
                "incident": "inc_1",
                "job": "job",
                "node": "n1",
                "fault": "hang",
                "severity": "critical",
                "state": "confirmed",
                "acknowledged": "false",
            },
            NOW - 10,
        )
    ]


def test_an_incident_that_somebody_has_seen_says_so_and_one_of_several_nodes_accuses_none(tmp_path: Path) -> None:
    several = incident(acknowledged_by="tok_1", node=None, nodes=["n1", "n2"], action="notify")
    ((labels, _),) = shown(of(tmp_path, Change(incidents=(several,))), ONSET)
    assert (labels["acknowledged"], labels["node"], labels["severity"]) == ("true", "", "warning")


def test_what_people_have_to_look_at_is_critical(tmp_path: Path) -> None:
    escalated = incident(action="notify", escalation="nobody reported")
    ((labels, _),) = shown(of(tmp_path, Change(incidents=(escalated,))), ONSET)
    assert labels["severity"] == "critical"


@pytest.mark.parametrize("state", ["closed", "false"])
def test_an_incident_that_is_over_is_gone(tmp_path: Path, state: str) -> None:
    assert shown(of(tmp_path, Change(incidents=(incident(state=state),))), ONSET) == []


def test_an_action_is_shown_for_an_hour_with_what_became_of_it(tmp_path: Path) -> None:
    asked = shown(
        of(tmp_path, Change(actions=(action(state="done"), action("act_0", created_s=NOW - 3601.0)))),
        ASKED,
    )
    assert [(labels["action"], labels["state"], value) for labels, value in asked] == [("act_1", "done", NOW)]


def test_of_too_many_the_newest_are_shown_and_the_rest_are_counted(tmp_path: Path) -> None:
    incidents = tuple(incident(f"inc_{i}", onset_s=NOW + i) for i in range(INCIDENTS_MAX + 3))
    actions = tuple(action(f"act_{i}", created_s=NOW + i) for i in range(ACTIONS_MAX + 2))
    collector = of(tmp_path, Change(incidents=incidents, actions=actions))
    assert min(value for _, value in shown(collector, ONSET)) == NOW + 3
    assert min(value for _, value in shown(collector, ASKED)) == NOW + 2
    assert shown(collector, "listed_left_out") == [({"list": "incidents"}, 3), ({"list": "actions"}, 2)]


def test_records_that_cannot_be_read_are_not_taken_for_none() -> None:
    def fail() -> None:
        raise StoreUnavailable("disk")

    store: Any = SimpleNamespace(open_incidents=fail)
    assert list(IncidentListCollector(store, FakeClock()).collect()) == []


def course(job: str = "job", **more: Any) -> JobProgress:
    fields: dict[str, Any] = {
        "job": job,
        "attempt": 0,
        "state": "running",
        "declared": False,
        "started_s": NOW - 100,
        "first_step": 1.0,
        "step": 7.0,
        "progressed_s": NOW - 30.0,
        "step_s": 1.0,
        "nodes": ("n1", "n2"),
        "gpus": 16,
    }
    return JobProgress(**{**fields, **more})


def test_a_running_job_says_who_takes_part_and_how_old_its_last_step_is() -> None:
    registry = CollectorRegistry()
    registry.register(JobCollector(lambda: [course()], FakeClock()))
    names = ("jobs_running", "job_nodes", "job_gpus", "job_progress_age_seconds")
    labels: tuple[dict[str, str], ...] = ({}, {"job": "job"}, {"job": "job"}, {"job": "job"})
    assert [registry.get_sample_value(f"eagle_eye_{n}", of) for n, of in zip(names, labels, strict=True)] == [
        1.0,
        2.0,
        16.0,
        30.0,
    ]


def test_a_job_whose_steps_nobody_reports_has_no_age_of_progress_and_one_that_ended_is_gone() -> None:
    collector = JobCollector(
        lambda: [course("a", progressed_s=None, gpus=None), course("b", state="completed")], FakeClock()
    )
    assert shown(collector, "job_progress_age_seconds") == []
    assert [labels["job"] for labels, _ in shown(collector, "job_nodes")] == ["a"]
