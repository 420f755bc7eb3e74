"""Active checks at the server: asked of agents, answered once, and what they do to a node's return."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.agent.clock import SystemClock
from eagle_eye.server.requests.node_checks import ASKED_S, LATE_S
from eagle_eye.server.security.auth import mint
from eagle_eye.server.store.store import Change
from tests.server.builders import NOW, FakeClock, Running, action, running
from tests.server.checked_nodes import PASSED, Site, report

RUN = "a1" * 16

_NAMES = itertools.count(1)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, FakeClock]]:
    clock = FakeClock()
    with running(tmp_path_factory.mktemp("server"), clock) as started:
        yield started, clock


@pytest.fixture
def site(shared: tuple[Running, FakeClock]) -> Site:
    return Site(*shared, f"n{next(_NAMES)}")


def test_a_node_that_a_fault_took_out_returns_once_its_check_has_passed(site: Site) -> None:
    id_ = site.checking()
    assert site.shown()["phase"] == "checking"
    (asked,) = site.hear()["requests"]
    assert asked == {
        "id": id_,
        "kind": "node_check",
        "deadline_s": 300.0,
        "checks": ["gemm", "memory", "gpu_facts", "dcgm"],
        "gemm_s": 0.0,
    }
    assert site.tell(id_, "begun", run=RUN).json()["state"] == "running"
    assert site.tell(id_, report=report("gemm", "gpu_facts")).json()["state"] == "healthy"
    node = site.shown()
    assert (node["phase"], node["fault"], node["check_id"]) == ("watched", "gpu_lost", "")
    assert site.announced() == ["eagle_eye.node.readmitted"]
    expected = [("local", "readmit after check"), ("server", "check healthy"), ("local", "readmit")]
    assert site.audit() == expected
    assert "requests" not in site.hear()


@pytest.mark.parametrize(
    ("reported", "state", "why"),
    [
        ({"report": report(verdict="sick", reason="gemm")}, "sick", "gemm"),
        ({"report": report(verdict="cannot_tell", reason="could not check gemm")}, "cannot_tell", "could not"),
        ({"report": report("disk")}, "cannot_tell", "says nothing of gpu_lost"),
        ({"state": "refused", "detail": "rank 3 trains here"}, "cannot_tell", "rank 3 trains here"),
    ],
)
def test_any_other_answer_leaves_the_node_out_and_says_why(
    site: Site, reported: dict[str, Any], state: str, why: str
) -> None:
    id_ = site.checking()
    answered = site.tell(id_, **reported).json()
    assert (answered["state"], why in answered["detail"]) == (state, True)
    node = site.shown()
    assert (node["phase"], node["reason"]) == ("excluded", "gpu_lost: inc_1")
    assert site.announced() == []
    assert site.server.metric("node_checks_total", state=state) >= 1.0


def test_a_return_that_is_asked_for_again_waits_for_the_same_check(site: Site) -> None:
    id_ = site.checking()
    assert [site.readmit().json()["check_id"] for _ in range(2)] == [id_, id_]
    assert len(site.checks()) == 1
    assert site.audit() == [("local", "readmit after check")]


def test_force_does_not_wait_for_the_check_which_then_changes_nothing(site: Site) -> None:
    id_ = site.checking()
    assert site.readmit(force=True).status_code == 200
    assert site.tell(id_, report=report(verdict="sick")).json()["state"] == "sick"
    assert site.shown()["state"] == "in_service"


def test_whoever_takes_the_node_out_meanwhile_is_heeded(site: Site) -> None:
    id_ = site.checking()
    site.server.client.post(f"/api/v1/nodes/{site.node}/drain", params={"reason": "new power supply"})
    assert site.tell(id_, report=report("gemm", "gpu_facts")).json()["state"] == "healthy"
    node = site.shown()
    assert (node["state"], node["reason"]) == ("draining", "new power supply")
    assert site.announced() == []


def test_a_report_of_what_we_drained_does_not_touch_what_somebody_drained_anew(site: Site) -> None:
    site.out(state="draining", by="tok_alice", reason="new power supply", fault="")
    site.store.commit(Change(actions=(action(exclude=[site.node]),)))
    answered = site.server.client.post("/api/v1/actions/act_1/reports", json={"state": "done"})
    assert answered.status_code == 200
    node = site.shown()
    assert (node["state"], node["reason"], node["by"]) == ("draining", "new power supply", "tok_alice")


@pytest.mark.parametrize(
    ("says", "silent_s", "query", "refused"),
    [
        ("", 0.0, {}, ""),
        ("", 0.0, {"check": True}, "node_check_command"),
        ("ok", 60.0, {}, "was not heard for 60 s"),
        ("failed: no memory", 0.0, {}, "failed: no memory"),
    ],
)
def test_an_agent_that_cannot_be_asked_is_no_verdict(
    site: Site, says: str, silent_s: float, query: dict[str, Any], refused: str
) -> None:
    site.out()
    site.hear(says=says)
    site.wait(silent_s)
    answered = site.readmit(**query)
    if refused:
        assert (answered.status_code, answered.json()["reason"]) == (409, "cannot_check")
        assert refused in answered.json()["detail"]
        assert site.readmit(force=True).json()["state"] == "in_service"
    else:
        assert answered.json()["state"] == "in_service"
        assert answered.json()["reason"].startswith("readmitted without a check: no agent of it makes checks")


def test_a_suspect_of_silent_corruption_returns_by_hand_alone(site: Site) -> None:
    site.out(fault="silent_data_corruption")
    site.hear()
    assert [site.readmit(**query).json()["reason"] for query in ({}, {"force": True})] == ["by_hand", "reason"]
    looked = site.look().json()
    assert site.tell(looked["id"], report=report("gemm", "memory", "gpu_facts")).json()["state"] == "healthy"
    assert site.readmit().json()["reason"] == "by_hand"
    said = "GPU 3 replaced; readmitted without a check: forced by local"
    assert site.readmit(force=True, reason="GPU 3 replaced").json()["reason"] == said


def test_what_is_not_taken_up_or_not_ended_in_time_cannot_be_told(site: Site) -> None:
    id_ = site.checking()
    checks = site.server.dispatcher.services.node_checks
    site.wait(ASKED_S - 1)
    checks.sweep()
    assert site.tell(id_, "begun", run=RUN).json()["state"] == "running"
    site.wait(300 + LATE_S - 1)
    checks.sweep()
    assert site.check(id_)["state"] == "running"
    site.wait(2)
    checks.sweep()
    record = site.check(id_)
    assert (record["state"], "may have died" in record["detail"]) == ("cannot_tell", True)
    assert site.shown()["phase"] == "excluded"
    assert site.tell(id_, report=report("gemm", "gpu_facts")).json()["state"] == "cannot_tell"
    assert "requests" not in site.hear()


def test_a_check_is_begun_once_and_another_run_tells_that_the_first_has_died(site: Site) -> None:
    id_ = site.checking()
    assert [site.tell(id_, "begun", run=RUN).status_code for _ in range(2)] == [200, 200]
    assert [asked["id"] for asked in site.hear()["requests"]] == [id_]
    assert site.tell(id_, "begun", run="b2" * 16).status_code == 409
    record = site.check(id_)
    assert (record["state"], "restarted" in record["detail"]) == ("cannot_tell", True)
    assert site.tell(id_, "begun", run=RUN).status_code == 409
    assert "run" not in record


def test_a_look_touches_no_standing_and_only_one_check_runs(site: Site) -> None:
    site.hear()
    first = site.look(reason="odd noise")
    assert (first.status_code, first.json()["purpose"]) == (202, "look")
    assert site.look().json() == first.json()
    site.out()
    assert (site.readmit().status_code, site.readmit().json()["reason"]) == (409, "busy")
    site.tell(first.json()["id"], report=report(verdict="sick", reason="gemm"))
    (listed,) = site.checks()
    assert (listed["state"], listed["outcomes"]) == ("sick", [])
    assert site.audit() == [("local", "check"), ("server", "check sick")]


def test_a_person_may_ask_for_the_search_for_silent_corruption(site: Site) -> None:
    site.hear()
    id_ = site.look(sdc_seconds=90).json()["id"]
    (asked,) = site.hear()["requests"]
    expected = {"checks": ["sdc_gemm", "sdc_all_reduce"], "gemm_s": 0.0, "sdc_s": 90.0, "deadline_s": 210.0}
    assert asked == {"id": id_, "kind": "node_check", **expected}
    assert site.look(sdc_seconds=90).json()["id"] == site.look().json()["id"] == id_
    assert site.tell(id_, report=report("gemm")).json()["state"] == "cannot_tell"


def test_a_search_waits_for_a_check_of_another_kind(site: Site) -> None:
    site.hear()
    first = site.look().json()["id"]
    refused = site.look(sdc_seconds=60)
    assert (refused.status_code, refused.json()["reason"]) == (409, "busy")
    site.tell(first, report=report("gemm", "gpu_facts"))
    assert site.look(sdc_seconds=60).json()["fault"] == "silent_data_corruption"


@pytest.mark.parametrize("seconds", ["-1", "601", "nan", "x"])
def test_a_search_has_a_limit(site: Site, seconds: str) -> None:
    site.hear()
    assert site.look(sdc_seconds=seconds).status_code == 400


def test_a_reason_has_a_limit(site: Site) -> None:
    site.hear()
    assert site.look(reason="x" * 1_001).status_code == 400
    assert site.look(reason="x" * 1_000).status_code == 202


def test_only_the_nodes_own_agent_answers(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        id_ = Site(server, SystemClock()).checking()
        tokens = [mint("agent", "n1", NOW, None), mint("agent", "n2", NOW, None), mint("operate", None, NOW, None)]
        server.dispatcher.services.store.commit(Change(tokens=tuple(record for _, record in tokens)))
        word = {"state": "refused", "detail": "busy"}
        own, other, person = (
            server.client.put(f"/api/v1/node-checks/{id_}", json=word, headers={"Authorization": f"Bearer {text}"})
            for text, _ in tokens
        )
        assert (own.status_code, other.status_code, person.status_code) == (200, 403, 403)


SPOILED = (
    (b"{}", 400),
    (b'{"state":"done"}', 400),
    (b'{"state":"begun","run":"short"}', 400),
    (b'{"state":"done","report":{"verdict":"splendid"}}', 400),
    (b'{"state":"done","report":{"verdict":"healthy","checks":[{"name":"x","state":"odd"}]}}', 400),
    (b'{"state":"refused","detail":"' + b"x" * (300 << 10) + b'"}', 413),
    (b"[" * 10_000, 400),
)


def test_what_an_agent_says_is_not_trusted(site: Site) -> None:
    id_ = site.checking()
    for content, status in SPOILED:
        answered = site.server.client.put(f"/api/v1/node-checks/{id_}", content=content)
        assert (answered.status_code, content[:60]) == (status, content[:60])
    assert site.check(id_)["state"] == "asked"


def test_a_report_is_kept_within_limits(site: Site) -> None:
    id_ = site.checking()
    figure = {"name": "n" * 100, "value": None, "unit": "1", "device": "gpu\x1b 3", "threshold": 1.0, "source": ""}
    check = {**PASSED, "reason": "r" * 5_000, "values": [figure] * 300}
    site.tell(id_, report={"verdict": "sick", "reason": "\x1b[2J" + "s" * 5_000, "checks": [check] * 2})
    record = site.check(id_)
    (first, _) = record["outcomes"]
    assert len(first["values"]) == 256
    assert (len(first["reason"]), len(first["values"][0]["name"])) == (300, 80)
    assert "\x1b" not in json.dumps(record, ensure_ascii=False)
    assert len(record["detail"]) <= 300


def test_old_reports_go_and_what_came_of_them_stays(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_eye.server.requests.node_checks.REPORTS_KEPT", 2)
    site.hear()
    for _ in range(4):
        site.tell(site.look().json()["id"], report=report("gemm"))
    items = site.checks()
    assert [bool(item["outcomes"]) for item in items] == [True, True, False, False]
    assert {item["state"] for item in items} == {"healthy"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/v1/nodes/none/checks"),
        ("POST", "/api/v1/nodes/none/check"),
        ("GET", "/api/v1/node-checks/none"),
        ("PUT", "/api/v1/node-checks/none"),
        ("POST", "/api/v1/nodes/none/readmit"),
    ],
)
def test_what_is_not_there_is_said(site: Site, method: str, path: str) -> None:
    answered = site.server.client.request(method, path)
    assert (answered.status_code, answered.json()["reason"]) == (404, "not_found")
