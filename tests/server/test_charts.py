"""Pictures through the API: an incident's evidence drawn, its dossier, a job's course and timeline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.schema.events import Event
from eagle_eye.server.api import jobs
from eagle_eye.server.history.embedded_history import EmbeddedHistory
from eagle_eye.server.store.store import Change
from tests.server.builders import NOW, FakeClock, Running, body, frame, incident, running
from tests.server.segments.kept import compact
from tests.server.slow_node import COMPUTE, NODES, SLOW, sample, slow_node_server


def seconds_of(answer: dict[str, Any], name: str) -> dict[float, Any]:
    columns = answer["columns"]
    return {time_s - NOW: value for time_s, value in zip(columns["time"], columns[name], strict=True)}


@pytest.fixture(scope="module")
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, clock: FakeClock) -> Iterator[Running]:
    with slow_node_server(tmp_path_factory.mktemp("data"), clock) as started:
        yield started


def picture(server: Running, incident_id: str = "inc_1", **query: Any) -> dict[str, Any]:
    answer = server.client.get(f"/api/v1/incidents/{incident_id}/picture", params=query)
    found: dict[str, Any] = answer.json()
    return found


def test_the_accused_is_drawn_beside_ranks_of_its_role(server: Running) -> None:
    found = picture(server)
    assert (found["metric"], found["name"], found["threshold"]) == ("train_compute_seconds", "n1 device 0", 1.5)
    accused, median = seconds_of(found, "accused"), seconds_of(found, "median")
    assert (accused[-30.0], accused[-15.0]) == (1.0, 2.0)
    assert (median[-30.0], median[-15.0]) == (1.0, 1.0)
    assert found["peers"]["nodes_total"] == 4  # n6 has another role
    assert seconds_of(found, "peers_seen")[-15.0] == 4


def test_what_was_not_seen_is_null_and_told(server: Running) -> None:
    found = picture(server)
    assert [seconds_of(found, "accused")[at] for at in (-10.0, -9.0, -8.0, -7.0)] == [None] * 4
    assert len(found["silences"]) == 1
    assert any("No data from n1 device 0 in 4 of" in sentence for sentence in found["said"])


def test_a_picture_begins_with_what_was_seen(server: Running) -> None:
    assert picture(server)["columns"]["time"][0] == NOW - 65


def test_a_picture_of_another_time_and_metric_can_be_had(server: Running) -> None:
    found = picture(server, metric="train_step_seconds", start=NOW - 40, end=NOW - 30, points=10)
    assert (found["metric"], found["threshold"], len(found["columns"]["time"])) == ("train_step_seconds", None, 10)


def test_what_concerns_the_whole_job_has_no_accused(server: Running) -> None:
    found = picture(server, "inc_2")
    assert (found["metric"], found["accused_series"], found["name"]) == ("train_loss", 0, "the job")
    assert seconds_of(found, "median")[-15.0] == 3.0


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ({"metric": "no_such_metric"}, "metric"),
        ({"metric": "train_parameter_checksum"}, "metric"),
        ({"start": "yesterday", "end": NOW}, "time"),
        ({"start": NOW - 100 * 86_400, "end": NOW}, "too_much"),
        ({"points": 100_000}, "parameter"),
    ],
)
def test_what_cannot_be_drawn_is_refused(server: Running, query: dict[str, Any], reason: str) -> None:
    found = picture(server, **query)
    assert (found["status"], found["reason"]) == (404 if reason == "metric" else 400, reason)


def test_an_incident_that_nobody_knows_has_no_picture(server: Running) -> None:
    assert picture(server, "inc_9")["status"] == 404
    assert server.client.get("/api/v1/incidents/inc_9/dossier").status_code == 404


def test_a_dossier_says_where_the_accused_is_and_what_to_type(server: Running) -> None:
    found = server.client.get("/api/v1/incidents/inc_1/dossier").json()
    (place,) = found["where"]
    (card,) = place["gpus"]
    assert (card["uuid"], card["pci_address"], card["serial"]) == ("GPU-1", "0000:1b:00.0", "16520")
    assert place["other_jobs"] == ["notebook"]
    assert (place["rack"], place["switch"]) == (None, None)
    assert found["commands"][0]["command"] == "eagle-eye actions approve act_1"
    assert [entry["kind"] for entry in found["story"]] == ["fault", "incident", "delivery"]
    assert [panel["metric"] for panel in found["panels"]] == ["train_compute_seconds", "train_step_seconds"]
    assert [delivery["id"] for delivery in found["deliveries"]] == ["d-1"]


def test_a_job_of_which_even_one_node_has_many_frames_still_has_a_course(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "FRAMES_MAX", 1)
    found = server.client.get("/api/v1/jobs/job/course").json()
    assert found["nodes_read"] == 1
    assert any(value is not None for value in found["series"]["step_seconds"]["median"])


def test_a_course_has_step_time_loss_throughput_and_goodput(server: Running) -> None:
    found = server.client.get("/api/v1/jobs/job/course").json()
    series = found["series"]
    at = series["step_seconds"]["time"].index(NOW - 15)
    assert series["step_seconds"]["median"][at] == 2.1
    assert series["loss"]["median"][at] == 3.0
    assert series["tokens_per_second"]["total"][at] == 600.0
    assert (found["nodes"], found["nodes_read"]) == (6, 6)
    assert [mark["id"] for mark in found["incidents"]] == ["inc_2", "inc_1"]
    assert [mark["id"] for mark in found["actions"]] == ["act_1"]
    assert len(series["goodput_ratio"]["value"]) == len(series["goodput_ratio"]["time"])
    assert found["parts"][0]["part"] == "unknown"


def test_a_timeline_has_a_row_for_each_node(server: Running) -> None:
    found = server.client.get("/api/v1/jobs/job/timeline").json()
    assert [row["label"] for row in found["rows"]] == NODES
    assert found["rows"][0]["incidents"] == ["inc_1"]
    assert found["rows"][1]["ranks"] == [1, 1]
    assert (found["nodes"], found["unknown"]) == (6, [])


def test_of_a_job_that_nobody_knows_there_is_nothing(server: Running) -> None:
    for what in ("course", "timeline"):
        assert server.client.get(f"/api/v1/jobs/stranger/{what}").status_code == 404


def test_a_job_without_a_past_has_an_empty_timeline(server: Running) -> None:
    found = server.client.get("/api/v1/jobs/notebook/timeline").json()
    assert (found["rows"], found["attempts"]) == ([], [])


def test_a_time_that_ends_before_it_begins_is_refused(server: Running) -> None:
    query = {"since": NOW, "until": NOW - 10}
    assert server.client.get("/api/v1/jobs/job/course", params=query).json()["reason"] == "time"


def test_old_pictures_are_drawn_from_minutes(tmp_path: Path) -> None:
    clock = FakeClock()
    start_s = NOW // 3_600 * 3_600
    with running(tmp_path, clock) as server:
        for node in NODES[:4]:
            times = [start_s + at for at in range(0, 600, 5)]
            server.send(body(*(sample(node, at, time_s) for at, time_s in enumerate(times, 1)), sent_s=NOW))
        history = server.dispatcher.services.history
        assert isinstance(history, EmbeddedHistory)
        compact(history)
        clock.advance(7_200)
        known = incident(evidence=[COMPUTE], **SLOW | {"onset_s": start_s, "detected_s": start_s + 300})
        server.dispatcher.services.store.commit(Change(incidents=(known,)))
        found = picture(server, start=start_s, end=start_s + 3_600, points=60)
        assert found["step_seconds"] == 60.0
        assert [one["resolution_seconds"] for one in found["resolutions"]] == [60]
        accused = [value for value in found["columns"]["accused"] if value is not None]
        assert len(accused) == 10


def test_racks_and_switches_come_from_the_sites_file(tmp_path: Path) -> None:
    places = tmp_path / "places.json"
    places.write_text('{"rack_of_node": {"n1": "r12"}, "switch_of_node": {"n1": "leaf-3"}}')
    with running(tmp_path / "data", topology_file=str(places)) as server:
        server.dispatcher.services.store.commit(Change(incidents=(incident(),)))
        (place,) = server.client.get("/api/v1/incidents/inc_1/dossier").json()["where"]
        assert (place["rack"], place["switch"]) == ("r12", "leaf-3")


def test_inventory_events_bring_address_and_serial(tmp_path: Path) -> None:
    reported = {"uuid": "GPU-9", "model": "H100", "pci_address": "0000:1b:00.0", "serial": "16520\n"}
    with running(tmp_path) as server:
        server.send(body(frame(events=[Event(NOW, "inventory", 3, reported)])))
        server.dispatcher.services.bookkeeper.write_changes([], NOW)
        found = server.client.get("/api/v1/gpus/GPU-9").json()
        assert (found["device"], found["pci_address"], found["serial"]) == (3, "0000:1b:00.0", "")
