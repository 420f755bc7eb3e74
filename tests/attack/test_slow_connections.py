"""Hundreds of connections that send and read next to nothing, beside agents that are answered as ever."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from eagle_eye.server.security.auth import mint
from eagle_eye.server.store.store import Change
from tests.server.builders import NOW, Running, body, frame, running

SLOW = 200
FRAMES = 100
ANSWER_S = 5.0  # what an agent waits for an answer (docs/reference/wire.md), whatever else the machine does
TRICKLE_S = 0.2
HEAD = b"POST /api/v1/frames HTTP/1.1\r\nhost: localhost\r\n"
LONG = b"content-type: application/x-eagle-eye-frames\r\ncontent-length: 1000000\r\n\r\n"
# What a connection sends at first, and then again and again.
WAYS: dict[str, tuple[bytes, bytes]] = {
    "heads that never end": (HEAD, b"x-a: b\r\n"),
    "bodies that never end": (HEAD + LONG, b"\x00"),
    "nothing": (b"", b""),
    "answers that nobody reads": (b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 3, b""),
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path, limits__address_connections=SLOW + 50, limits__agent_burst=1_000) as started:
        yield started


@contextmanager
def slow(server: Running, begins: bytes, again: bytes) -> Iterator[Callable[[], int]]:
    """Hold the connections open; yields what counts those that the server still serves."""
    url = httpx.URL(server.url)
    over = threading.Event()
    with ExitStack() as stack:
        held = []
        for _ in range(SLOW):
            one = stack.enter_context(socket.create_connection((url.host, url.port or 0), timeout=10))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
            one.sendall(begins)
            one.setblocking(False)
            held.append(one)

        def trickle() -> None:
            while not over.wait(TRICKLE_S):
                for one in held:
                    with suppress(OSError):
                        one.send(again)

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            yield lambda: server.dispatcher.connections.count
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize("way", WAYS)
def test_agents_are_acknowledged_beside_them(server: Running, way: str) -> None:
    text, token = mint("agent", "n1", NOW, None)
    server.dispatcher.services.store.commit(Change(tokens=(token,)))
    begins, again = WAYS[way]
    with slow(server, begins, again) as count:
        assert count() >= SLOW // 2
        took_s = []
        for sequence in range(1, FRAMES + 1):
            began_s = time.monotonic()
            answer = server.send(body(frame(sequence)), authorization=f"Bearer {text}")
            took_s.append(time.monotonic() - began_s)
            assert (answer.status_code, answer.json()["watermark"]) == (200, sequence)
        assert sum(one < ANSWER_S for one in took_s) >= 0.95 * FRAMES
    assert server.client.get("/healthz").status_code == 200


def test_those_that_never_end_their_head_are_closed(tmp_path: Path) -> None:
    with running(tmp_path, limits__head_timeout_s=1.0, limits__address_connections=SLOW + 50) as server:
        begins, again = WAYS["heads that never end"]
        with slow(server, begins, again) as count:
            deadline_s = time.monotonic() + 60.0
            while count() > 1:  # the client's own
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
        assert server.metric("connections_closed_total", reason="slow_head") >= SLOW // 2
