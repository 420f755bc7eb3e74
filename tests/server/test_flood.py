"""One client that asks for nothing sensible: it is kept within bounds, and the agents are answered meanwhile.

The bad client comes from 127.0.0.2, the agents from 127.0.0.1.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.server.security.auth import Limits
from eagle_eye.server.security.settings import LimitSettings
from eagle_eye.server.transport import connections as guarded_protocol
from eagle_eye.server.transport.connections import Connection, Connections
from tests.server.builders import FakeClock, Running, body, frame, running

BAD = "127.0.0.2"
WITHIN_S = 5.0
POST = b"POST /api/v1/frames HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/x-eagle-eye-rows\r\n"


def connect(server: Running, address: str = BAD) -> socket.socket:
    url = urlsplit(server.url)
    assert url.hostname
    assert url.port
    return socket.create_connection((url.hostname, url.port), WITHIN_S, source_address=(address, 0))


def said(connection: socket.socket) -> bytes:
    """Return all that the server says until it ends the connection, however it ends it."""
    text = b""
    try:
        while more := connection.recv(1 << 16):
            text += more
    except ConnectionError:
        pass
    return text


def until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def open_now(server: Running) -> int:
    return server.dispatcher.connections.count


def an_agent_is_heard(server: Running, sequence: int = 1) -> bool:
    return server.send(body(frame(sequence))).status_code == 200


def test_connections_that_ask_for_nothing_shut_nobody_out(tmp_path: Path) -> None:
    with running(tmp_path, limits__address_connections=5) as server, ExitStack() as stack:
        before = open_now(server)
        idle = [stack.enter_context(connect(server)) for _ in range(12)]
        until(lambda: server.metric("connections_refused_total", reason="address") == 7)
        assert open_now(server) - before == 5
        assert an_agent_is_heard(server)
        for connection in idle:
            connection.close()
        until(lambda: open_now(server) == before)
        again = stack.enter_context(connect(server))
        again.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert said(again).startswith(b"HTTP/1.1 200")


def test_connections_on_which_somebody_asked_who_may_are_not_counted_as_strangers(tmp_path: Path) -> None:
    with running(tmp_path, limits__address_connections=2) as server, ExitStack() as stack:
        for _ in range(4):
            connection = stack.enter_context(connect(server))
            connection.sendall(b"GET /api/v1/nodes HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert server.metric("connections_refused_total", reason="address") == 0
        assert server.metric("connections", client="known") >= 4


def test_what_everybody_is_shown_proves_nothing(tmp_path: Path) -> None:
    with running(tmp_path) as server, connect(server) as connection:
        for _ in range(2):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
            assert server.dispatcher.connections.unauthenticated == 2  # and the one that asked first


def test_in_all_there_are_no_more_connections_than_the_limit(tmp_path: Path) -> None:
    with running(tmp_path, limits__connections=8) as server, ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(connect(server, "127.0.0.3"))
            stack.enter_context(connect(server))
        reasons = ("total", "address")
        until(lambda: sum(server.metric("connections_refused_total", reason=why) for why in reasons) >= 24 - 8)
        assert open_now(server) == 8
        assert an_agent_is_heard(server)  # on the connection that it has


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 no request\r\n\r\n",
        POST + b"authorization: Bearer ee_wrong\r\ncontent-length: 4\r\n\r\nabcd",
        b"POST /api/v1/write HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nabcd",
        b"GET /api/v1/nodes HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ],
    ids=["garbage", "token", "remote write", "too many"],
)
def test_too_much_nonsense_closes_the_door_until_its_time_is_over(
    tmp_path: Path, nonsense: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    clock = FakeClock()
    rare: dict[str, Any] = {"limits__bad_requests_per_s": 1.0, "limits__bad_burst": 3, "limits__address_burst": 1}
    with running(tmp_path, clock, **rare, limits__address_requests_per_s=0.5) as server:
        for _ in range(40):
            with connect(server) as connection:
                try:
                    connection.sendall(nonsense)
                    connection.shutdown(socket.SHUT_WR)
                except OSError:  # it was closed meanwhile
                    continue
                said(connection)
        assert server.metric("connections_refused_total", reason="rate") >= 30
        assert an_agent_is_heard(server)
        assert len(caplog.records) < 10
        clock.advance(10.0)
        with connect(server) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert said(connection).startswith(b"HTTP/1.1 200")


def test_nonsense_on_one_connection_ends_it(tmp_path: Path) -> None:
    with running(tmp_path, FakeClock(), limits__bad_burst=3) as server, connect(server) as connection:
        asked = POST + b"authorization: Bearer ee_wrong\r\ncontent-length: 0\r\n\r\n"
        connection.sendall(asked * 50)
        answered = said(connection)
        assert answered.count(b"HTTP/1.1 401") == 4
        assert server.metric("connections_closed_total", reason="rate") == 1


@pytest.mark.parametrize(
    "beginning",
    [b"", b"GET /api/v1/nodes HTTP/1.1\r\nhost: ", POST, b"POST /api/v1/fr"],
    ids=["nothing", "half a head", "half an agent's head", "half a line"],
)
def test_a_head_that_does_not_come_ends_its_connection(tmp_path: Path, beginning: bytes) -> None:
    with running(tmp_path, limits__head_timeout_s=0.3) as server, connect(server) as connection:
        connection.sendall(beginning)
        assert said(connection).startswith(b"HTTP/1.1 408")
        assert server.metric("connections_closed_total", reason="slow_head") == 1
        assert an_agent_is_heard(server)


def test_a_head_that_comes_in_drops_has_no_longer_than_one_that_does_not(tmp_path: Path) -> None:
    with running(tmp_path, limits__head_timeout_s=0.3) as server, connect(server) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        began_s = time.monotonic()
        connection.settimeout(0.05)
        answered = b""
        while not answered and time.monotonic() < began_s + WITHIN_S:
            connection.sendall(b"x")
            try:
                answered = connection.recv(1 << 16)
            except TimeoutError:
                continue
        assert answered.startswith(b"HTTP/1.1 408")


def test_an_agents_body_that_comes_in_drops_has_no_longer_than_one_that_does_not(tmp_path: Path) -> None:
    with running(tmp_path, ingest__body_timeout_s=0.2) as server, connect(server) as connection:
        connection.sendall(POST + b"content-length: 1000\r\n\r\n")
        began_s = time.monotonic()
        connection.settimeout(0.05)
        answered = b""
        while not answered and time.monotonic() < began_s + WITHIN_S:
            connection.sendall(b"x")
            try:
                answered = connection.recv(1 << 16)
            except TimeoutError:
                continue
        assert answered.startswith(b"HTTP/1.1 408")


def test_a_body_for_the_api_that_does_not_come_is_answered(tmp_path: Path) -> None:
    with running(tmp_path, ingest__body_timeout_s=0.2) as server, connect(server) as connection:
        connection.sendall(b"POST /api/v1/subscriptions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{")
        answered = said(connection)
        assert answered.startswith(b"HTTP/1.1 408")
        assert b'"reason":"slow"' in answered


def test_who_does_not_read_his_answers_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_protocol, "STALL_S", 0.2)
    with running(tmp_path) as server, connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(0.2)
        try:
            for _ in range(4_000):
                connection.sendall(b"GET /app/chart.js HTTP/1.1\r\nhost: x\r\n\r\n")
        except (TimeoutError, ConnectionError):
            pass
        until(lambda: server.metric("connections_closed_total", reason="slow_reader") == 1)
        assert an_agent_is_heard(server)


def test_nonsense_after_an_answer_that_came_early_ends_the_connection_and_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(tmp_path) as server, connect(server) as connection:
        connection.sendall(b"POST /api/v1/frames HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 415")
        connection.sendall(b"no chunk\r\n")
        said(connection)
        assert server.metric("connections_closed_total", reason="malformed") == 1
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@given(st.lists(st.tuples(st.sampled_from(["10.0.0.1", "10.0.0.2", "fe80::1"]), st.booleans(), st.booleans())))
def test_whatever_comes_and_goes_the_count_is_right(visits: list[tuple[str, bool, bool]]) -> None:
    limits = Limits(LimitSettings(connections=6, address_connections=2), FakeClock(), lambda _: None)
    connections = Connections(limits, FakeClock(), lambda _: None)
    here: list[Connection] = []
    strangers = 0
    for address, proves, leaves in visits:
        client = connections.admit(address)
        if client is None:
            continue
        strangers += 1
        if proves:
            client.proven()
            client.proven()
            strangers -= 1
        if leaves:
            client.end()
            client.end()
            strangers -= not proves
        else:
            here.append(client)
        assert (connections.count, connections.unauthenticated) == (len(here), strangers)
        assert connections.count <= 6
    for client in here:
        client.end()
    assert (connections.count, connections.unauthenticated) == (0, 0)
