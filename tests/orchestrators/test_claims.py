"""Before anything is changed the server is asked; where nobody answers for two leases, the action is begun once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eagle_eye.orchestrators.ledger import Ledger
from eagle_eye.orchestrators.protocol import RejectedError, ServerUnreachableError
from eagle_eye.orchestrators.server_client import Claims, ServerClient, StoppingError
from eagle_eye.orchestrators.subscriber import Subscriber
from eagle_eye.schema.action import ActionRequest, Report, ReportState
from tests.orchestrators.builders import action, rfc3339
from tests.orchestrators.test_subscriber import Recording

NOW_S = 1_800_000_000.0
LEASE_S = 5.0


class Server(ServerClient):
    """Answers claims from a script, and from its end on as at its end; None grants. Each question takes a second."""

    def __init__(self, *answers: Exception | None) -> None:
        super().__init__("http://127.0.0.1:1", "")
        self.answers = list(answers)
        self.asked: list[Any] = []
        self.time_s = 0.0

    def call(self, method: str, path: str, body: Any = None, timeout_s: float = 5.0) -> Any:
        self.time_s += 1.0
        self.asked.append((method, path, body))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is not None:
            raise answer
        return {}


class Running(threading.Event):
    """Never set; waiting for it takes no time but on the server's clock."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server = server

    def wait(self, timeout: float | None = None) -> bool:
        self.server.time_s += timeout or 0.0
        return self.is_set()


AWAY = ServerUnreachableError("POST: ConnectError")


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    made = Ledger(tmp_path / "ledger.sqlite")
    yield made
    made.close()


def claim(ledger: Ledger, server: Server, wanted: ActionRequest) -> tuple[str | None, list[str]]:
    """The answer to a claim, and what was counted."""
    counted: list[str] = []
    claims = Claims(server, ledger, counted.append, lambda: NOW_S, lambda: server.time_s)
    return claims(wanted, Running(server)), counted


def wanted(**changes: Any) -> ActionRequest:
    return action(NOW_S, epoch=3, lease_seconds=LEASE_S, **changes)


def test_a_claim_names_the_subscriber_and_the_epoch(ledger: Ledger) -> None:
    server = Server(None)
    assert claim(ledger, server, wanted()) == (None, ["granted"])
    ((method, path, body),) = server.asked
    assert (method, path) == ("POST", "/api/v1/actions/act-1/reports")
    assert body == {"state": "accepted", "detail": "about to begin", "claim": ledger.name, "epoch": 3}


def test_a_server_from_before_claims_takes_one_as_accepted(ledger: Ledger) -> None:
    server = Server(None)
    claim(ledger, server, wanted())
    ((_, _, body),) = server.asked
    assert msgspec.convert(body, Report) == Report("accepted", "about to begin")


def test_the_name_is_the_same_for_the_next_process_and_another_in_another_folder(tmp_path: Path) -> None:
    names = []
    for folder in ("a", "a", "b"):
        made = Ledger(tmp_path / folder / "ledger.sqlite")
        names.append(made.name)
        made.close()
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize("status", [404, 409])
def test_a_no_is_one_at_once(ledger: Ledger, status: int) -> None:
    server = Server(RejectedError("HTTP no: claimed by another", status))
    assert claim(ledger, server, wanted()) == ("HTTP no: claimed by another", ["refused"])
    assert len(server.asked) == 1


@pytest.mark.parametrize(("status", "state"), [(404, "unknown"), (409, "queued")])
def test_only_what_the_server_does_not_know_may_be_asked_for_anew(ledger: Ledger, status: int, state: str) -> None:
    ledger.record_action("evt-1", wanted(), "queued", NOW_S)
    ledger.owe("act-1", "/reports", Report("accepted", ""), NOW_S)
    claim(ledger, Server(RejectedError("HTTP no", status)), wanted())
    assert ledger.state_of("act-1") == state
    assert [one.action_id for one in ledger.owed()] == ([] if state == "unknown" else ["act-1"])


@pytest.mark.parametrize("problem", [AWAY, RejectedError("busy", 503), RejectedError("token", 401)], ids=str)
def test_who_leads_next_is_asked_again(ledger: Ledger, problem: Exception) -> None:
    server = Server(problem, problem, None)
    assert claim(ledger, server, wanted()) == (None, ["granted"])
    assert len(server.asked) == 3


def test_where_nobody_answers_for_two_leases_the_action_is_begun(ledger: Ledger) -> None:
    server = Server(AWAY)
    assert claim(ledger, server, wanted()) == (None, ["unanswered"])
    assert 2 * LEASE_S - 2.0 < server.time_s <= 2 * LEASE_S


def test_a_server_alone_is_asked_once(ledger: Ledger) -> None:
    server = Server(AWAY)
    assert claim(ledger, server, action(NOW_S)) == (None, ["unanswered"])
    assert len(server.asked) == 1


@pytest.mark.parametrize("state", ["begun", "finished"])
def test_unclaimed_the_same_is_not_begun_twice(ledger: Ledger, state: str) -> None:
    ledger.record_action("evt-0", wanted(action_id="act-0", exclude=["n2", "n1"]), "queued", NOW_S)
    ledger.begin("act-0")
    if state == "finished":
        ledger.finish("act-0")
    no, counted = claim(ledger, Server(AWAY), wanted(exclude=["n1", "n2"]))
    assert (no, counted) == ("POST: ConnectError; the same was begun as action act-0", ["refused"])


@pytest.mark.parametrize("other", [{"attempt": 0}, {"exclude": ["n1"]}, {"job": "k"}, {"kind": "drain_node"}], ids=str)
def test_what_differs_in_job_attempt_nodes_or_kind_is_not_the_same(ledger: Ledger, other: dict[str, Any]) -> None:
    ledger.record_action("evt-0", wanted(action_id="act-0", **other), "queued", NOW_S)
    ledger.begin("act-0")
    assert claim(ledger, Server(AWAY), wanted())[0] is None


def test_what_was_refused_or_withdrawn_does_not_count_as_begun(ledger: Ledger) -> None:
    for number, state in enumerate(("refused", "withdrawn", "queued")):
        ledger.record_action(f"evt-{number}", wanted(action_id=f"other-{number}"), state, NOW_S)  # type: ignore[arg-type]
    assert claim(ledger, Server(AWAY), wanted())[0] is None


def test_what_expires_while_nobody_answers_is_not_begun(ledger: Ledger) -> None:
    late = wanted(expires=rfc3339(NOW_S))
    assert claim(ledger, Server(AWAY), late) == ("POST: ConnectError; it has expired", ["refused"])


def test_an_action_whose_claim_is_interrupted_is_left_to_the_next_process(ledger: Ledger) -> None:
    server = Server(AWAY)
    stopping = Running(server)
    stopping.set()
    with pytest.raises(StoppingError):
        Claims(server, ledger, monotonic_s=lambda: server.time_s)(wanted(), stopping)


def begin(ledger: Ledger, answer: str | None, **changes: Any) -> tuple[list[Any], list[str], list[str]]:
    """What an action changed, what was reported and what was claimed, where claims are answered so."""
    orchestrator = Recording()
    reports: list[str] = []
    asked: list[str] = []

    def claims(one: ActionRequest, _: threading.Event) -> str | None:
        asked.append(one.action_id)
        return answer

    def tell(action: ActionRequest, state: ReportState, detail: str) -> None:
        reports.append(state)

    one = action(NOW_S, **changes)
    ledger.record_action("evt-1", one, "queued", NOW_S)
    Subscriber(orchestrator, ledger, queue.Queue(), tell, lambda: NOW_S, claim=claims).do(one)
    return orchestrator.calls, reports, asked


def test_an_action_that_is_not_granted_changes_nothing_and_reports_nothing(ledger: Ledger) -> None:
    assert begin(ledger, "claimed by another") == ([], [], ["act-1"])
    assert ledger.state_of("act-1") == "refused"


def test_a_granted_action_is_carried_out(ledger: Ledger) -> None:
    calls, reports, _ = begin(ledger, None)
    assert ([call[0] for call in calls], reports) == (["exclude", "restart"], ["running", "done"])


def test_what_changes_nothing_is_not_claimed(ledger: Ledger) -> None:
    assert begin(ledger, None, kind="notify", exclude=[])[2] == []
