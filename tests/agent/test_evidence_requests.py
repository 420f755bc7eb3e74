"""From the server's answer to the bundle's arrival."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_eye.agent.clock import SystemClock
from eagle_eye.agent.collector import CollectFailed, Drops
from eagle_eye.agent.evidence import requests as taking
from eagle_eye.agent.evidence.gather import EVIDENCE, HANGING_MAX, EvidenceGatherer
from eagle_eye.agent.evidence.requests import (
    BUNDLE_TYPE,
    FAILURE_TYPE,
    REMEMBERED_MAX,
    WAITING_MAX,
    EvidenceResponder,
    Upload,
    UploadTarget,
)
from eagle_eye.agent.evidence.source import FORMAT, Scene, Task
from eagle_eye.agent.transport.servers import Servers
from tests.agent.fakes import FakeClock, until
from tests.agent.test_evidence_bundle import unpacked


class Gate:
    """A source that waits until it is let go, and keeps the time it was given."""

    name = "gate"

    def __init__(self, opened: bool) -> None:
        self.open = threading.Event()
        self.given_s: list[float] = []
        if opened:
            self.open.set()

    def tasks(self, scene: Scene) -> list[Task]:
        self.given_s.append(scene.left_s())
        return [Task("gate", self._wait)]

    def _wait(self) -> None:
        self.open.wait(60.0)


class EvidenceSite:
    """The agent's side, with a server that only remembers."""

    def __init__(self, opened: bool = True) -> None:
        self.gate = Gate(opened)
        self.sent: list[tuple[str, bytes, str]] = []
        self.drops = Drops()
        self.problem = ""
        self.gatherer = EvidenceGatherer("n1", "0", {EVIDENCE: [self.gate], "bug_report": [self.gate]})
        self.requests = EvidenceResponder(self.gatherer, list, self._send, self.drops)

    def _send(self, request_id: str, content: bytes, content_type: str, _s: float, _stop: threading.Event) -> str:
        self.sent.append((request_id, content, content_type))
        return self.problem

    def ask(self, *ids: str, **more: Any) -> None:
        asked = [{"id": id_, "kind": "evidence", "deadline_s": 20.0, "job": "j", "attempt": 0, **more} for id_ in ids]
        self.requests.answered({"accepted": 1, "watermark": 1, "requests": asked})


@pytest.fixture
def site() -> Iterator[EvidenceSite]:
    made = EvidenceSite()
    yield made
    made.gate.open.set()
    made.requests.close()


@pytest.fixture
def shut() -> Iterator[EvidenceSite]:
    made = EvidenceSite(opened=False)
    yield made
    made.gate.open.set()
    made.requests.close()


def test_what_is_asked_for_is_gathered_and_sent(site: EvidenceSite) -> None:
    site.ask("ev_1")
    until(lambda: len(site.sent) == 1)
    id_, content, kind = site.sent[0]
    assert (id_, kind) == ("ev_1", BUNDLE_TYPE)
    assert json.loads(unpacked(content)["n1/manifest.json"])["format"] == FORMAT


def test_a_request_that_is_repeated_is_served_once(site: EvidenceSite) -> None:
    for _ in range(3):
        site.ask("ev_1")
    site.ask("ev_2")
    until(lambda: len(site.sent) == 2)
    assert [id_ for id_, _, _ in site.sent] == ["ev_1", "ev_2"]


def test_an_answer_that_asks_for_nothing_starts_nothing(site: EvidenceSite) -> None:
    before = threading.active_count()
    site.requests.answered({"accepted": 1, "duplicates": 0, "watermark": 1})
    assert threading.active_count() == before


def test_what_does_not_fit_into_the_queue_is_taken_when_it_is_asked_again(shut: EvidenceSite) -> None:
    shut.ask("first")
    until(lambda: len(shut.gate.given_s) == 1)
    ids = [f"ev_{number}" for number in range(WAITING_MAX + 1)]
    shut.ask(*ids)
    assert shut.drops.snapshot() == {"evidence_too_many": 1}
    shut.gate.open.set()
    until(lambda: len(shut.sent) == 1 + WAITING_MAX)
    shut.ask(*ids)
    until(lambda: len(shut.sent) == 2 + WAITING_MAX)
    assert shut.sent[-1][0] == ids[-1]


def test_a_bug_report_does_not_hold_up_what_is_quick(shut: EvidenceSite) -> None:
    shut.ask("slow", kind="bug_report")
    until(lambda: len(shut.gate.given_s) == 1)
    shut.ask("quick", deadline_s=0.5)
    until(lambda: [id_ for id_, _, _ in shut.sent] == ["quick"])


@pytest.mark.parametrize(("asked_s", "given_s"), [(1e9, 60.0), (-5.0, 0.5), (0.0, 0.5), (2.0, 2.0)])
def test_a_deadline_beyond_reason_is_brought_into_bounds(site: EvidenceSite, asked_s: float, given_s: float) -> None:
    site.ask("ev_1", deadline_s=asked_s)
    until(lambda: len(site.sent) == 1)
    assert site.gate.given_s[0] == pytest.approx(given_s, abs=0.4)


@pytest.mark.parametrize(
    "item",
    [
        None,
        "ev_1",
        {},
        {"id": 1, "kind": "evidence", "deadline_s": 1},
        {"id": "ev_1", "kind": "evidence", "deadline_s": "soon"},
        {"id": "ev_1", "kind": "shell", "deadline_s": 1.0},
        {"id": "../../etc/passwd", "kind": "evidence", "deadline_s": 1.0},
        {"id": "", "kind": "evidence", "deadline_s": 1.0},
        {"id": "x" * 65, "kind": "evidence", "deadline_s": 1.0},
    ],
)
def test_what_is_not_understood_is_counted_and_nothing_is_done(site: EvidenceSite, item: object) -> None:
    site.requests.answered({"requests": [item]})
    assert sum(site.drops.snapshot().values()) == 1
    assert site.gate.given_s == []


@given(
    st.dictionaries(
        st.sampled_from(["requests", "watermark"]),
        st.recursive(
            st.none() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["id", "kind", "job"]), inner, max_size=3)
            ),
        ),
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_answer_raises(answer: Mapping[str, object]) -> None:
    EvidenceSite().requests.answered(answer)


def test_ids_are_not_remembered_for_ever(site: EvidenceSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking, "REMEMBERED_MAX", 2)
    assert REMEMBERED_MAX > WAITING_MAX
    for number in range(4):
        site.ask(f"ev_{number}")
        until(lambda expected=number + 1: len(site.sent) == expected)  # type: ignore[misc]
    assert list(site.requests._seen) == ["ev_2", "ev_3"]


def test_a_host_on_which_nothing_can_be_gathered_says_so_to_the_server(
    site: EvidenceSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert site.requests.collect(0.0).problem == ""
    monkeypatch.setattr(site.gatherer, "hanging", lambda: HANGING_MAX)
    with pytest.raises(CollectFailed, match="no evidence can be gathered"):
        site.requests.collect(0.0)
    site.ask("ev_1")
    until(lambda: len(site.sent) == 1)
    assert site.sent[0][2] == FAILURE_TYPE
    assert "threads of earlier gatherings hang" in json.loads(site.sent[0][1])["failed"]


def test_a_bundle_that_does_not_arrive_is_counted_logged_and_reported(
    site: EvidenceSite, caplog: pytest.LogCaptureFixture
) -> None:
    site.problem = "the server answered 413"
    with caplog.at_level(logging.WARNING):
        site.ask("ev_1")
        until(lambda: len(site.sent) == 2)
    assert site.drops.snapshot() == {"evidence_not_delivered": 1}
    assert "ev_1 is lost: the server answered 413" in caplog.text
    assert [kind for _, _, kind in site.sent] == [BUNDLE_TYPE, FAILURE_TYPE]
    assert "did not arrive: the server answered 413" in json.loads(site.sent[1][1])["failed"]


class Server:
    """Takes bundles on loopback and answers as told."""

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.status: Callable[[int], int] = lambda _number: 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                outer.got.append((self.path, headers, self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(outer.status(len(outer.got)))
                self.end_headers()
                self.wfile.write(b'{"detail": "no room"}')

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=lambda: self.http.serve_forever(0.01), daemon=True).start()

    def place(self, prefix: str = "") -> UploadTarget:
        return UploadTarget(Servers([f"http://127.0.0.1:{self.http.server_port}{prefix}"]), lambda: "ee_token")


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def send(
    place: UploadTarget, content: bytes = b"bundle", within_s: float = 60.0, clock: FakeClock | None = None
) -> str:
    return Upload(place, clock or FakeClock(), lambda: 0.5).send(
        "ev_1", content, BUNDLE_TYPE, within_s, threading.Event()
    )


def test_a_bundle_goes_to_its_place_with_the_nodes_token(server: Server) -> None:
    content = bytes(range(256)) * 10_000
    assert send(server.place("/prefix"), content) == ""
    path, headers, body = server.got[0]
    assert path == "/prefix/api/v1/evidence/ev_1"
    assert (headers["content-type"], headers["authorization"]) == ("application/gzip", "Bearer ee_token")
    assert body == content


def test_a_server_in_trouble_is_tried_again_ever_more_slowly(server: Server) -> None:
    server.status = lambda number: 503 if number < 4 else 200
    waited: list[float] = []
    clock = FakeClock()
    clock.on_wait = waited.append
    assert send(server.place(), clock=clock) == ""
    assert waited == pytest.approx([0.075, 0.15, 0.3])


def test_a_refusal_is_final_and_says_why(server: Server) -> None:
    server.status = lambda _number: 413
    assert send(server.place()) == "the server answered 413: no room"
    assert len(server.got) == 1


def test_trying_ends_with_the_time(server: Server) -> None:
    server.status = lambda _number: 500
    assert "500" in send(server.place(), within_s=2.0)
    assert 3 < len(server.got) < 10


def test_a_server_that_is_not_there_is_an_answer_too(server: Server) -> None:
    place = server.place()
    server.http.shutdown()
    server.http.server_close()
    assert "cannot be reached" in send(place, within_s=1.0)


def test_a_stopping_agent_gives_up_at_once() -> None:
    stop = threading.Event()
    stop.set()
    problem = Upload(UploadTarget(Servers(["http://127.0.0.1:9"]), lambda: ""), SystemClock()).send(
        "ev_1", b"", BUNDLE_TYPE, 60.0, stop
    )
    assert "cannot be reached" in problem
