"""Lists that stay quick whatever there is: found by part of a name, since when, without members, as columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

from eagle_eye.schema.action import MemberRank
from eagle_eye.server.api import views
from eagle_eye.server.model.records import Job, Node
from eagle_eye.server.monitor.watcher import Outlook, StepProgress
from eagle_eye.server.store.store import Change
from tests.server.builders import NOW, FakeClock, FakeWatcher, Running, frame, incident, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    ranks = [MemberRank(rank, f"n{rank // 2}", rank % 2) for rank in range(6)]
    jobs = [
        Job(job=name, attempt=0, state="running", ranks=ranks, restart_owner="", updated_s=NOW)
        for name in ("Team/LLM-1", "team/llm-2", "other_")
    ]
    found = [incident(f"inc_{age}", detected_s=NOW - age) for age in range(500, 0, -100)]
    nodes = [
        Node(node="n1", state="excluded", reason="fan", updated_s=NOW),
        Node(node="n2", state="in_service", reason="was out", updated_s=NOW),
    ]
    with running(tmp_path_factory.mktemp("data")) as site:
        site.dispatcher.services.store.commit(Change(jobs=tuple(jobs), incidents=tuple(found), nodes=tuple(nodes)))
        site.dispatcher.services.fleet.heard(frame(node="n2", time_s=NOW), NOW)
        yield site


@pytest.mark.parametrize(
    ("part", "names"),
    [("LLM", ["team/llm-2", "Team/LLM-1"]), ("_", ["other_"]), ("%", []), ("llm-1", ["Team/LLM-1"])],
)
def test_jobs_are_found_by_a_part_of_their_name_in_any_case(server: Running, part: str, names: list[str]) -> None:
    items = server.client.get("/api/v1/jobs", params={"search": part}).json()["items"]
    assert [job["job"] for job in items] == names


def test_a_list_of_jobs_without_members_says_how_many_nodes_there_are(server: Running) -> None:
    (job,) = server.client.get("/api/v1/jobs", params={"search": "other_", "members": False}).json()["items"]
    assert (job["ranks"], job["nodes"], job["nodes_total"]) == ([], [], 3)
    (job,) = server.client.get("/api/v1/jobs", params={"search": "other_"}).json()["items"]
    assert (len(job["ranks"]), job["nodes_total"]) == (6, 3)


@pytest.mark.parametrize(("seen", "total"), [(("n1", "n2"), 2), ((), None)])
def test_a_job_without_ranks_has_the_nodes_that_speak_of_it(seen: tuple[str, ...], total: int | None) -> None:
    class Seen(FakeWatcher):
        def progress(self, job: str) -> StepProgress | None:
            return StepProgress(None, None, None, nodes=seen)

    exported = Job(job="exported", attempt=0, state="observed", ranks=[], restart_owner="", updated_s=NOW)
    assert views.job(exported, cast("Outlook", Seen(FakeClock())))["nodes_total"] == total


def test_live_incidents_are_those_whose_trouble_goes_on(server: Running) -> None:
    states = ("suspected", "confirmed", "acting", "recovered", "closed")
    reported = [incident(f"inc_of_{state}", job="j2", state=state, detected_s=NOW - 900) for state in states]
    server.dispatcher.services.store.commit(Change(incidents=tuple(reported)))
    items = server.client.get("/api/v1/incidents", params={"state": "live", "job": "j2"}).json()["items"]
    assert [one["state"] for one in items] == ["acting", "confirmed", "suspected"]


def test_incidents_since_a_moment_are_pages_like_all_others(server: Running) -> None:
    query: dict[str, float] = {"since": NOW - 300, "limit": 2}
    first = server.client.get("/api/v1/incidents", params=query).json()
    second = server.client.get("/api/v1/incidents", params={**query, "cursor": first["next"]}).json()
    assert [one["id"] for one in first["items"]] == ["inc_100", "inc_200"]
    assert ([one["id"] for one in second["items"]], second["next"]) == (["inc_300"], None)
    assert server.client.get("/api/v1/incidents", params={"since": "tomorrow"}).json()["reason"] == "time"


def test_the_columns_of_a_list_of_nodes_come_only_when_asked_for(server: Running) -> None:
    plain = server.client.get("/api/v1/fleet/nodes").json()
    assert (plain["heard"], plain["recurrence_score"], plain["reasons"]) == (None, None, None)
    found = server.client.get("/api/v1/fleet/nodes", params={"details": True}).json()
    assert found["nodes"] == ["n1", "n2"]
    assert [heard is None for heard in found["heard"]] == [True, False]
    assert len(found["recurrence_score"]) == 2
    assert found["reasons"] == {"n1": "fan"}


@pytest.mark.parametrize(
    ("path", "name", "value", "meant"),
    [
        ("jobs", "state", "runing", "running"),
        ("incidents", "state", "bogus", ""),
        ("incidents", "fault", "hangs", "hang"),
        ("actions", "state", "requestd", "requested"),
        ("actions", "kind", "exclude", "exclude_node"),
        ("deliveries", "state", "faild", "failed"),
        ("deliveries", "type", "eagle_eye.pong", "eagle_eye.ping"),
        ("nodes", "state", "exclude", "excluded"),
        ("evidence", "state", "recieved", "received"),
        ("ledger", "fault", "hangs", "hang"),
    ],
)
def test_a_filter_of_an_unknown_value_is_refused_and_its_values_stand_in_openapi(
    server: Running, path: str, name: str, value: str, meant: str
) -> None:
    answer = server.client.get(f"/api/v1/{path}", params={name: value})
    assert answer.status_code == 400
    detail = answer.json()["detail"]
    assert f"{name}: {value!r} is unknown; expected one of " in detail
    assert not meant or detail.endswith(f"did you mean {meant}?")
    parameters = server.client.get("/openapi.json").json()["paths"][f"/api/v1/{path}"]["get"]["parameters"]
    (shape,) = [one["schema"] for one in parameters if one["name"] == name]
    known = shape.get("enum") or shape["anyOf"][0]["enum"]
    assert value not in known
    for one in known:
        assert server.client.get(f"/api/v1/{path}", params={name: one}).status_code == 200, one
