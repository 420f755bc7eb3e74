from __future__ import annotations

import contextlib
import json
import socket
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from eagle_eye.agent.clock import SystemClock
from eagle_eye.agent.collector import Drops
from eagle_eye.agent.transport.servers import Servers
from eagle_eye.agent.transport.spool import Spool
from eagle_eye.agent.transport.uplink import Destination, Uplink
from eagle_eye.schema.frame import CONTENT_TYPE, Frame, decode_frame, decode_request, encode_frame
from eagle_eye.schema.rows import CONTENT_TYPE as ROWS_CONTENT_TYPE
from eagle_eye.schema.rows import (
    RowTemplate,
    decode_rows_request,
    decode_template,
    is_row,
    read_row,
    template_id,
    template_of_row,
)
from tests.agent.fakes import FakeClock, until
from tests.agent.spoiled import NASTY

Reply = tuple[int, dict[str, str], object]


class Server:
    """A server on loopback that keeps frames and answers as told."""

    def __init__(self, port: int = 0) -> None:
        self.frames: list[Frame] = []
        self.requests: list[dict[str, str]] = []
        self.templates: dict[bytes, RowTemplate] = {}
        self.connections: set[object] = set()
        self.sockets: list[socket.socket] = []
        self.refuse: Callable[[list[Frame], dict[str, str]], Reply | None] = lambda _frames, _headers: None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else each answer waits 40 ms for an acknowledgement

            def do_POST(self) -> None:
                outer.connections.add(self.client_address)
                outer.sockets.append(self.connection)
                headers = {name.lower(): value for name, value in self.headers.items()}
                outer.requests.append({"path": self.path, **headers})
                frames = outer.read(self.rfile.read(int(self.headers["Content-Length"])), headers)
                status, extra, body = outer.refuse(frames, headers) or outer.take(frames)
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in {**extra, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=lambda: self.http.serve_forever(0.01), daemon=True)
        self.thread.start()

    def read(self, body: bytes, headers: Mapping[str, str]) -> list[Frame]:
        """Return what a request says, whichever way; templates are known for ever."""
        if headers["content-type"] == CONTENT_TYPE:
            return [decode_frame(raw) for raw in decode_request(body)[1]]
        if headers.get("content-encoding") == "deflate":
            body = zlib.decompress(body)
        request = decode_rows_request(body)
        self.templates.update((template_id(raw), decode_template(raw)[0]) for raw in request.templates)
        return [
            read_row(self.templates[template_of_row(item)], item).frame if is_row(item) else decode_frame(item)
            for item in request.rows
        ]

    def take(self, frames: list[Frame]) -> Reply:
        self.frames.extend(frames)
        return 200, {}, {"accepted": len(frames), "duplicates": 0, "watermark": frames[-1].sequence}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"

    def hang_up(self) -> None:
        """Close every connection, as a server does that has heard nothing for a while."""
        for each in self.sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


class Agent:
    """A spool and its uplink."""

    def __init__(self, url: str, folder: Path, clock: FakeClock, **options: object) -> None:
        self.drops = Drops()
        self.spool = Spool(folder / "spool", "n1", self.drops)
        self.clock = clock
        destination = Destination(Servers([url]), **options)  # type: ignore[arg-type]
        self.uplink = Uplink(destination, self.spool, self.drops, clock, jitter=lambda: 1.0)

    def put(self, count: int = 1) -> None:
        for _ in range(count):
            self.spool.append(frame)

    def send(self) -> float | None:
        return self.uplink.live.send_once()

    def waiting(self) -> list[int]:
        batch = self.spool.newest(1000, 1 << 30)
        return [sequence for sequence, _ in batch.frames] if batch else []

    def close(self) -> None:
        self.uplink.stop(0.0)
        self.spool.close()


def frame(stream: str, sequence: int) -> bytes:
    return encode_frame(Frame(1, "n1", "boot", stream, sequence, 1_000_000.0, 1.0, "0"))


def problem(status: int, reason: str, **headers: str) -> Reply:
    return status, headers, {"status": status, "reason": reason, "detail": "because"}


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def agent(server: Server, tmp_path: Path, clock: FakeClock) -> Iterator[Agent]:
    made = Agent(server.url, tmp_path, clock)
    yield made
    made.close()


def test_what_the_server_has_is_forgotten(agent: Agent, server: Server) -> None:
    agent.put(3)
    assert agent.send() == 0.0
    assert [each.sequence for each in server.frames] == [1, 2, 3]
    assert agent.send() is None
    assert agent.spool.waiting() == 0
    assert agent.uplink.delivered == 3


def test_requests_say_what_they_are_and_share_a_connection(agent: Agent, server: Server) -> None:
    for _ in range(3):
        agent.put()
        agent.send()
    assert {each["path"] for each in server.requests} == {"/api/v1/frames"}
    assert {each["content-type"] for each in server.requests} == {ROWS_CONTENT_TYPE}
    assert len(server.connections) == 1


def test_only_what_lies_under_the_watermark_is_forgotten(agent: Agent, server: Server) -> None:
    agent.put(3)
    server.refuse = lambda _frames, _headers: (200, {}, {"accepted": 2, "duplicates": 0, "watermark": 2})
    agent.send()
    assert agent.waiting() == [3]


def test_a_watermark_beyond_what_was_sent_forgets_nothing_else(agent: Agent, server: Server) -> None:
    agent.uplink.live._frames_max = 2
    agent.put(5)
    server.refuse = lambda _frames, _headers: (200, {}, {"watermark": 10**9})
    agent.send()
    assert agent.spool.waiting() == 3


@pytest.mark.parametrize("body", [{"watermark": 0}, {"watermark": True}, {}, [], b"<html>", b"[" * 9999])
def test_an_answer_that_acknowledges_nothing_is_tried_again_later(agent: Agent, server: Server, body: object) -> None:
    agent.put(2)
    server.refuse = lambda _frames, _headers: (200, {}, body)
    assert agent.send() == pytest.approx(0.1)
    assert agent.spool.waiting() == 2


def test_one_poisoned_frame_is_dropped_and_the_others_arrive(agent: Agent, server: Server) -> None:
    agent.put(5)
    server.refuse = lambda frames, _headers: (
        problem(400, "metric") if any(each.sequence == 3 for each in frames) else None
    )
    while agent.send() is not None:
        pass
    assert [each.sequence for each in server.frames] == [1, 2, 4, 5]
    assert agent.drops.snapshot() == {"rejected_metric": 1}


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(("luck", "wait_s"), [(0.0, 8.0), (1.0, 12.0)])
def test_retry_after_is_honoured_and_spread_so_that_a_fleet_does_not_come_back_at_once(
    agent: Agent, server: Server, status: int, luck: float, wait_s: float
) -> None:
    agent.uplink.live._jitter = lambda: luck
    agent.put()
    server.refuse = lambda _frames, _headers: problem(status, "busy", **{"Retry-After": "8"})
    assert agent.send() == wait_s
    assert agent.spool.waiting() == 1


def test_a_server_that_stays_busy_is_asked_ever_less_often_whatever_it_says(agent: Agent, server: Server) -> None:
    agent.put()
    server.refuse = lambda _frames, _headers: problem(503, "busy", **{"Retry-After": "1"})
    assert [agent.send() for _ in range(8)] == pytest.approx([1.5, 1.5, 1.5, 1.5, 1.6, 3.2, 5.0, 5.0])


@pytest.mark.parametrize("status", [301, 404, 408, 418, 500, 502, 504])
def test_any_other_answer_keeps_the_frames_and_backs_off(agent: Agent, server: Server, status: int) -> None:
    agent.put()
    server.refuse = lambda _frames, _headers: problem(status, "x")
    assert [agent.send(), agent.send()] == pytest.approx([0.1, 0.2])
    assert agent.spool.waiting() == 1


def test_a_server_that_is_gone_is_asked_ever_less_often(tmp_path: Path, clock: FakeClock) -> None:
    agent = Agent("http://127.0.0.1:1", tmp_path, clock)
    agent.put()
    waits = [agent.send() for _ in range(9)]
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])
    agent.close()


def test_after_a_success_the_back_off_begins_anew(agent: Agent, server: Server) -> None:
    agent.put()
    server.refuse = lambda _frames, _headers: problem(500, "x")
    for _ in range(5):
        agent.send()
    server.refuse = lambda _frames, _headers: None
    agent.send()
    agent.put()
    server.refuse = lambda _frames, _headers: problem(500, "x")
    assert agent.send() == pytest.approx(0.1)


def test_a_new_token_is_read_when_the_old_one_is_refused(server: Server, tmp_path: Path, clock: FakeClock) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    server.refuse = lambda _frames, headers: (
        None if headers.get("authorization") == "Bearer new" else problem(401, "unauthorized")
    )
    agent = Agent(server.url, tmp_path, clock, token_file=token)
    agent.put()
    assert agent.send() == pytest.approx(0.1)
    token.write_text("new\n")
    assert agent.send() == 0.0
    assert agent.send() == 0.0
    assert len(server.frames) == 1
    agent.close()


def test_a_state_is_logged_once(agent: Agent, server: Server, caplog: pytest.LogCaptureFixture) -> None:
    agent.put()
    server.refuse = lambda _frames, _headers: problem(403, "scope")
    for _ in range(4):
        agent.send()
    assert [record.getMessage() for record in caplog.records] == ["server answered 403 scope: because"]


@pytest.mark.parametrize(
    "unknown", [*NASTY, [7, None, "x" * 9999, *["metric x"] * 999]], ids=lambda value: repr(value)[:20]
)
def test_whatever_a_server_calls_unknown_what_it_took_is_forgotten(
    agent: Agent, server: Server, unknown: object
) -> None:
    agent.put()
    server.refuse = lambda _frames, _headers: (200, {}, {"watermark": 1, "unknown": unknown})
    assert agent.send() == 0.0
    assert agent.spool.waiting() == 0


def test_a_server_that_refuses_every_frame_is_said_so_once_a_minute(
    agent: Agent, server: Server, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    server.refuse = lambda _frames, _headers: problem(400, "metric")
    for _ in range(10):
        agent.put()
        agent.send()
    assert len(caplog.records) == 1
    clock.advance(60.0)
    agent.put()
    agent.send()
    assert len(caplog.records) == 2
    assert agent.drops.snapshot() == {"rejected_metric": 11}


def test_a_connection_that_the_server_closed_is_made_anew(agent: Agent, server: Server) -> None:
    agent.put()
    server.refuse = lambda _frames, _headers: (200, {"Connection": "close"}, {"watermark": 1})
    agent.send()
    server.refuse = lambda _frames, _headers: None
    agent.put()
    assert agent.send() == 0.0
    assert len(server.connections) == 2


def test_a_connection_that_died_while_nothing_was_sent_delays_no_frame(
    agent: Agent, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    agent.put()
    agent.send()
    server.hang_up()
    agent.put()
    assert agent.send() == 0.0
    assert [each.sequence for each in server.frames] == [1, 2]
    assert "cannot be reached" not in caplog.text


def test_what_else_the_answer_says_is_handed_on(server: Server, tmp_path: Path, clock: FakeClock) -> None:
    said: list[Mapping[str, object]] = []
    drops = Drops()
    spool = Spool(tmp_path / "spool", "n1", drops)
    uplink = Uplink(Destination(Servers([server.url])), spool, drops, clock, answered=said.append)
    spool.append(frame)
    server.refuse = lambda _frames, _headers: (200, {}, {"watermark": 1, "requests": [{"id": "e1"}]})
    uplink.live.send_once()
    assert said == [{"watermark": 1, "requests": [{"id": "e1"}]}]
    uplink.stop(0.0)
    spool.close()


def test_the_thread_delivers_what_is_put_and_flushes_when_stopped(server: Server, tmp_path: Path) -> None:
    drops = Drops()
    spool = Spool(tmp_path / "spool", "n1", drops)
    uplink = Uplink(Destination(Servers([server.url])), spool, drops, SystemClock())
    uplink.start()
    spool.append(frame)
    uplink.notify()
    until(lambda: len(server.frames) == 1)
    spool.append(frame)
    uplink.stop(1.0)
    assert [each.sequence for each in server.frames] == [1, 2]
    spool.close()


def test_stopping_does_not_wait_for_a_server_that_is_gone(tmp_path: Path) -> None:
    drops, clock = Drops(), SystemClock()
    spool = Spool(tmp_path / "spool", "n1", drops)
    spool.append(frame)
    uplink = Uplink(Destination(Servers(["http://127.0.0.1:1"])), spool, drops, clock)
    uplink.start()
    begin_s = clock.monotonic_s()
    uplink.stop(0.3)
    assert clock.monotonic_s() - begin_s < 1.0
    assert spool.waiting() == 1
    spool.close()
