from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_eye.agent import exposition as metrics_server
from eagle_eye.agent.collector import Drops
from eagle_eye.agent.exposition import CONNECTIONS_MAX, REQUEST_BYTES_MAX, MetricsServer, address
from tests.agent.fakes import until

PAGE = b"# TYPE a gauge\na 1\n"


class Site:
    """A server on a free port, and its clients."""

    def __init__(self, listen: str = "127.0.0.1:0") -> None:
        self.drops = Drops()
        self.page = PAGE
        self.pages = 0
        self.server = MetricsServer(listen, self._page, self.drops)
        self.server.start()

    def _page(self) -> bytes:
        self.pages += 1
        return self.page

    def connect(self) -> socket.socket:
        assert self.server.port is not None
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=10.0)

    def says(self, request: bytes) -> bytes:
        """Return all that the server answers to a request, until it closes the connection."""
        with self.connect() as end:
            end.sendall(request)
            return read_all(end)

    def get(self, method: str = "GET", path: str = "/metrics") -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10.0)
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer, body


def read_all(end: socket.socket) -> bytes:
    said = b""
    while True:
        try:
            chunk = end.recv(1 << 16)
        except ConnectionResetError:  # it has closed with something of ours unread
            return said
        if not chunk:
            return said
        said += chunk


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.server.stop()


def test_the_page_is_served_as_prometheus_reads_it(site: Site) -> None:
    answer, body = site.get()
    assert (answer.status, body) == (200, PAGE)
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert site.get("GET", "/metrics?collect=all")[1] == PAGE


def test_a_large_page_arrives_whole(site: Site) -> None:
    site.page = b"# comment\n" * 1_000_000
    assert site.get()[1] == site.page


def test_head_has_no_body(site: Site) -> None:
    answer, body = site.get("HEAD")
    assert (answer.status, body, answer.headers["Content-Length"]) == (200, b"", str(len(PAGE)))


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"POST /metrics HTTP/1.1", 405),
        (b"GET / HTTP/1.1", 404),
        (b"GET /metrics/../etc/passwd HTTP/1.1", 404),
        (b"GET /metrics", 400),
        (b"\x16\x03\x01\x02", 400),
        (b"PRI * HTTP/2.0", 400),
        (b"", 400),
    ],
)
def test_another_request_is_answered_with_its_status(site: Site, request_line: bytes, status: int) -> None:
    assert site.says(request_line + b"\r\nHost: x\r\n\r\n").startswith(b"HTTP/1.1 %d " % status)
    assert site.pages == 0


def test_a_request_without_end_is_refused_at_its_limit(site: Site) -> None:
    said = site.says(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * (2 * REQUEST_BYTES_MAX))
    assert said == b"" or said.startswith(b"HTTP/1.1 431 ")
    assert site.get()[1] == PAGE


def test_connections_are_bounded_and_counted(site: Site) -> None:
    open_ends = [site.connect() for _ in range(CONNECTIONS_MAX)]
    until(lambda: len(site.server._connections) == CONNECTIONS_MAX)
    with site.connect() as one_more:
        assert read_all(one_more) == b""
    assert site.drops.snapshot() == {"metrics_connections": 1}
    for end in open_ends:
        end.close()
    until(lambda: not site.server._connections)
    assert site.get()[1] == PAGE


def test_slow_clients_neither_hold_up_others_nor_stay(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "CONNECTION_S_MAX", 0.5)
    site.page = b"x" * (32 << 20)  # more than socket buffers take
    mute, deaf = site.connect(), site.connect()
    deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    begin_s = time.monotonic()
    assert site.get("GET", "/other")[0].status == 404
    assert time.monotonic() - begin_s < 0.5
    until(lambda: site.drops.snapshot() == {"metrics_slow": 2})
    assert read_all(mute) == b""
    mute.close()
    deaf.close()


def test_a_client_that_drips_is_cut_off_at_its_deadline(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "CONNECTION_S_MAX", 0.3)
    with site.connect() as end:
        end.sendall(b"GET ")

        def drip() -> bool:
            try:
                end.sendall(b"x")
            except OSError:
                return True
            return False

        until(drip)
    assert site.drops.snapshot() == {"metrics_slow": 1}


def test_a_client_that_has_gone_costs_nothing(site: Site) -> None:
    for _ in range(20):
        site.connect().close()
        end = site.connect()
        end.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        end.close()
    until(lambda: not site.server._connections)
    assert site.get()[1] == PAGE


def test_a_page_that_cannot_be_made_closes_the_connection_and_the_next_is_served(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(site.server, "_page", fail)
    assert site.says(b"GET /metrics HTTP/1.1\r\n\r\n") == b""
    assert "a bug in the agent" in caplog.text
    monkeypatch.setattr(site.server, "_page", lambda: PAGE)
    assert site.get()[1] == PAGE


def test_a_port_that_is_taken_is_a_warning_and_tried_again(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_server, "LISTEN_EVERY_S", 0.05)
    port = site.server.port
    other = Site(f"127.0.0.1:{port}")
    assert other.server.port is None
    until(lambda: caplog.text.count("cannot listen on") == 1)
    site.server.stop()
    until(lambda: other.server.port == port)
    assert other.get()[1] == PAGE
    assert caplog.text.count("cannot listen on") == 1
    other.server.stop()


def test_stopping_closes_the_port_and_what_is_open() -> None:
    site = Site()
    port = site.server.port
    with site.connect() as end:
        until(lambda: bool(site.server._connections))
        site.server.stop()
        assert read_all(end) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_an_address_is_checked() -> None:
    assert address("127.0.0.1:8471") == ("127.0.0.1", 8471)
    assert address("[::1]:8471") == ("::1", 8471)
    for wrong in (
        "",
        "8471",
        ":8471",
        "localhost:8471",
        "127.0.0.1",
        "127.0.0.1:99999",
        "1.2.3.4:1/x",
        "[::1:5",
        "a@::1",
    ):
        with pytest.raises(ValueError, match=r"expected an address and a port such as 127\.0\.0\.1:8471"):
            address(wrong)


@settings(max_examples=50)
@given(st.binary(max_size=200))
def test_any_bytes_are_answered_or_closed(request_bytes: bytes) -> None:
    site = Site()
    try:
        assert site.says(request_bytes + b"\r\n\r\n").startswith(b"HTTP/1.1 ")
    finally:
        site.server.stop()
