from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import certifi
import httpx
import pytest

from eagle_eye.orchestrators.protocol import RejectedError, ServerUnreachableError
from eagle_eye.orchestrators.server_client import SILENT_S, ServerClient, authorities
from eagle_eye.schema.problem import LEADER_HEADER
from tests.orchestrators.builders import action


@pytest.fixture(autouse=True)
def _read_anew() -> Iterator[None]:
    authorities.cache_clear()
    yield
    authorities.cache_clear()


def test_an_authority_of_ones_own_is_believed_and_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = "-----END CERTIFICATE-----"
    first = Path(certifi.where()).read_text(encoding="utf-8").partition(end)[0] + end
    (tmp_path / "ca.pem").write_text(first, encoding="utf-8")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    assert len(authorities().get_ca_certs()) == 1


def test_the_public_authorities_are_believed_where_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    assert len(authorities().get_ca_certs()) > 50


A, B = "http://a:8470", "http://b:8470"


class Answer(NamedTuple):
    """What a server answers; without a status it does not."""

    status: int | None = 200
    leader: str = ""
    reason: str = ""


OK = Answer()
STANDBY = Answer(503, reason="standby")
SILENT = Answer(None)


class Pair:
    """Two servers, what each one answers, and who was asked."""

    def __init__(self, a: Answer, b: Answer) -> None:
        self.asked: list[str] = []
        self.now_s = 1000.0
        self.answers = {"a": a, "b": b}
        self.client = ServerClient(f"{A},{B}", "", lambda: self.now_s)
        self.client._http = httpx.Client(transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.host)
        answer = self.answers[request.url.host]
        if answer.status is None:
            raise httpx.ReadTimeout("silent")
        headers = {LEADER_HEADER: answer.leader} if answer.leader else {}
        document = {"reason": answer.reason, "detail": f"this is {answer.reason}"} if answer.reason else {}
        return httpx.Response(answer.status, headers=headers, json=document)

    def ask(self) -> list[str]:
        """Make a request; return who was asked."""
        self.asked.clear()
        self.client.call("GET", "/healthz")
        return list(self.asked)


def test_the_next_server_is_asked_where_one_does_not_answer_and_first_from_then_on() -> None:
    pair = Pair(SILENT, OK)
    assert pair.ask() == ["a", "b"]
    assert pair.ask() == ["b"]


@pytest.mark.parametrize("status", [502, 504])
def test_the_next_server_is_asked_where_a_proxy_does_not_reach_one(status: int) -> None:
    pair = Pair(Answer(status), OK)
    assert pair.ask() == ["a", "b"]


def test_the_next_server_is_asked_where_one_stands_by_and_does_not_reach_the_leader() -> None:
    pair = Pair(STANDBY, OK)
    assert pair.ask() == ["a", "b"]


def test_what_the_leader_refuses_no_other_server_is_asked() -> None:
    pair = Pair(Answer(503, reason="storage"), OK)
    with pytest.raises(RejectedError, match="HTTP 503"):
        pair.ask()
    assert pair.asked == ["a"]


def test_requests_go_to_the_leader_that_a_standby_names() -> None:
    pair = Pair(Answer(leader=f"{B}/"), OK)
    assert (pair.ask(), pair.ask()) == (["a"], ["b"])


@pytest.mark.parametrize("leader", ["http://elsewhere:8470", "none"])
def test_a_leader_that_is_not_configured_is_never_asked(leader: str) -> None:
    pair = Pair(Answer(leader=leader), OK)
    assert (pair.ask(), pair.ask()) == (["a"], ["a"])


def test_a_leader_that_did_not_answer_is_not_asked_again_for_a_minute_though_a_standby_names_it() -> None:
    pair = Pair(SILENT, Answer(leader=A))
    assert (pair.ask(), pair.ask()) == (["a", "b"], ["b"])
    pair.now_s += SILENT_S
    pair.answers["a"] = OK
    assert (pair.ask(), pair.ask()) == (["b"], ["a"])


def test_while_nobody_leads_a_standby_is_asked_before_a_leader_that_hangs() -> None:
    pair = Pair(SILENT, STANDBY)
    with pytest.raises(ServerUnreachableError, match=f"{A} ReadTimeout; {B} HTTP 503 this is standby"):
        pair.ask()
    pair.answers["b"] = OK
    assert pair.ask() == ["b"]


def test_a_report_goes_where_the_action_names_any_of_the_servers() -> None:
    named = f"{B}/api/v1/actions/1/reports"
    path = Pair(OK, OK).client.report_path(action(0.0, report_to=named))
    assert path == ("/api/v1/actions/1/reports", True)


def test_one_wrong_url_of_several_is_named() -> None:
    with pytest.raises(ValueError, match="server is 'b:8470'"):
        ServerClient(f"{A}, b:8470", "")
