"""NVRx's attribution endpoint: our incidents as its launcher reads them."""

from __future__ import annotations

import base64
from typing import Any

from eagle_eye.server.api.nvrx import LOGS_MAX, Submitted, SubmittedLogs, attribute, body
from eagle_eye.server.model.records import Token
from eagle_eye.server.security.auth import sha256
from eagle_eye.server.store.store import Change
from tests.server.builders import NOW, incident, running

LOG = "/lustre/job/train_cycle3.log"
FAILED = Submitted("llm", NOW, NOW + 100.0)


def of(*found: Any, log: Submitted | None = FAILED, blind: str = "", after_s: float = 110.0) -> tuple[bool, str, str]:
    said = attribute(log, found, blind, NOW + after_s)
    return said.final, said.action, said.reason


def found(id_: str = "inc_1", **more: Any) -> Any:
    return incident(
        id_, **{"job": "llm", "detected_s": NOW + 95.0, "fault": "gpu_lost", "action": "exclude_node", **more}
    )


def test_a_cycle_that_a_node_has_ended_may_be_restarted_and_the_node_is_named() -> None:
    final, action, reason = of(found(summary="XID 79"))
    assert (final, action) == (True, "RESTART")
    assert reason == "gpu_lost on n1: XID 79; exclude_node is asked for"


def test_a_program_that_fails_again_is_to_be_stopped_and_one_that_failed_once_is_not() -> None:
    crash: dict[str, Any] = {"fault": "process_crash", "application": True, "action": "restart_job"}
    earlier = found("inc_0", detected_s=NOW - 600.0, **crash)
    assert of(found(**crash))[1] == "RESTART"
    assert of(earlier, found(**crash))[1] == "STOP"
    assert of(found("inc_0", detected_s=NOW - 7_200.0, **crash), found(**crash))[1] == "RESTART"
    # The node is to blame this time: what the program did before is no reason.
    assert of(earlier, found())[1] == "RESTART"


def test_nothing_found_is_waited_for_and_then_unknown() -> None:
    assert of(after_s=110.0)[:2] == (False, "UNKNOWN")
    assert of(after_s=131.0)[:2] == (True, "UNKNOWN")


def test_a_cycle_that_is_not_known_to_have_failed_has_no_verdict() -> None:
    assert of(log=Submitted("llm", NOW), after_s=9_999.0)[:2] == (False, "UNKNOWN")


def test_incidents_of_other_jobs_earlier_cycles_and_false_ones_explain_nothing() -> None:
    others = [found(job="x"), found(detected_s=NOW - 61.0), found(state="false"), found(merged_into="inc_9")]
    assert of(*others, found(action="none"), after_s=131.0)[1] == "UNKNOWN"


def test_a_blind_server_cannot_tell() -> None:
    final, action, reason = of(blind="agents: none is heard")
    assert (final, action, reason) == (True, "UNKNOWN", "cannot tell: agents: none is heard")


def test_a_log_that_is_not_known_frees_the_launcher_from_asking_on() -> None:
    assert of(log=None)[:2] == (True, "UNKNOWN")
    assert of(log=Submitted("", NOW, NOW))[:2] == (True, "UNKNOWN")


def test_logs_are_forgotten_beyond_the_limit_the_oldest_first() -> None:
    logs = SubmittedLogs()
    for number in range(LOGS_MAX + 1):
        logs.submit(f"/log{number}", "j", NOW, failed=False)
    assert logs.get("/log0") is None
    assert logs.get("/log1") is not None


def test_the_answer_has_what_nvrx_reads() -> None:
    answer = body(LOG, attribute(FAILED, [found()], "", NOW + 110.0))
    assert answer["status"] == "completed"
    assert answer["recommendation"]["action"] == "RESTART"
    assert (answer["result"]["module"], answer["result"]["result_id"]) == ("eagle_eye", "inc_1")


def test_over_http_a_failed_cycle_gets_its_incident(tmp_path: Any) -> None:
    with running(tmp_path) as server:
        said = {"log_path": LOG, "job_id": "4711", "user": "ada", "analysis_intent": "progressive"}
        assert server.client.post("/api/v1/nvrx/logs", json=said).json()["submitted"] is True
        assert server.client.post("/api/v1/nvrx/logs", json={**said, "analysis_intent": "terminal"}).status_code == 200
        now_s = server.dispatcher.services.clock.now_s()
        mine = found(job="4711", detected_s=now_s)
        server.dispatcher.services.store.commit(Change(incidents=(mine,)))
        answer = server.client.get("/api/v1/nvrx/logs", params={"log_path": LOG, "wait": "false"}).json()
        assert (answer["status"], answer["recommendation"]["action"]) == ("completed", "RESTART")
        # The job in the endpoint, where the launcher knows no number of Slurm's.
        server.client.post("/api/v1/nvrx/4711/logs", json={"log_path": "/b", "analysis_intent": "terminal"})
        answer = server.client.get("/api/v1/nvrx/4711/logs", params={"log_path": "/b"}).json()
        assert answer["result"]["result_id"] == mine.id
        assert server.client.post("/api/v1/nvrx/logs", json={"log_path": ""}).status_code == 400


def test_a_token_may_come_as_the_password_of_the_endpoint(tmp_path: Any) -> None:
    with running(tmp_path) as server:
        text = "ee_reader"
        token = Token(id="t1", sha256=sha256(text), scope="read", node=None, created_s=NOW)
        server.dispatcher.services.store.commit(Change(tokens=(token,)))

        def status(password: str, path: str = "/api/v1/nvrx/logs") -> int:
            credentials = base64.b64encode(f"nvrx:{password}".encode()).decode()
            headers = {"authorization": f"Basic {credentials}"}
            return server.client.get(path, headers=headers, params={"log_path": LOG}).status_code

        assert status(text) == 200
        assert status("ee_other") == status("") == 401
        assert status(text, "/api/v1/jobs") == 401
