from __future__ import annotations

import contextlib
import json
import queue
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_eye.orchestrators import receiver as receiving
from eagle_eye.orchestrators.ledger import Ledger
from eagle_eye.orchestrators.protocol import CannotCarryOutError, JobState, OrchestratorError
from eagle_eye.orchestrators.receiver import Readmission, Receiver, Resumption, WebhookIntake, listen_on, url_of
from eagle_eye.schema.action import (
    ACTION_WITHDRAWN,
    HEARTBEAT,
    INCIDENT_OPENED,
    NODE_READMITTED,
    PING,
    ActionRequest,
    Report,
    ReportState,
)
from tests.orchestrators.builders import SECRET, action, deliver, event_body, rfc3339, signed_headers

OTHER_SECRET = "whsec_b3RoZXItb3RoZXItb3RoZXItb3RoZXItb3RoZXI="


class Endpoint:
    """A receiver on loopback for job j at attempt 1 with nodes n1 to n3."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reports: list[tuple[str, ReportState, str]] = []
        self.job = JobState(1, frozenset({"n1", "n2", "n3"}), running=True)
        self.secrets = [SECRET]
        self._open()

    def _open(self) -> None:
        self.ledger = Ledger(self.folder / "ledger.sqlite")
        self.intake = WebhookIntake(
            self.ledger, lambda job: self.job if job == "j" else None, self._report, lambda: self.secrets
        )
        self.socket = listen_on("127.0.0.1", 0)
        self.url = url_of(self.socket)
        self.receiver = Receiver(self.intake, self.socket)
        self.receiver.start()

    def _report(self, action: ActionRequest, state: ReportState, detail: str) -> None:
        self.reports.append((action.action_id, state, detail))

    def reopen(self) -> None:
        self.close()
        self._open()

    def close(self) -> None:
        self.receiver.stop()
        self.socket.close()
        self.ledger.close()

    def send(self, body: bytes, event_id: str = "evt-1", **changed: str) -> httpx.Response:
        headers = signed_headers(body, time.time(), event_id)
        return deliver(self.url, body, {**headers, **{name.replace("_", "-"): v for name, v in changed.items()}})

    def queued(self) -> list[Any]:
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self.intake.work.get_nowait())
        return found


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    made = Endpoint(tmp_path)
    yield made
    made.close()


def assert_problem(answer: httpx.Response, status: int, reason: str) -> None:
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert answer.json()["reason"] == reason


def test_a_signed_action_is_recorded_accepted_and_queued(endpoint: Endpoint) -> None:
    wanted = action(time.time())
    assert endpoint.send(event_body(wanted)).status_code == 202
    assert endpoint.queued() == [wanted]
    assert endpoint.reports == [("act-1", "accepted", "")]
    assert endpoint.ledger.state_of("act-1") == "queued"


def test_a_wrong_or_missing_signature_is_401_and_changes_nothing(endpoint: Endpoint) -> None:
    body = event_body(action(time.time()))
    now_s = time.time()
    for headers in (
        signed_headers(body, now_s, secret=OTHER_SECRET),
        signed_headers(body + b" ", now_s),
        signed_headers(body, now_s - 600),
        signed_headers(body, now_s + 600),
        {**signed_headers(body, now_s), "webhook-id": "evt-2"},
        {**signed_headers(body, now_s), "webhook-signature": "v1"},
        {**signed_headers(body, now_s), "webhook-signature": "v1,%%%"},
        {**signed_headers(body, now_s), "webhook-timestamp": "soon"},
        {"content-type": "application/cloudevents+json"},
    ):
        assert_problem(deliver(endpoint.url, body, headers), 401, "bad-signature")
    assert (endpoint.queued(), endpoint.reports, endpoint.ledger.state_of("act-1")) == ([], [], None)


def test_during_a_rotation_both_secrets_count(endpoint: Endpoint) -> None:
    endpoint.secrets = [OTHER_SECRET, SECRET]
    body = event_body({}, PING)
    assert endpoint.send(body).status_code == 200
    headers = signed_headers(body, time.time(), "evt-2", OTHER_SECRET)
    assert deliver(endpoint.url, body, headers).status_code == 200
    endpoint.secrets = []
    assert_problem(endpoint.send(body, "evt-3"), 401, "bad-signature")


def test_a_repeated_delivery_and_a_repeated_action_are_done_once(endpoint: Endpoint) -> None:
    body = event_body(action(time.time()))
    assert [endpoint.send(body).json()["outcome"] for _ in range(3)] == ["queued", "known", "known"]
    assert endpoint.send(event_body(action(time.time()), event_id="evt-9"), "evt-9").json()["outcome"] == "known"
    assert len(endpoint.queued()) == 1
    assert endpoint.reports == [("act-1", "accepted", "")]


def test_an_action_that_the_server_did_not_know_is_taken_when_it_asks_for_it_anew(endpoint: Endpoint) -> None:
    endpoint.send(event_body(action(time.time(), epoch=3)))
    endpoint.queued()
    assert endpoint.ledger.let_go("act-1")
    anew = action(time.time(), epoch=4)
    assert endpoint.send(event_body(anew)).json()["outcome"] == "queued"
    assert endpoint.queued() == [anew]
    assert (endpoint.ledger.state_of("act-1"), endpoint.ledger.asked_as("act-1")) == ("queued", anew)


@pytest.mark.parametrize("event_id", ["evt-1", "evt-2"], ids=["same delivery", "another delivery"])
def test_asked_again_by_a_later_leader_it_says_again_what_became_of_the_action(
    endpoint: Endpoint, event_id: str
) -> None:
    endpoint.send(event_body(action(time.time(), epoch=3)))
    endpoint.ledger.owe("act-1", "/reports", Report("done", "excluded n2"), time.time())
    endpoint.reports.clear()
    assert endpoint.send(event_body(action(time.time(), epoch=4)), event_id).json()["outcome"] == "known"
    assert endpoint.reports == [("act-1", "done", "excluded n2")]


def test_idempotency_survives_a_restart_and_queued_actions_come_back(endpoint: Endpoint) -> None:
    body = event_body(action(time.time()))
    endpoint.send(body)
    endpoint.reopen()
    assert endpoint.send(body).json()["outcome"] == "known"
    assert endpoint.queued() == []
    endpoint.intake.resume()
    assert [one.action_id for one in endpoint.queued()] == ["act-1"]


@pytest.mark.parametrize("dies_in", ["record_action", "owe"])
def test_a_process_that_dies_as_it_takes_an_action_leaves_neither_report_nor_action(
    endpoint: Endpoint, dies_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: Any) -> None:
        raise SystemExit

    def owe(wanted: ActionRequest, state: ReportState, detail: str) -> None:
        endpoint.ledger.owe(wanted.action_id, "/reports", Report(state, detail), time.time() + 60)

    wanted = action(time.time())
    monkeypatch.setattr(endpoint.intake, "report", owe)
    monkeypatch.setattr(endpoint.ledger, dies_in, dies)
    with pytest.raises(SystemExit):
        endpoint.intake.store_event("evt-1", event_body(wanted))
    monkeypatch.undo()
    endpoint.reopen()
    assert (endpoint.ledger.owed(), endpoint.ledger.state_of("act-1")) == ([], None)
    assert not endpoint.ledger.seen("evt-1")


def test_what_was_begun_comes_back_first_with_how_far_it_had_come(endpoint: Endpoint) -> None:
    first, second = action(time.time()), action(time.time(), action_id="act-2")
    endpoint.send(event_body(first))
    endpoint.send(event_body(second), "evt-2")
    assert endpoint.ledger.begin("act-2")
    endpoint.ledger.mark("act-2", "restarting")
    endpoint.reopen()
    endpoint.intake.resume()
    assert endpoint.queued() == [Resumption(second, "restarting"), first]


@pytest.mark.parametrize("trouble", [CannotCarryOutError("slurmctld does not answer"), RuntimeError("a fault of ours")])
def test_how_a_job_is_being_untellable_is_no_reason_to_refuse(endpoint: Endpoint, trouble: Exception) -> None:
    def nobody_knows(_job: str) -> JobState | None:
        raise trouble

    endpoint.intake.job_state = nobody_knows
    assert endpoint.send(event_body(action(time.time()))).json()["outcome"] == "queued"
    assert endpoint.reports == [("act-1", "accepted", "")]


def test_a_node_without_a_job_is_left_to_whoever_keeps_it_and_not_refused(endpoint: Endpoint) -> None:
    drain = action(time.time(), job="", attempt=0, kind="drain_node", restart=False)
    assert endpoint.send(event_body(drain)).json()["outcome"] == "not ours"
    assert (endpoint.queued(), endpoint.reports) == ([], [])
    assert endpoint.send(event_body(drain)).json()["outcome"] == "known"
    endpoint.intake.job_state = lambda job: JobState(0, frozenset({"n2"}), running=False)
    assert endpoint.send(event_body(drain), "evt-2").json()["outcome"] == "queued"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attempt": 0}, "asked for attempt 0; the job is at attempt 1"),
        ({"expires": "2020-01-01T00:00:00Z"}, "expired at 2020"),
        ({"job": "other"}, "not run here"),
        ({"exclude": ["n2", "$(reboot)"]}, "unknown nodes: '$(reboot)'"),
        ({"exclude": []}, "names no node"),
    ],
)
def test_what_may_not_be_done_is_refused_with_the_reason(
    endpoint: Endpoint, changes: dict[str, Any], words: str
) -> None:
    answer = endpoint.send(event_body(action(time.time(), **changes)))
    assert (answer.status_code, answer.json()["outcome"]) == (200, "refused")
    assert endpoint.queued() == []
    (_, state, detail) = endpoint.reports[0]
    assert state == "refused"
    assert words in detail


@pytest.mark.parametrize(
    "late",
    [
        event_body(action(time.time(), epoch=2)),
        event_body({"node": "n2", "epoch": 2}, NODE_READMITTED),
        event_body({"epoch": 2}, PING),
    ],
    ids=["action", "readmission", "ping"],
)
def test_what_comes_with_a_lower_epoch_is_refused_with_the_highest_also_by_the_next_process(
    endpoint: Endpoint, late: bytes
) -> None:
    endpoint.send(event_body({"epoch": 3}, HEARTBEAT, "evt-0"), "evt-0")
    endpoint.reopen()
    answer = endpoint.send(late)
    assert_problem(answer, 409, "epoch")
    assert answer.headers["eagle-eye-epoch"] == "3"
    assert (endpoint.queued(), endpoint.reports) == ([], [])


def test_what_was_refused_for_its_epoch_is_taken_once_it_comes_with_a_higher_one(endpoint: Endpoint) -> None:
    endpoint.send(event_body({"epoch": 3}, HEARTBEAT, "evt-0"), "evt-0")
    assert endpoint.send(event_body(action(time.time(), epoch=2))).status_code == 409
    assert endpoint.send(event_body(action(time.time(), epoch=4))).status_code == 202
    assert [one.epoch for one in endpoint.queued()] == [4]


def test_a_withdrawal_counts_whatever_its_epoch(endpoint: Endpoint) -> None:
    endpoint.send(event_body(action(time.time(), epoch=3)))
    withdrawal = event_body({"action_id": "act-1", "epoch": 2}, ACTION_WITHDRAWN, "evt-2")
    assert endpoint.send(withdrawal, "evt-2").json()["outcome"] == "cancelled"


@pytest.mark.parametrize("epoch", [3, 4, 0], ids=["the same", "a higher", "of a server alone"])
def test_an_action_of_who_leads_is_queued(endpoint: Endpoint, epoch: int) -> None:
    endpoint.send(event_body({"epoch": 3}, PING))
    endpoint.send(event_body(action(time.time(), epoch=epoch), event_id="evt-2"), "evt-2")
    assert [one.action_id for one in endpoint.queued()] == ["act-1"]


@pytest.mark.parametrize("epoch", [-1, 1 << 70, "3", None], ids=str)
def test_an_epoch_that_is_none_counts_as_none(endpoint: Endpoint, epoch: object) -> None:
    endpoint.send(event_body({"epoch": epoch}, HEARTBEAT))
    endpoint.send(event_body(action(time.time(), epoch=1), event_id="evt-2"), "evt-2")
    assert [one.action_id for one in endpoint.queued()] == ["act-1"]


def test_a_withdrawn_action_is_not_begun(endpoint: Endpoint) -> None:
    endpoint.send(event_body(action(time.time())))
    withdrawal = event_body({"action_id": "act-1"}, ACTION_WITHDRAWN, "evt-2")
    assert endpoint.send(withdrawal, "evt-2").json()["outcome"] == "cancelled"
    assert not endpoint.ledger.begin("act-1")
    late = event_body({"action_id": "act-1"}, ACTION_WITHDRAWN, "evt-3")
    assert endpoint.send(late, "evt-3").json()["outcome"] == "nothing to cancel"


def test_other_events_are_acknowledged_and_readmissions_queued(endpoint: Endpoint) -> None:
    for number, kind in enumerate((PING, HEARTBEAT, INCIDENT_OPENED, "eagle_eye.of.the.future")):
        answer = endpoint.send(event_body({}, kind, f"e{number}"), f"e{number}")
        assert (answer.status_code, answer.json()["outcome"]) == (200, "acknowledged")
    endpoint.send(event_body({"node": "n2", "state": "in_service"}, NODE_READMITTED, "e9"), "e9")
    assert endpoint.queued() == [Readmission(("n2",), "e9")]


def test_a_readmission_survives_a_restart_and_is_done_once(endpoint: Endpoint) -> None:
    endpoint.send(event_body({"node": "n2"}, NODE_READMITTED))
    endpoint.reopen()
    endpoint.intake.resume()
    assert endpoint.queued() == [Readmission(("n2",), "evt-1")]
    endpoint.ledger.readmitted("evt-1")
    endpoint.intake.resume()
    assert endpoint.queued() == []


def test_a_readmission_that_comes_late_does_not_undo_an_exclusion_after_it(endpoint: Endpoint) -> None:
    now_s = time.time()
    endpoint.send(event_body(action(now_s, exclude=["n2"], detected=rfc3339(now_s - 5))))
    endpoint.queued()
    late = event_body({"nodes": ["n2", "n3"]}, NODE_READMITTED, "evt-2", time=rfc3339(now_s - 60))
    endpoint.send(late, "evt-2")
    assert endpoint.queued() == [Readmission(("n3",), "evt-2")]
    later = event_body({"node": "n2"}, NODE_READMITTED, "evt-3", time=rfc3339(now_s))
    assert endpoint.send(later, "evt-3").json()["outcome"] == "queued"
    later = event_body({"node": "n2"}, NODE_READMITTED, "evt-4", time=rfc3339(now_s - 60))
    assert endpoint.send(later, "evt-4").json()["outcome"] == "stale"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 200_000,
        json.dumps({"specversion": "0.3", "id": "1", "type": "t", "source": "s"}).encode(),
        json.dumps({"specversion": "1.0", "id": "1", "type": "eagle_eye.action.requested", "source": "s"}).encode(),
        event_body({"action_id": 7}),
        event_body(action(0, expires="tomorrow")),
        event_body(action(0, expires="2030-01-01T00:00:00")),
        event_body(action(0, action_id="../../etc")),
    ],
)
def test_signed_garbage_is_400(endpoint: Endpoint, body: bytes) -> None:
    answer = endpoint.send(body)
    # Bytes that are no text cannot have been signed as text.
    assert_problem(answer, 401, "bad-signature") if body[:1] == b"\xff" else assert_problem(
        answer, 400, "malformed-event"
    )
    assert endpoint.queued() == []


def test_other_content_types_methods_paths_and_oversized_bodies(endpoint: Endpoint) -> None:
    body = event_body({}, PING)
    assert_problem(endpoint.send(body, content_type="application/json"), 415, "content-type")
    huge = b" " * (receiving.BODY_BYTES_MAX + 1)
    assert_problem(endpoint.send(huge), 413, "body-too-large")
    with httpx.Client(trust_env=False) as client:
        headers = {"content-type": "application/cloudevents+json", "webhook-id": "x"}
        pieces = (b" " * 65_536 for _ in range(32))
        assert_problem(client.post(endpoint.url, content=pieces, headers=headers), 413, "body-too-large")
        assert_problem(client.get(endpoint.url), 405, "method-not-allowed")
        assert_problem(client.get(endpoint.url + "etc"), 404, "not-found")
        assert client.get(endpoint.url + "healthz").status_code == 200


def test_a_body_that_does_not_come_is_not_waited_for(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "BODY_S_MAX", 0.1)
    headers = b"host: x\r\ncontent-type: application/cloudevents+json\r\nwebhook-id: x\r\ncontent-length: 10\r\n"
    with socket.create_connection(endpoint.socket.getsockname(), 5.0) as client:
        client.sendall(b"POST / HTTP/1.1\r\n" + headers + b"\r\n{")
        said = b"".join(iter(lambda: client.recv(4_096), b""))  # until it hangs up
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"within 0.1 s" in said


def test_a_full_queue_asks_to_come_again_and_records_nothing(endpoint: Endpoint) -> None:
    endpoint.intake.work = queue.Queue(1)
    endpoint.intake.work.put(Readmission((), ""))
    answer = endpoint.send(event_body(action(time.time())))
    assert_problem(answer, 503, "busy")
    assert answer.headers["retry-after"] == "5"
    assert endpoint.ledger.state_of("act-1") is None


def test_a_withdrawal_needs_no_room_in_the_queue(endpoint: Endpoint) -> None:
    endpoint.intake.work = queue.Queue(1)
    endpoint.send(event_body(action(time.time())))
    assert endpoint.intake.work.full()
    withdrawal = event_body({"action_id": "act-1"}, ACTION_WITHDRAWN, "evt-2")
    assert endpoint.send(withdrawal, "evt-2").json()["outcome"] == "cancelled"


def test_actions_keep_their_order(endpoint: Endpoint) -> None:
    for number in range(5):
        wanted = action(time.time(), action_id=f"act-{number}")
        endpoint.send(event_body(wanted, event_id=f"e{number}"), f"e{number}")
    assert [one.action_id for one in endpoint.queued()] == [f"act-{number}" for number in range(5)]


def test_an_address_in_use_is_a_clear_error() -> None:
    with (
        contextlib.closing(listen_on("127.0.0.1", 0)) as taken,
        pytest.raises(OrchestratorError, match="cannot listen on"),
    ):
        listen_on("127.0.0.1", taken.getsockname()[1])
