"""The client against a real server: records, refusals, and servers that are away or break off."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from eagle_eye.client import Client, ClientError, LimitReached, Refused, Unreachable, UnreadableAnswer, client
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.frame import Rank
from eagle_eye.server.model.records import Node
from eagle_eye.server.security.auth import mint
from eagle_eye.server.store.store import Change
from tests.client.breaking_proxy import breaking
from tests.loopback import free_port
from tests.server.builders import NOW, Running, action, body, frame, incident, running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path) as started:
        yield started


def commit(server: Running, change: Change) -> None:
    server.dispatcher.services.store.commit(change)


def test_records_are_those_of_the_api(server: Running) -> None:
    server.send(body(frame()))
    commit(server, Change(incidents=(incident(),), actions=(action(),)))
    asked = Client(server.url)
    assert [job["job"] for job in asked.jobs()] == ["job"]
    assert [node["node"] for node in asked.nodes()] == ["n1"]
    assert asked.incidents() == server.client.get("/api/v1/incidents").json()["items"]
    assert asked.actions() == server.client.get("/api/v1/actions").json()["items"]
    assert asked.incident("inc_1") == server.client.get("/api/v1/incidents/inc_1").json()


def test_filters_are_the_servers(server: Running) -> None:
    server.send(body(frame()))
    closed = incident("inc_2", state="closed", detected_s=NOW + 60, fault="gpu_lost")
    node = Node(node="n9", state="excluded", reason="", updated_s=NOW)
    commit(server, Change(incidents=(incident(), closed), actions=(action(),), nodes=(node,)))
    asked = Client(server.url)
    for found in (
        asked.incidents(state="closed"),
        asked.incidents(fault="gpu_lost"),
        asked.incidents(since=NOW + 30),
        asked.incidents(limit=1),
    ):
        assert [one["id"] for one in found] == ["inc_2"]
    assert asked.incidents(job="other") == asked.incidents(node="n3") == []
    assert asked.actions(kind="drain_node") == asked.actions(state="done") == asked.actions(incident="inc_2") == []
    assert [one["node"] for one in asked.nodes(state="excluded")] == ["n9"]
    assert asked.jobs(search="nothing") == asked.jobs(node="n9") == []
    assert [job["nodes"] for job in asked.jobs(members=False)] == [[]]


def test_a_list_without_a_limit_is_whole_and_in_order(server: Running) -> None:
    commit(server, Change(incidents=tuple(incident(f"inc_{number}") for number in range(1_050))))
    assert len({one["id"] for one in Client(server.url).incidents()}) == 1_050


def test_a_list_that_is_too_long_to_be_taken_whole_is_not_cut_in_silence(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(server, Change(incidents=tuple(incident(f"inc_{number}") for number in range(5))))
    monkeypatch.setattr(client, "ITEMS_MAX", 4)
    with pytest.raises(LimitReached, match=r"more than 4 incidents; filter them, or say how many \(limit\)"):
        Client(server.url).incidents()
    assert len(Client(server.url).incidents(limit=4)) == 4


def test_pages_get_shorter_until_an_answer_is_small_enough(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "x" * 2_000
    commit(server, Change(incidents=tuple(incident(f"inc_{number}", summary=long) for number in range(20))))
    monkeypatch.setattr("eagle_eye.client.http_client.ANSWER_BYTES_MAX", 20_000)
    assert len(Client(server.url).incidents()) == 20
    monkeypatch.setattr("eagle_eye.client.http_client.ANSWER_BYTES_MAX", 2_000)
    with pytest.raises(LimitReached, match="ask for less"):
        Client(server.url).incidents()


def test_a_refusal_carries_the_problem_details(server: Running) -> None:
    with pytest.raises(Refused) as refused:
        Client(server.url).incident("inc_9")
    problem = server.client.get("/api/v1/incidents/inc_9").json()
    said = refused.value
    assert {name: getattr(said, name) for name in ("type", "title", "status", "detail", "reason")} == problem
    assert str(said) == f"HTTP 404: {problem['detail']}"
    with pytest.raises(Refused, match="confirmed") as refused:
        Client(server.url).incidents(state="grumpy")
    assert refused.value.status == 400


def test_a_wrong_token_is_refused_and_a_right_one_read_from_its_file(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, record = mint("read", None, NOW, None)
    commit(server, Change(tokens=(record,)))
    (tmp_path / "right").write_text(f"{text}\n")
    (tmp_path / "wrong").write_text("ee_wrong")
    with pytest.raises(Refused, match=r"\(token_file\)") as refused:
        Client(server.url, token_file=tmp_path / "wrong").jobs()
    assert refused.value.status == 401
    assert Client(server.url, token_file=str(tmp_path / "right")).jobs() == []
    monkeypatch.setenv("EAGLE_EYE_SERVER", server.url)
    monkeypatch.setenv("EAGLE_EYE_TOKEN_FILE", str(tmp_path / "right"))
    assert Client().jobs() == []


@pytest.mark.parametrize("content", [None, b"\xff", b"two\nlines", b"x" * 5_000])
def test_a_token_file_that_is_none_is_named(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ClientError, match=f"token_file: {file}"):
        Client("http://127.0.0.1:1", token_file=file)


def test_what_is_no_url_and_a_variable_that_is_nearly_ours_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClientError, match="url: expected a URL such as"):
        Client("node17:8470")
    monkeypatch.setenv("EAGLE_EYE_SERVR", "http://a:8470")
    with pytest.raises(ConfigurationError, match="EAGLE_EYE_SERVER"):
        Client()


def test_a_server_that_is_away_is_unreachable() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    for ask in (Client(url).jobs, lambda: next(Client(url).events()), lambda: Client(url).query_range("train_loss")):
        with pytest.raises(Unreachable, match=f"{url} cannot be reached: .*; is url right"):
            ask()


@pytest.mark.parametrize("answer_bytes", [0, 20, 600, 2_000])
def test_an_answer_that_breaks_off_is_no_shorter_answer(server: Running, answer_bytes: int) -> None:
    commit(server, Change(incidents=tuple(incident(f"inc_{number}") for number in range(50))))
    with breaking(server.url) as proxy:
        assert len(Client(proxy.url).incidents()) == 50
        proxy.answer_bytes = answer_bytes
        with pytest.raises(Unreachable):
            Client(proxy.url).incidents()


class Elsewhere(BaseHTTPRequestHandler):
    """What is no Eagle Eye server: a page, an error of a proxy, and a redirect."""

    def do_GET(self) -> None:
        status = {"/api/v1/nodes": 502, "/api/v1/actions": 307}.get(self.path.partition("?")[0], 200)
        content = b"<html>hello</html>" if "jobs" in self.path else b'{"items": 3}'
        self.send_response(status)
        self.send_header("Location", "http://127.0.0.1:1/stolen")
        self.send_header("Retry-After", "soon")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def elsewhere() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as other:
        thread = Thread(target=other.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{other.server_port}"
        other.shutdown()
        thread.join()


def test_what_does_not_speak_the_api_is_said_to_be_none(elsewhere: str) -> None:
    with pytest.raises(UnreadableAnswer, match="no JSON; is url an Eagle Eye server"):
        Client(elsewhere).call("GET", "/api/v1/jobs")
    with pytest.raises(UnreadableAnswer, match="not the API's"):
        Client(elsewhere).incidents()
    with pytest.raises(UnreadableAnswer, match="not the API's"):
        Client(elsewhere).query_range("train_loss")
    with pytest.raises(Refused, match="HTTP 502: Bad Gateway") as refused:
        Client(elsewhere).nodes()
    assert (refused.value.type, refused.value.reason, refused.value.retry_after_s) == ("about:blank", "", None)


def test_a_redirect_is_not_followed(elsewhere: str) -> None:
    with pytest.raises(Refused, match="HTTP 307"):
        Client(elsewhere).actions()


def test_a_limit_holds_also_where_the_server_sends_more(server: Running) -> None:
    """Jobs that only agents speak of come with the first page, whatever its limit."""
    for number in range(3):
        server.send(body(frame(1, f"n{number}", job=f"job-{number}", ranks=[Rank(f"job-{number}", 0, 1, 0)])))
    assert len(server.client.get("/api/v1/jobs", params={"limit": 1}).json()["items"]) == 3
    assert Client(server.url).pages("/api/v1/jobs", {}, 2)[1]
    assert len(Client(server.url).jobs(limit=2)) == 2
    assert len(Client(server.url).jobs()) == 3
