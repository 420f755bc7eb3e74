from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_eye.server.model.clock import rfc3339
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.records import Attempt
from eagle_eye.server.monitor.readiness import Heartbeat
from eagle_eye.server.monitor.watcher import JobProgress
from eagle_eye.server.store.store import ACTIONS, DELIVERIES, EVENTS, Change
from tests.server.builders import NOW, FakeClock, Running, action, body, event, frame, incident, running, subscription

RFC3339 = "2023-11-14T22:13:20.000Z"  # NOW


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path, webhooks__allow_private=True) as started:
        yield started


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for all requests that change nothing."""
    with running(tmp_path_factory.mktemp("refusing"), webhooks__allow_private=True) as started:
        yield started


def commit(server: Running, **records: Any) -> None:
    server.dispatcher.services.store.commit(Change(**records))


def problem(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document["status"] == answer.status_code
    assert document["type"] == f"urn:eagle-eye:problem:{document['reason']}"
    assert document["detail"]
    return answer.status_code, document["reason"]


def audit(server: Running) -> list[tuple[str, str, str]]:
    entries = server.client.get("/api/v1/audit").json()["items"]
    return [(entry["who"], entry["verb"], entry["subject"]) for entry in reversed(entries)]


@pytest.mark.parametrize(
    ("method", "path", "status", "reason"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/api/v1/incidents/none", 404, "not_found"),
        ("GET", "/api/v1/actions/none", 404, "not_found"),
        ("GET", "/api/v1/jobs/none", 404, "not_found"),
        ("POST", "/api/v1/nodes/none/drain", 404, "not_found"),
        ("POST", "/api/v1/actions/none/approve", 404, "not_found"),
        ("POST", "/api/v1/deliveries/none/redeliver", 404, "not_found"),
        ("POST", "/api/v1/subscriptions/none/ping", 404, "not_found"),
        ("DELETE", "/api/v1/subscriptions/none", 404, "not_found"),
        ("DELETE", "/api/v1/nodes", 405, "method"),
        ("GET", "/api/v1/nodes?limit=0", 400, "parameter"),
        ("GET", "/api/v1/nodes?limit=x", 400, "parameter"),
        ("GET", "/api/v1/nodes?cursor=x", 400, "cursor"),
        ("GET", "/api/v1/query_range?metric=x", 400, "parameter"),
        ("GET", "/api/v1/query_range?metric=x&start=1&end=2", 400, "metric"),
        ("GET", "/api/v1/query_range?metric=train_loss&start=a&end=2", 400, "time"),
        ("GET", "/api/v1/query_range?metric=train_loss&start=3&end=2", 400, "time"),
        ("GET", "/api/v1/query_range?metric=train_loss&start=nan&end=2", 400, "time"),
        ("GET", "/api/v1/query_range?metric=train_loss&start=1&end=999999999", 400, "too_much"),
        ("GET", "/api/v1/query_range?metric=train_loss&start=1&end=2&step=0", 400, "parameter"),
    ],
)
def test_every_error_is_a_problem_document(refusing: Running, method: str, path: str, status: int, reason: str) -> None:
    before = refusing.metric("http_refused_total", reason=reason)
    assert problem(refusing.client.request(method, path)) == (status, reason)
    assert refusing.metric("http_refused_total", reason=reason) == before + 1


def test_a_bug_is_a_problem_document_that_says_nothing_of_the_inside(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("ee_secret at /home/x")

    monkeypatch.setattr(server.dispatcher.services.store, "page", fail)
    answer = server.client.get("/api/v1/incidents")
    assert problem(answer) == (500, "internal")
    assert "secret" not in answer.text
    assert server.metric("internal_errors_total", place="api") == 1


def test_a_failing_disk_is_503_with_retry_after(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StoreUnavailable("the records cannot be written: disk full")

    monkeypatch.setattr(server.dispatcher.services.store, "update", fail)
    answer = server.client.put("/api/v1/jobs/job", json={"attempt": 0, "state": "running"})
    assert problem(answer) == (503, "storage")
    assert answer.headers["retry-after"] == "5"
    assert server.watcher.jobs == []


def test_lists_are_pages_with_rfc3339_times(server: Running) -> None:
    commit(server, incidents=tuple(incident(f"inc_{number}") for number in range(3)), actions=(action(),))
    first = server.client.get("/api/v1/incidents", params={"limit": 2}).json()
    assert [item["id"] for item in first["items"]] == ["inc_2", "inc_1"]
    second = server.client.get("/api/v1/incidents", params={"limit": 2, "cursor": first["next"]}).json()
    assert ([item["id"] for item in second["items"]], second["next"]) == (["inc_0"], None)
    assert second["items"][0]["detected"] == RFC3339
    assert second["items"][0]["ended"] is None
    assert server.client.get("/api/v1/incidents", params={"state": "closed"}).json() == {"items": [], "next": None}
    listed = server.client.get("/api/v1/actions", params={"incident": "inc_1", "node": "n1"}).json()["items"]
    assert listed[0]["report_to"] == f"{server.url}/api/v1/actions/act_1/reports"
    assert listed[0]["expires"] == "2023-11-14T22:23:20.000Z"


def test_a_job_is_stored_handed_on_and_shown_with_its_progress(server: Running) -> None:
    update = {"attempt": 2, "state": "running", "ranks": [{"rank": 0, "node": "n1", "device": 3}]}
    answer = server.client.put("/api/v1/jobs/job", json={**update, "restart_owner": "slurm"})
    assert answer.status_code == 200
    assert answer.json()["progress"] == {
        "step": 7.0,
        "progressed": RFC3339,
        "step_seconds": 1.5,
        "memory_checkpoint": {"step": 6, "age_steps": 1.0, "copies": 2, "copies_wanted": 4, "persisted_step": 5},
        "log": "12,300 lines of the job's log, none read since step 7",
    }
    assert [(job.job, job.attempt, job.ranks[0].device) for job in server.watcher.jobs] == [("job", 2, 3)]
    assert server.client.get("/api/v1/jobs/job").json()["restart_owner"] == "slurm"
    assert [job["job"] for job in server.client.get("/api/v1/jobs?node=n1").json()["items"]] == ["job"]
    owned = server.client.put("/api/v1/jobs/job", json={**update, "restart_owner": "slurm", "owner": "ada"})
    assert owned.json()["owner"] == "ada"
    assert problem(server.client.put("/api/v1/jobs/job", json={**update, "owner": "a\nb"})) == (400, "owner")
    held = server.client.put("/api/v1/jobs/job", json={**update, "restart_owner": "slurm", "held_up_by": [0]})
    assert held.json()["held_up_by"] == [0]
    assert problem(server.client.put("/api/v1/jobs/job", json={**update, "held_up_by": [9]})) == (400, "held_up_by")
    killed = {**update, "restart_owner": "slurm", "exits": [{"rank": 0, "exit_code": -9}]}
    assert server.client.put("/api/v1/jobs/job", json=killed).json()["exits"] == [{"rank": 0, "exit_code": -9}]
    for wrong_exit in ({"rank": 9, "exit_code": -9}, {"rank": 0, "exit_code": -65}, {"rank": 0, "exit_code": 256}):
        assert problem(server.client.put("/api/v1/jobs/job", json={**update, "exits": [wrong_exit]})) == (400, "exits")
    alone = server.client.put("/api/v1/jobs/job", json={**update, "restart_owner": "slurm", "pace_left_ratio": 0.75})
    assert alone.json()["pace_left_ratio"] == 0.75
    wrong = server.client.put("/api/v1/jobs/job", json={**update, "pace_left_ratio": 1.5})
    assert problem(wrong) == (400, "pace_left_ratio")
    assert audit(server) == [("local", "job", "job")]


def test_what_is_left_of_a_jobs_pace_is_told_without_a_word_on_the_job_itself(server: Running) -> None:
    put = server.client.put
    assert problem(put("/api/v1/jobs/job/pace-left", json={"pace_left_ratio": 0.75})) == (404, "not_found")
    rank = {"rank": 0, "node": "n1", "device": 3}
    put("/api/v1/jobs/job", json={"attempt": 2, "state": "running", "ranks": [rank]})
    reported = put("/api/v1/jobs/job/pace-left", json={"pace_left_ratio": 0.75}).json()
    assert (reported["pace_left_ratio"], reported["attempt"], len(reported["ranks"])) == (0.75, 2, 1)
    assert server.watcher.jobs[-1].pace_left_ratio == 0.75
    assert put("/api/v1/jobs/job/pace-left", json={"pace_left_ratio": None}).json()["pace_left_ratio"] is None
    assert problem(put("/api/v1/jobs/job/pace-left", json={"pace_left_ratio": 1.5})) == (400, "pace_left_ratio")
    assert problem(put("/api/v1/jobs/job/pace-left")) == (400, "body")


def test_an_old_attempt_is_refused_while_the_job_lives(server: Running) -> None:
    put = server.client.put
    put("/api/v1/jobs/job", json={"attempt": 2, "state": "running"})
    assert problem(put("/api/v1/jobs/job", json={"attempt": 1, "state": "running"})) == (409, "attempt")
    put("/api/v1/jobs/job", json={"attempt": 2, "state": "finished"})
    assert put("/api/v1/jobs/job", json={"attempt": 0, "state": "running"}).status_code == 200
    assert [job.attempt for job in server.watcher.jobs] == [2, 2, 0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "body"),
        (b"", "body"),
        (b'{"attempt": "1", "state": "running"}', "body"),
        (b'{"attempt": 1, "state": "dancing"}', "state"),
        (b'{"attempt": -1, "state": "running"}', "attempt"),
        (b'{"attempt": 1, "state": "running", "restart_owner": "a\\nb"}', "restart_owner"),
        (b'{"attempt": 1, "state": "running", "ranks": [{"rank": 0, "node": "n\\u001b1", "device": 0}]}', "ranks"),
        (b'{"attempt": 1, "state": "running", "ranks": [{"rank": 0, "node": "", "device": 0}]}', "ranks"),
        (b'{"attempt": 1, "state": "running", "ranks": [{"rank": -1, "node": "n1", "device": 0}]}', "ranks"),
        (b'{"attempt": 1, "state": "running", "ranks": [{"rank": 0, "node": "n1", "device": 9999}]}', "ranks"),
        (
            b'{"attempt": 1, "state": "running", "ranks": [{"rank": 0, "node": "n1", "device": 0, "role": "\\n"}]}',
            "ranks",
        ),
        (b'{"attempt": 1, "state": "\xff"}', "body"),
        (b"[" * 100_000, "body"),
    ],
)
def test_a_bad_job_is_refused(refusing: Running, content: bytes, reason: str) -> None:
    assert problem(refusing.client.put("/api/v1/jobs/job", content=content)) == (400, reason)
    assert refusing.watcher.jobs == []


def test_a_body_beyond_the_limit_is_refused(refusing: Running) -> None:
    assert problem(refusing.client.put("/api/v1/jobs/job", content=bytes(5 << 20))) == (413, "oversized")


def test_a_job_that_only_agents_speak_of_is_listed_as_observed(server: Running) -> None:
    server.send(body(frame()))
    (job,) = server.client.get("/api/v1/jobs").json()["items"]
    assert (job["job"], job["state"], job["ranks"][0]["node"]) == ("job", "observed", "n1")
    assert server.client.get("/api/v1/jobs/job").json()["state"] == "observed"
    assert server.client.get("/api/v1/jobs?node=n2").json()["items"] == []


def ended_attempt(**more: Any) -> Attempt:
    fields: dict[str, Any] = {"started_s": NOW - 600.0, "seen_s": NOW - 60.0, "node": "n1", "nodes": 1, **more}
    return Attempt(id="att_1", run="att_1", job="over", attempt=3, **fields)


@pytest.mark.parametrize("end", [{}, {"ended_s": NOW - 60.0, "end": "gone"}])
def test_a_job_of_which_agents_spoke_stays_with_its_end(server: Running, end: dict[str, Any]) -> None:
    commit(server, attempts=(ended_attempt(**end),))
    job = server.client.get("/api/v1/jobs/over").json()
    assert (job["state"], job["attempt"], job["nodes"]) == ("ended", 3, ["n1"])
    assert (job["since"], job["updated"]) == (rfc3339(NOW - 60.0),) * 2
    assert job["said"].startswith(f"no agent speaks of it since {job['since']}")


@pytest.mark.parametrize(
    ("asked", "listed"), [("", True), ("?state=ended", True), ("?state=observed", False), ("?node=n2", False)]
)
def test_a_job_that_ended_is_listed(server: Running, asked: str, listed: bool) -> None:
    commit(server, attempts=(ended_attempt(),))
    items = server.client.get(f"/api/v1/jobs{asked}").json()["items"]
    assert [item["job"] for item in items] == ["over"] * listed


def test_a_job_that_ended_before_it_was_on_record_is_known(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        course = JobProgress("brief", 1, "running", False, NOW - 5, None, 7.0, NOW - 1, 0.1, ("n1",), 1)
        server.watcher.course = [course]
        assert server.client.get("/api/v1/jobs/brief").json()["state"] == "ended"


def test_a_job_of_which_agents_speak_again_is_observed(server: Running) -> None:
    commit(server, attempts=(Attempt(id="att_2", run="att_2", job="job", attempt=0, started_s=0.0, seen_s=NOW),))
    server.send(body(frame()))
    assert [item["state"] for item in server.client.get("/api/v1/jobs").json()["items"]] == ["observed"]


def test_reports_are_kept_and_terminal_states_stay(server: Running) -> None:
    commit(server, actions=(action(),))

    def report(state: str, detail: str = "") -> httpx.Response:
        return server.client.post("/api/v1/actions/act_1/reports", json={"state": state, "detail": detail})

    assert report("accepted").json()["state"] == "accepted"
    assert report("running", "draining").json()["state"] == "running"
    done = report("done", "attempt 1")
    assert [entry["state"] for entry in done.json()["reports"]] == ["accepted", "running", "done"]
    entry = {"state": "done", "detail": "attempt 1", "who": "local", "time": RFC3339, "claim": "", "epoch": 0}
    assert done.json()["reports"][2] == entry
    assert report("done", "attempt 1").json() == done.json()
    assert problem(report("running")) == (409, "state")
    assert problem(report("happy")) == (400, "body")
    verbs = ["report accepted", "report running", "report done", "exclude"]
    assert [verb for _, verb, _ in audit(server)] == verbs


def test_an_approved_action_is_requested_of_subscribers_once(server: Running) -> None:
    commit(server, subscriptions=(subscription(url="http://127.0.0.1:1/"),), actions=(action(state="awaiting"),))
    assert server.client.post("/api/v1/actions/act_1/approve").json()["state"] == "requested"
    assert server.client.post("/api/v1/actions/act_1/approve").json()["state"] == "requested"
    (delivery,) = server.client.get("/api/v1/deliveries", params={"type": "eagle_eye.action.requested"}).json()["items"]
    shown = server.client.get(f"/api/v1/deliveries/{delivery['id']}").json()["event"]
    assert shown["subject"] == "act_1"
    assert shown["data"]["exclude"] == ["n1"]
    assert shown["data"]["report_to"].endswith("/api/v1/actions/act_1/reports")
    assert shown["data"]["expires"] == "2023-11-14T22:23:20.000Z"
    assert audit(server) == [("local", "approve", "act_1")]
    assert problem(server.client.post("/api/v1/actions/act_1/reject")) == (409, "state")


def test_a_rejected_action_is_asked_of_nobody(server: Running) -> None:
    commit(server, actions=(action(state="awaiting"),))
    assert server.client.post("/api/v1/actions/act_1/reject").json()["state"] == "rejected"
    assert server.dispatcher.services.store.all(EVENTS) == []


def test_a_false_incident_withdraws_what_nobody_took_up(server: Running) -> None:
    actions = (action("a"), action("b", "awaiting"), action("c", "running"), action("d", "done"))
    commit(server, incidents=(incident(),), actions=actions)
    assert server.client.post("/api/v1/incidents/inc_1/false").json()["state"] == "false"
    store = server.dispatcher.services.store
    assert [known.state for known in store.all(ACTIONS)] == ["withdrawn", "withdrawn", "running", "done"]
    assert [(known.type, known.subject) for known in store.all(EVENTS)] == [
        ("eagle_eye.action.withdrawn", "a"),
        ("eagle_eye.incident.resolved", "inc_1"),
    ]
    server.client.post("/api/v1/incidents/inc_1/false")
    assert len(store.all(EVENTS)) == 2
    assert problem(server.client.post("/api/v1/incidents/inc_1/resolve")) == (409, "state")


def test_acknowledging_and_resolving_are_told_and_audited(server: Running) -> None:
    commit(server, incidents=(incident(),))
    assert server.client.post("/api/v1/incidents/inc_1/acknowledge").json()["acknowledged_by"] == "local"
    resolved = server.client.post("/api/v1/incidents/inc_1/resolve").json()
    assert (resolved["state"], resolved["ended"]) == ("closed", RFC3339)
    assert audit(server) == [("local", "acknowledge", "inc_1"), ("local", "resolve", "inc_1")]


def test_a_nodes_verbs_change_its_standing_and_readmission_is_announced(server: Running) -> None:
    server.send(body(frame()))

    def do(verb: str, **query: str) -> dict[str, Any]:
        answer: dict[str, Any] = server.client.post(f"/api/v1/nodes/n1/{verb}", params=query).json()
        return answer

    assert (do("exclude", reason="smoke")["state"], do("exclude")["reason"]) == ("excluded", "smoke")
    assert do("drain")["state"] == "draining"
    assert do("readmit")["state"] == "in_service"
    assert do("readmit")["agent"]["job"] == "job"
    (reported,) = server.dispatcher.services.store.all(EVENTS)
    assert (reported.type, reported.subject) == ("eagle_eye.node.readmitted", "n1")
    assert [verb for _, verb, _ in audit(server)] == ["exclude", "drain", "readmit"]


def subscribe(server: Running, **more: Any) -> httpx.Response:
    return server.client.post("/api/v1/subscriptions", json={"url": "http://127.0.0.1:1/hook", **more})


def test_a_subscriptions_secret_is_shown_once(server: Running) -> None:
    made = subscribe(server)
    assert made.status_code == 201
    secret, name = made.json()["secret"], made.json()["id"]
    assert secret.startswith("whsec_")
    for path in (f"/api/v1/subscriptions/{name}", "/api/v1/subscriptions", "/api/v1/audit", "/metrics"):
        assert secret not in server.client.get(path).text
    assert server.client.get(f"/api/v1/subscriptions/{name}").json()["secrets"] == 1


def test_a_subscribers_own_secret_is_taken(server: Running) -> None:
    own = "whsec_" + "B" * 43 + "="
    assert subscribe(server, secret=own).json()["secret"] == own


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"url": "ftp://x"}, "target"),
        ({"url": "https://user:pw@host/"}, "target"),
        ({"types": ["party"]}, "types"),
        ({"jobs": [""]}, "jobs"),
        ({"format": "carrier-pigeon"}, "body"),
        ({"secret": "abc"}, "secret"),
        ({"colour": "red"}, "body"),
        ({"url": 1}, "body"),
    ],
)
def test_a_bad_subscription_is_refused(refusing: Running, more: dict[str, Any], reason: str) -> None:
    assert problem(subscribe(refusing, **more)) == (400, reason)
    assert refusing.client.get("/api/v1/subscriptions").json()["items"] == []


def test_private_targets_are_refused_by_default(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        answer = subscribe(server)
        assert problem(answer) == (400, "target")
        assert "webhooks.allow_private" in answer.json()["detail"]


def test_subscriptions_are_limited_and_ended_ones_do_not_count(tmp_path: Path) -> None:
    with running(tmp_path, webhooks__allow_private=True, webhooks__subscriptions_max=1) as server:
        name = subscribe(server).json()["id"]
        assert problem(subscribe(server)) == (409, "limit")
        assert server.client.delete(f"/api/v1/subscriptions/{name}").status_code == 204
        assert server.client.delete(f"/api/v1/subscriptions/{name}").status_code == 204
        assert server.client.get(f"/api/v1/subscriptions/{name}").json()["ended_reason"] == "deleted"
        assert problem(server.client.post(f"/api/v1/subscriptions/{name}/ping")) == (409, "state")
        assert subscribe(server).status_code == 201


def test_a_ping_goes_to_its_subscription_alone_and_can_be_sent_again(server: Running) -> None:
    first, _second = subscribe(server).json()["id"], subscribe(server).json()["id"]
    pinged = server.client.post(f"/api/v1/subscriptions/{first}/ping").json()["event_id"]
    (delivery,) = server.client.get("/api/v1/deliveries", params={"event": pinged}).json()["items"]
    assert delivery["subscription_id"] == first
    again = server.client.post(f"/api/v1/deliveries/{delivery['id']}/redeliver")
    assert again.json()["state"] == "pending"


def test_a_stale_delivery_is_not_sent_again(server: Running) -> None:
    commit(server, subscriptions=(subscription(url="http://127.0.0.1:1/"),))
    commit(server, events=(event(expires_s=NOW - 1),))
    (delivery,) = server.dispatcher.services.store.all(DELIVERIES)
    assert problem(server.client.post(f"/api/v1/deliveries/{delivery.id}/redeliver")) == (409, "state")


def test_query_range_gives_the_last_value_of_each_step(server: Running) -> None:
    server.send(body(*(frame(number, time_s=NOW + number) for number in range(1, 6)), sent_s=NOW))
    server.send(body(frame(1, node="n2", time_s=NOW + 1, job="other", ranks=[]), sent_s=NOW))
    query = {"metric": "gpu_power_watts", "start": RFC3339, "end": str(NOW + 10), "step": "2"}
    answer = server.client.get("/api/v1/query_range", params=query).json()
    assert [series["node"] for series in answer["series"]] == ["n1", "n2"]
    assert [value for _, value in answer["series"][0]["points"]] == [101.0, 103.0, 105.0]
    assert answer["series"][0]["points"][0][0] == RFC3339
    by_job = server.client.get("/api/v1/query_range", params={**query, "job": "job"}).json()
    assert [series["node"] for series in by_job["series"]] == ["n1"]
    by_node = server.client.get("/api/v1/query_range", params={**query, "node": "n2"}).json()
    assert [series["node"] for series in by_node["series"]] == ["n2"]


def test_query_range_refuses_to_read_too_much(tmp_path: Path) -> None:
    with running(tmp_path, history__query_frames_max=3) as server:
        server.send(body(*(frame(number, time_s=NOW + number) for number in range(1, 6)), sent_s=NOW))
        query = {"metric": "gpu_power_watts", "start": str(NOW), "end": str(NOW + 10)}
        assert problem(server.client.get("/api/v1/query_range", params=query)) == (400, "too_much")


def test_readiness_names_what_is_missing(tmp_path: Path) -> None:
    clock = FakeClock()
    with running(tmp_path, clock) as server:
        unready = server.client.get("/readyz")
        assert unready.status_code == 503
        assert unready.json()["checks"]["agents"] == "no agent has sent anything yet"
        server.send(body(frame()))
        ready = server.client.get("/readyz")
        assert (ready.status_code, ready.json()["blind"]) == (200, {"straggler": "no compute time"})
        clock.advance(31)
        assert "no agent was heard for 31 s" in server.client.get("/readyz").text
        server.send(body(frame(2), sent_s=clock.now_s()))
        server.watcher.stuck = True
        assert "has not judged yet" in server.client.get("/readyz").text
        assert server.metric("ready") == 0
        assert server.client.get("/healthz").status_code == 200


def test_a_server_whose_records_are_its_own_leads(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        said = server.client.get("/api/v1/leader")
        alone = {"leads": True, "leader": server.url, "epoch": 0, "seen_since": None, "problem": "", "nodes_in_vain": 0}
        assert said.json() == alone
        assert not {"eagle-eye-leader", "eagle-eye-standby"} & set(said.headers)


def test_a_scrape_shows_whether_the_server_can_judge_by_now(tmp_path: Path) -> None:
    clock = FakeClock()
    with running(tmp_path, clock) as server:
        server.send(body(frame()))
        assert "\neagle_eye_ready 1.0\n" in server.client.get("/metrics").text
        clock.advance(31)
        assert "\neagle_eye_ready 0.0\n" in server.client.get("/metrics").text


def test_heartbeats_stop_while_the_server_cannot_judge(server: Running) -> None:
    services = server.dispatcher.services
    heartbeat = Heartbeat(services.store, services.doctor, services.clock, 60.0, services.config.public_url)
    heartbeat.beat()
    commit(server, subscriptions=(subscription(url="http://127.0.0.1:1/", types=["eagle_eye.heartbeat"]),))
    heartbeat.beat()
    assert services.store.all(EVENTS) == []
    server.send(body(frame()))
    heartbeat.beat()
    (sent,) = services.store.all(EVENTS)
    assert (sent.type, sent.expires_s) == ("eagle_eye.heartbeat", NOW + 60)


def test_metrics_show_the_fleets_newest_values(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.send(body(frame()))
        lines = server.client.get("/metrics").text.splitlines()
        assert 'eagle_eye_gpu_power_watts{device="0",job="job",node="n1"} 400.0' in lines
        assert 'eagle_eye_gpu_ecc_corrected_total{device="0",job="job",node="n1"} 3.0' in lines
        assert 'eagle_eye_node_blocked_tasks{device="",job="job",node="n1"} 1.0' in lines
        assert 'eagle_eye_agent_clock_offset_seconds{node="n1"} 0.0' in lines
        assert 'eagle_eye_detector_blind{detector="straggler"} 1.0' in lines
        assert "eagle_eye_nodes_fresh 1.0" in lines


def test_the_number_of_series_on_metrics_is_bounded(tmp_path: Path) -> None:
    with running(tmp_path, series_max=1) as server:
        lines = server.client.get("/metrics").text.splitlines()
        assert "eagle_eye_series_cut 1.0" in lines
        assert not any(line.startswith("eagle_eye_node_blocked_tasks") for line in lines)


def test_the_page_runs_nothing_from_elsewhere(server: Running) -> None:
    page = server.client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'; script-src 'self' " in page.headers["content-security-policy"]
    assert "style=" not in page.text
    assert "onclick" not in page.text
    for path in ("/", "/api/v1/nodes", "/nothing"):
        assert server.client.get(path).headers["x-content-type-options"] == "nosniff"


def test_openapi_describes_every_endpoint_and_its_body(server: Running) -> None:
    paths = server.client.get("/openapi.json").json()["paths"]
    for path in ("/api/v1/jobs/{job}", "/api/v1/actions/{action}/reports", "/api/v1/query_range", "/readyz"):
        assert path in paths
    schema = paths["/api/v1/actions/{action}/reports"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"]["state"]["enum"] == ["accepted", "done", "failed", "refused", "running"]
    assert all(method["description"] for methods in paths.values() for method in methods.values())
