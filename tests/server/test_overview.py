"""The fleet at a glance: what is seen of a job, what it loses right now, how each node stands; and the endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.server.api.overview import accused_in, loss_of, not_seen, places_of, standing
from eagle_eye.server.model.records import Node
from eagle_eye.server.monitor.watcher import JobProgress
from eagle_eye.server.store.store import Change
from tests.server.builders import NOW, Running, body, frame, incident, running


def course(**more: Any) -> JobProgress:
    fields: dict[str, Any] = {
        "job": "job",
        "attempt": 2,
        "state": "running",
        "declared": True,
        "started_s": NOW - 7200,
        "first_step": 1.0,
        "step": 900.0,
        "progressed_s": NOW - 5,
        "step_s": 2.0,
        "nodes": ("n1", "n2"),
        "gpus": 16,
        "heard": 2,
        "metrics": frozenset({"gpu_power_watts", "train_step", "nccl_sequence", "node_cpu_pressure_ratio", "link_up"}),
    }
    return JobProgress(**{**fields, **more})


class TestNotSeen:
    def test_of_a_job_of_which_everything_is_sent_nothing_is_missing(self) -> None:
        assert not_seen(course().metrics) == []

    def test_what_no_node_sends_is_named_as_people_call_it(self) -> None:
        assert not_seen({"gpu_power_watts", "node_rdma_errors_total"}) == ["steps", "NCCL", "hosts"]


class TestLoss:
    def test_a_job_that_makes_steps_loses_nothing(self) -> None:
        assert loss_of(course(), [], NOW) is None

    def test_a_job_that_hangs_loses_all_its_gpus_since_the_onset(self) -> None:
        found = loss_of(course(), [incident(fault="hang", attempt=2, onset_s=NOW - 1800)], NOW)
        assert found is not None
        assert (found.kind, found.gpus, found.incident_id) == ("stopped", 16.0, "inc_1")
        assert found.gpu_hours(NOW) == 8.0

    def test_a_slow_job_loses_the_share_that_its_worst_slowness_costs(self) -> None:
        mild = incident("inc_a", fault="straggler", attempt=2, slowdown_ratio=0.1, onset_s=NOW - 3600)
        bad = incident("inc_b", fault="straggler", attempt=2, slowdown_ratio=0.25, onset_s=NOW - 1800)
        found = loss_of(course(), [mild, bad], NOW)
        assert found is not None
        assert (found.kind, found.incident_id) == ("slow", "inc_b")
        assert found.gpus == pytest.approx(16 * 0.2)

    def test_a_job_without_a_step_for_long_is_reported_though_no_incident_says_why(self) -> None:
        found = loss_of(course(progressed_s=NOW - 300), [], NOW)
        assert found is not None
        assert (found.kind, found.incident_id, found.since_s) == ("unexplained", "", NOW - 300)

    def test_the_next_step_of_a_job_of_long_steps_is_not_missed_yet(self) -> None:
        assert loss_of(course(progressed_s=NOW - 300, step_s=120.0), [], NOW) is None

    @pytest.mark.parametrize(
        "over", [{"state": "false"}, {"state": "recovered"}, {"attempt": 1}, {"merged_into": "inc_2"}]
    )
    def test_an_incident_that_is_over_or_anothers_costs_nothing(self, over: dict[str, Any]) -> None:
        assert loss_of(course(), [incident(**{"fault": "hang", "attempt": 2, **over})], NOW) is None

    def test_of_a_job_that_nobody_hears_nobody_can_tell(self) -> None:
        assert loss_of(course(heard=0), [incident(fault="hang", attempt=2)], NOW) is None

    def test_a_job_that_is_completing_loses_nothing(self) -> None:
        assert loss_of(course(state="completing", progressed_s=NOW - 300), [], NOW) is None

    def test_where_nobody_knows_how_many_gpus_there_are_the_loss_has_no_size(self) -> None:
        found = loss_of(course(gpus=None), [incident(fault="hang", attempt=2)], NOW)
        assert found is not None
        assert found.gpu_hours(NOW) is None


class TestStanding:
    def test_a_node_is_accused_by_the_gravest_of_its_incidents(self) -> None:
        found = accused_in([incident(nodes=["n1"]), incident("inc_2", nodes=["n1", "n2"], state="suspected")])
        assert found == {"n1": "accused", "n2": "suspected"}

    def test_incidents_that_are_over_accuse_nobody(self) -> None:
        assert accused_in([incident(nodes=["n1"], state="recovered")]) == {}

    def test_trouble_goes_before_standing_and_standing_before_silence(self) -> None:
        assert standing("excluded", "accused", fresh=False) == "accused"
        assert standing("excluded", None, fresh=False) == "excluded"
        assert standing("watched", None, fresh=False) == "silent"
        assert standing("in_service", None, fresh=None) == "unheard"
        assert standing("watched", None, fresh=True) == "watched"

    def test_places_are_named_once_and_what_is_not_known_is_none_of_them(self) -> None:
        assert places_of(["n1", "n2", "n3"], {"n1": "r1", "n3": "r1", "n9": "r9"}) == (["r1"], [0, -1, 0])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    topology = tmp_path / "topology.json"
    topology.write_text('{"rack_of_node": {"n1": "r1"}, "switch_of_node": {"n2": "leaf1"}}', encoding="utf-8")
    with running(tmp_path / "data", topology_file=str(topology)) as found:
        yield found


def test_the_fleet_lists_running_jobs_the_longest_without_a_step_first(server: Running) -> None:
    server.watcher.course = [course(job="b"), course(job="a", progressed_s=NOW - 50), course(job="c", state="finished")]
    fleet = server.client.get("/api/v1/fleet").json()
    assert [job["job"] for job in fleet["jobs"]] == ["a", "b"]
    assert fleet["policy_mode"] == "observe"
    assert fleet["readiness"]["blind"] == {"straggler": "no compute time"}


def test_nodes_that_left_long_ago_are_known_and_not_missed(server: Running) -> None:
    server.dispatcher.services.fleet.know("left", NOW - 7 * 3_600)
    server.dispatcher.services.fleet.know("silent", NOW - 3_600)
    server.send(body(frame(node="n1"))).raise_for_status()
    fleet = server.client.get("/api/v1/fleet").json()
    assert (fleet["nodes"], fleet["nodes_recent"], fleet["nodes_heard"]) == (3, 2, 1)


def test_a_job_is_shown_with_its_coverage_and_what_it_loses(server: Running) -> None:
    server.watcher.course = [
        course(heard=1, metrics=frozenset({"gpu_power_watts"}), restart_owner="slurm", owner="ada")
    ]
    server.dispatcher.services.store.commit(Change(incidents=(incident(fault="hang", attempt=2, onset_s=NOW - 3600),)))
    (job,) = server.client.get("/api/v1/fleet").json()["jobs"]
    assert (job["nodes"], job["nodes_heard"], job["restart_owner"], job["incidents"]) == (2, 1, "slurm", 1)
    assert job["owner"] == "ada"
    assert job["not_seen"] == ["steps", "NCCL", "hosts", "network"]
    assert (job["loss"]["kind"], job["loss"]["gpu_hours"]) == ("stopped", 16.0)


def test_the_map_tells_of_each_node_its_standing_job_rack_and_switch(server: Running) -> None:
    server.send(body(frame(node="n1"))).raise_for_status()
    silent = Node(node="n2", state="in_service", reason="", updated_s=NOW)
    gone = Node(node="n3", state="excluded", reason="", updated_s=NOW)
    server.dispatcher.services.store.commit(Change(nodes=(silent, gone)))
    server.watcher.course = [course(nodes=("n1", "n2"))]
    found = server.client.get("/api/v1/fleet/nodes").json()
    rows = {
        node: (
            found["standings"][found["standing"][at]],
            *(
                found[names][place] if (place := found[column][at]) >= 0 else None
                for names, column in (("jobs", "job"), ("racks", "rack"), ("switches", "switch"))
            ),
        )
        for at, node in enumerate(found["nodes"])
    }
    assert rows == {
        "n1": ("in_service", "job", "r1", None),
        "n2": ("unheard", "job", None, "leaf1"),
        "n3": ("excluded", None, None, None),
    }


def test_the_fleet_is_for_readers(server: Running) -> None:
    for path in ("/api/v1/fleet", "/api/v1/fleet/nodes"):
        assert server.client.get(path, headers={"Authorization": "Bearer ee_wrong"}).status_code == 401
