"""What is counted, over HTTP: goodput, the ledger, tickets, nodes' history and scores, GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_eye.schema.events import Event
from eagle_eye.server.accounts.node_records import compared
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import (
    AttemptMembers,
    AuditEntry,
    Comparison,
    DriverError,
    Gpu,
    Node,
    RuleWord,
    Seat,
)
from eagle_eye.server.store.store import GPUS, Change
from tests.server.accounts.past import attempt, known, three_failures
from tests.server.builders import NOW, FakeClock, Running, action, body, frame, incident, running

TICKETS = "id,node,opened,closed,text\nT-1,n1,2023-11-14T22:14:20Z,,PSU\n"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for all requests that change nothing."""
    with running(tmp_path_factory.mktemp("refusing")) as started:
        yield started


@pytest.fixture
def server(tmp_path: Path, clock: FakeClock) -> Iterator[Running]:
    with running(tmp_path, clock) as started:
        yield started


def commit(server: Running, **records: Any) -> None:
    server.dispatcher.services.store.commit(Change(**records))


def get(server: Running, path: str, **query: Any) -> Any:
    answer = server.client.get(f"/api/v1/{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def bring(server: Running, text: str = TICKETS, form: str = "csv") -> httpx.Response:
    return server.client.post("/api/v1/tickets", json={"format": form, "text": text})


def a_hang_and_a_restart(server: Running) -> None:
    """Put two attempts on record, the first ended by a hang of n1 that is an hour ago."""
    first = attempt(0, -7_200, -3_600, end="failed", first_step=1, first_step_s=-7_100, last_step=9, last_step_s=-4_000)
    second = attempt(
        1, -3_500, -1_000, end="finished", first_step=9, first_step_s=-3_400, prior_step=9, caught_up_s=-3_300
    )
    done = attempt(
        1,
        -3_500,
        -1_000,
        end="finished",
        first_step=9,
        first_step_s=-3_400,
        prior_step=9,
        caught_up_s=-3_300,
        last_step=90,
        last_step_s=-1_000,
    )
    hang = incident(
        onset_s=NOW - 4_000, detected_s=NOW - 3_950, seen_s=NOW - 3_600, ended_s=NOW - 3_500, state="recovered"
    )
    commit(server, attempts=(first, second), incidents=(hang,))
    commit(server, attempts=(done,))


def test_goodput_by_job_says_where_the_time_went_and_because_of_what(server: Running) -> None:
    a_hang_and_a_restart(server)
    reported = get(server, "goodput")
    (job,) = reported["items"]
    assert (job["job"], job["attempts"], job["wall"]["seconds"]) == ("job", 2, 6_200)
    assert job["ettr_ratio"] == pytest.approx((3_100 + 2_300) / 6_200)
    assert {part: amount["seconds"] for part, amount in job["lost"].items()} == {
        "startup": 200,
        "stopped": 400,
        "down": 100,
        "redone": 100,
    }
    assert job["causes"][0] == {
        "part": "stopped",
        "fault": "hang",
        "node": "n1",
        "incident_id": "inc_1",
        "seconds": 400,
        "gpu_seconds": 3_200,
        "seconds_without_gpu_count": 0,
    }


def test_goodput_by_node_and_fault_holds_the_same_sum(server: Running) -> None:
    a_hang_and_a_restart(server)
    by_node = {item["node"]: item["gpu_seconds"] for item in get(server, "goodput", by="node")["items"]}
    by_fault = {item["fault"]: item["gpu_seconds"] for item in get(server, "goodput", by="fault")["items"]}
    assert by_node == {"n1": 8 * 700, None: 8 * 100}
    assert by_fault == {"hang": 8 * 700, "start": 8 * 100}


def test_goodput_counts_only_the_time_that_was_asked_for(server: Running) -> None:
    a_hang_and_a_restart(server)
    reported = get(server, "goodput", since=str(NOW - 4_000), until=str(NOW - 3_500))
    assert reported["total"]["wall"]["seconds"] == 500
    assert reported["total"]["ettr_ratio"] == 0
    assert get(server, "goodput", job="other")["items"] == []


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("goodput?since=yesterday", "time"),
        ("goodput?since=2000000000", "time"),
        ("goodput?by=colour", "parameter"),
        ("ledger?since=x", "time"),
        ("ledger?cursor=x", "cursor"),
        ("ledger?standing=maybe", "parameter"),
        ("ledger/steps?since=x", "time"),
    ],
)
def test_what_makes_no_sense_is_refused(refusing: Running, path: str, reason: str) -> None:
    answer = refusing.client.get(f"/api/v1/{path}")
    assert (answer.status_code, answer.json()["reason"]) == (400, reason)


def test_the_ledger_sets_each_claim_against_what_followed(server: Running, clock: FakeClock) -> None:
    commit(
        server,
        nodes=(known(),),
        incidents=(incident(detectors=["hang", "straggler"]),),
        actions=(
            action("act_1", "would_act"),
            action("act_2", "would_act", exclude=["n2"], node="n2"),
            action("act_3"),
        ),
    )
    assert bring(server).status_code == 200
    reported = get(server, "ledger")
    stood = {item["action_id"]: (item["standing"], item["why"]) for item in reported["items"]}
    assert stood == {"act_1": ("right", "ticket"), "act_2": ("pending", "waiting")}
    clock.advance(reported["window_seconds"] + 1)
    reported = get(server, "ledger")
    assert [reported["total"][key] for key in ("right", "wrong", "pending", "cannot_tell", "precision")] == [
        1,
        0,
        0,
        1,
        1.0,
    ]
    assert set(reported["by_fault"]) == {"hang"}
    assert set(reported["by_detector"]) == {"hang", "straggler"}
    assert reported["total"]["interval_95"][0] == pytest.approx(0.2065, abs=1e-4)


def test_the_ledger_is_read_page_by_page(server: Running) -> None:
    commit(server, actions=tuple(action(f"act_{n}", "would_act", created_s=NOW + n) for n in range(5)))
    first = get(server, "ledger", limit=3)
    second = get(server, "ledger", limit=3, cursor=first["next"])
    assert [item["action_id"] for item in first["items"] + second["items"]] == [f"act_{n}" for n in (4, 3, 2, 1, 0)]
    assert second["next"] is None


def test_tickets_are_imported_once_however_often(server: Running) -> None:
    commit(server, nodes=(known(),))
    first, again = bring(server).json(), bring(server).json()
    assert [first[key] for key in ("new", "changed", "unchanged")] == [1, 0, 0]
    assert [again[key] for key in ("new", "changed", "unchanged")] == [0, 0, 1]
    closed = TICKETS.replace("Z,,", "Z,2023-11-15T00:00:00Z,") + "T-2,n9,1700000000,,\n"
    reported = bring(server, closed).json()
    assert [reported[key] for key in ("new", "changed", "unchanged", "unknown_nodes")] == [1, 1, 0, ["n9"]]
    assert [(t["id"], t["closed"]) for t in get(server, "tickets", node="n1")["items"]] == [
        ("T-1", "2023-11-15T00:00:00.000Z")
    ]


def test_a_file_with_a_wrong_line_is_refused_whole(server: Running) -> None:
    answer = bring(server, TICKETS + "T-2,n1,soon,,\n")
    assert (answer.status_code, answer.json()["reason"]) == (400, "ticket")
    assert answer.json()["detail"].startswith("line 3, column opened: expected an RFC 3339 time")
    assert get(server, "tickets")["items"] == []


def test_a_nodes_history_holds_all_kinds_of_chapters_newest_first(server: Running) -> None:
    commit(
        server,
        nodes=(known(),),
        incidents=(incident(detected_s=NOW + 1), incident("inc_2", nodes=["n2"], node="n2")),
        actions=(action("act_1", "would_act", created_s=NOW + 2),),
        audit=(AuditEntry(time_s=NOW + 3, who="tok_1", verb="drain", subject="n1", detail="fan"),),
        gpus=(
            Gpu(
                uuid="GPU-1",
                node="n2",
                device=1,
                model="H100",
                since_s=NOW + 5,
                first_seen_s=NOW + 4,
                seen_s=NOW + 5,
                moves=[Seat("n1", 0, NOW + 4, NOW + 5)],
            ),
        ),
        driver_errors=(
            DriverError(
                id="e", node="n1", device=0, uuid="GPU-1", kind="xid", code=79, count=2, first_s=NOW, last_s=NOW + 6
            ),
        ),
    )
    reported = get(server, "nodes/n1/history", limit=4)
    rest = get(server, "nodes/n1/history", limit=4, cursor=reported["next"])
    assert [chapter["kind"] for chapter in reported["items"] + rest["items"]] == [
        "driver_error",
        "gpu",
        "gpu",
        "standing",
        "action",
        "incident",
    ]
    assert reported["items"][1]["summary"] == "GPU GPU-1 went to n2"
    assert rest["next"] is None
    assert (reported["gpus"], reported["cut"]) == ([], [])
    assert server.client.get("/api/v1/nodes/none/history").status_code == 404
    assert server.client.get("/api/v1/nodes/n1/history?cursor=x").json()["reason"] == "cursor"


def test_a_gpu_is_found_by_uuid_with_what_it_did_in_other_nodes(server: Running) -> None:
    moved = Gpu(
        uuid="GPU-1",
        node="n2",
        device=1,
        model="H100",
        since_s=NOW,
        first_seen_s=NOW - 100,
        seen_s=NOW,
        moves=[Seat("n1", 0, NOW - 100, NOW)],
    )
    commit(server, gpus=(moved,), incidents=(incident(onset_s=NOW - 50), incident("inc_2", onset_s=NOW + 50)))
    reported = get(server, "gpus/GPU-1")
    assert [found["id"] for found in reported["incidents"]] == ["inc_1"]  # by then it sat elsewhere
    assert [seat["node"] for seat in reported["moves"]] == ["n1"]
    assert [gpu["uuid"] for gpu in get(server, "gpus", node="n2")["items"]] == ["GPU-1"]
    assert server.client.get("/api/v1/gpus/GPU-9").status_code == 404


def test_what_was_compared_of_a_gpu_is_told_where_it_sits_now(server: Running) -> None:
    wrong = Comparison("chk_1", "n1", NOW - 50, 45.0, 4_000.0, 2.0)
    checks = compared(compared(None, "GPU-1", wrong), "GPU-1", Comparison("chk_2", "n2", NOW, 45.0, 4_000.0, 0.0))
    sits = Gpu(uuid="GPU-1", node="n2", device=1, model="H100", since_s=NOW, first_seen_s=NOW - 100, seen_s=NOW)
    new = Gpu(uuid="GPU-2", node="n2", device=2, model="H100", since_s=NOW, first_seen_s=NOW, seen_s=NOW)
    out = Node(node="n2", state="in_service", reason="", updated_s=NOW)
    commit(server, nodes=(out,), gpus=(sits, new), gpu_checks=(checks,))
    reported = get(server, "nodes/n2/history")
    (known,) = reported["gpu_checks"]
    assert (known["uuid"], known["checks"], known["operations"], known["wrong_numbers"]) == ("GPU-1", 2, 8_000.0, 2.0)
    said = [chapter["summary"] for chapter in reported["items"] if chapter["kind"] == "gpu_check"]
    assert said == ["GPU GPU-1 computed 2 wrong numbers on n1"]
    assert get(server, "gpus/GPU-1")["checks"] == known
    assert get(server, "gpus/GPU-2")["checks"] is None


def test_nodes_carry_their_incidents_and_recurrence_score_with_its_reasons(server: Running) -> None:
    three_failures(server.dispatcher.services.store)
    nodes = {item["node"]: item["memory"] for item in get(server, "nodes")["items"]}
    assert nodes["n1"]["incidents_30_days"] == 3
    assert nodes["n1"]["recurrent"]
    assert [signal["signal"] for signal in nodes["n1"]["recurrence_signals"]] == [
        "multi_node_failures",
        "excluding_jobs",
        "taken_out",
    ]
    assert (nodes["n2"]["recurrence_score"], nodes["n2"]["recurrent"]) == (0, False)
    assert nodes["young"]["recurrence_score"] is None
    assert nodes["young"]["recurrence_reason"].startswith("known for 1.0 days")
    assert server.metric("node_recurrence_score", node="n1") == pytest.approx(nodes["n1"]["recurrence_score"], abs=1e-3)
    assert server.metric("node_recurrence_score", node="n2") == 0.0


def test_the_former_names_of_the_recurrence_score_keep_working(server: Running) -> None:
    three_failures(server.dispatcher.services.store)
    memory = get(server, "nodes/n1")["memory"]
    for former, name in {
        "lemon": "recurrent",
        "lemon_score": "recurrence_score",
        "lemon_reason": "recurrence_reason",
        "lemon_signals": "recurrence_signals",
    }.items():
        assert memory[former] == memory[name]
    assert memory["lemon"]
    columns = server.client.get("/api/v1/fleet/nodes", params={"details": True}).json()
    assert columns["lemon_score"] == columns["recurrence_score"]
    assert memory["lemon_score"] in columns["lemon_score"]
    assert server.metric("node_lemon_score", node="n1") == server.metric("node_recurrence_score", node="n1") > 0


def test_agents_events_become_gpus_and_errors_and_jobs_become_attempts(server: Running, clock: FakeClock) -> None:
    server.send(body(frame(events=[Event(NOW, "inventory", 0, {"uuid": "GPU-1", "model": "H100"})])))
    server.dispatcher.services.bookkeeper.write_changes([], NOW)
    assert [gpu.node for gpu in server.dispatcher.services.store.all(GPUS)] == ["n1"]


def test_goodput_of_jobs_that_go_on_is_on_metrics(server: Running, clock: FakeClock) -> None:
    going = attempt(0, -1_000, first_step=1, first_step_s=-900, last_step=9, last_step_s=-10, seen_s=0)
    commit(server, attempts=(going,))
    assert server.metric("job_goodput_ratio", job="job") == pytest.approx(0.9)
    assert server.metric("job_effective_training_ratio", job="job") == pytest.approx(0.9)
    assert server.metric("job_lost_gpu_seconds", job="job", part="startup", fault="start") == pytest.approx(800)


def test_memberships_tell_whether_the_job_went_on_without_the_node(server: Running, clock: FakeClock) -> None:
    first = attempt(0, -100, 100, last_step=9, last_step_s=90)
    second = attempt(1, 110, seen_s=200)
    commit(
        server,
        actions=(action("act_1", "would_act", fault="straggler"),),
        attempts=(first, second),
        memberships=(AttemptMembers(id="att_1", job="job", started_s=NOW + 110, nodes=["n2", "n3"]),),
    )
    clock.advance(2 * 86_400 + 1)
    (claim,) = get(server, "ledger")["items"]
    assert (claim["standing"], claim["why"]) == ("cannot_tell", "left_out")
    assert claim["detail"] == "attempt 1 of job went on without n1"


def test_the_steps_set_each_faults_decisions_beside_its_mode(server: Running, clock: FakeClock) -> None:
    said = [RuleWord("mode", "hold", "approve mode", {"mode": "approve"})]
    commit(
        server,
        nodes=(known(),),
        incidents=(incident(), incident("inc_2", state="false"), incident("inc_3")),
        actions=(
            action("act_1", "would_act"),
            action("act_2", "done", incident_id="inc_2"),
            action("act_3", "done", incident_id="inc_3", policy=said),
            action("act_4", "expired", incident_id="inc_3"),
            action("act_5", "would_act", incident_id="inc_4", kind="checkpoint_now"),
        ),
        attempts=(attempt(0, -100, seen_s=3 * 86_400),),
    )
    assert bring(server).status_code == 200
    server.watcher.use_policy(PolicySettings(mode="approve"))
    clock.advance(2 * 86_400 + 1)
    reported = get(server, "ledger/steps")
    hang = next(item for item in reported["items"] if item["fault"] == "hang")
    assert [hang[key] for key in ("mode", "next", "where")] == ["approve", "act", "policy.mode"]
    assert [hang[key] for key in ("right", "wrong", "pending", "cannot_tell", "approved")] == [2, 1, 0, 0, 1]
    assert hang["precision"] == pytest.approx(2 / 3)
    assert (hang["verdict"], hang["detail"]) == ("cannot_tell", "3 decisions with a known outcome, 10 needed")
    assert hang["cost"] == {"gpu_seconds": None, "cannot_tell": 0}
    assert hang["toml"] == '[[policy.modes]]\nfaults = ["hang"]\nmode = "act"'
    assert {item["right"] + item["wrong"] for item in reported["items"] if item["fault"] != "hang"} == {0}
    (only,) = get(server, "ledger/steps", fault="hang")["items"]
    assert only == hang
    assert get(server, "ledger/steps", fault="hang", since=str(NOW + 1))["items"][0]["right"] == 0
