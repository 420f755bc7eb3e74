"""Bodies that are refused: a client that writes all of the body first gets the answer, and nobody writes for ever."""

from __future__ import annotations

import asyncio
import functools
import http.client
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path

import httpx
import pytest
import uvicorn

from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.transport import connections as guarded_protocol
from eagle_eye.server.transport.raw_http import ASGIMessage, read_body
from tests.server.builders import Running, running

CHUNK_BYTES = 1 << 16
BODY_BYTES = 9 << 20  # what agents and Prometheus may send is 8 MiB, the API's limit is lower
REFUSED = {
    "/api/v1/frames": {"content-type": "application/x-eagle-eye-frames"},
    "/api/v1/write": {"content-type": "application/x-protobuf", "content-encoding": "snappy"},
    "/api/v1/subscriptions": {"content-type": "application/json"},
    "/api/v1/tickets": {"content-type": "application/json"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("data")) as found:
        yield found


def address(server: Running) -> tuple[str, int]:
    url = httpx.URL(server.url)
    return url.host, url.port or 0


def reason(document: bytes) -> str:
    found = httpx.Response(200, content=document).json()
    return str(found["reason"])


class Sender:
    """Sends so many chunks, and says after the last one that there are more."""

    def __init__(self) -> None:
        self.sent = 0

    async def receive(self) -> ASGIMessage:
        self.sent += 1
        return {"type": "http.request", "body": bytes(CHUNK_BYTES), "more_body": True}


@pytest.mark.parametrize(("headers", "read"), [({}, 2), ({"content-length": "100000"}, 0)])
def test_a_body_is_read_no_further_than_its_limit(headers: Mapping[str, str], read: int) -> None:
    sender = Sender()
    with pytest.raises(Refusal) as refused:
        asyncio.run(read_body(sender.receive, headers, CHUNK_BYTES, 5.0, "ingest.body_bytes_max"))
    assert (refused.value.status, refused.value.reason) == (413, "oversized")
    assert sender.sent == read


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", REFUSED)
def test_who_writes_all_of_a_body_before_reading_learns_that_it_is_too_long(
    server: Running, path: str, chunked: bool
) -> None:
    with closing(http.client.HTTPConnection(*address(server), timeout=30)) as client:
        body = iter([bytes(CHUNK_BYTES)] * (BODY_BYTES // CHUNK_BYTES)) if chunked else bytes(BODY_BYTES)
        client.request("POST", path, body=body, headers=REFUSED[path], encode_chunked=chunked)
        answer = client.getresponse()
        assert (answer.status, answer.headers["content-type"]) == (413, "application/problem+json")
        assert reason(answer.read()) == "oversized"
        client.request("GET", "/healthz")  # over the same connection
        assert client.getresponse().status == 200


@pytest.mark.parametrize("path", REFUSED)
def test_httpx_gets_the_answer_too(server: Running, path: str) -> None:
    answer = server.client.post(path, content=bytes(BODY_BYTES), headers=REFUSED[path])
    assert (answer.status_code, answer.json()["reason"]) == (413, "oversized")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("more", ["Expect: 100-continue", "Expect:", "Transfer-Encoding: chunked"])
def test_curl_gets_the_answer_too(server: Running, tmp_path: Path, more: str) -> None:
    file = tmp_path / "body"
    file.write_bytes(bytes(BODY_BYTES))
    words = ["--header", f"content-type: {REFUSED['/api/v1/frames']['content-type']}", "--header", more]
    words += ["--silent", "--show-error", "--max-time", "30", "--data-binary", f"@{file}"]
    done = subprocess.run(["curl", *words, f"{server.url}/api/v1/frames"], capture_output=True, check=True)
    assert reason(done.stdout) == "oversized"


def head(path: str, *lines: str) -> bytes:
    kind = REFUSED[path]["content-type"]
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: localhost", f"content-type: {kind}", *lines, "", ""]).encode()


@pytest.mark.parametrize("path", ["/api/v1/frames", "/api/v1/subscriptions"])
def test_who_asks_before_sending_is_not_told_to_send(server: Running, path: str) -> None:
    with socket.create_connection(address(server), timeout=30) as client:
        client.sendall(head(path, f"content-length: {BODY_BYTES}", "expect: 100-continue"))
        assert client.recv(CHUNK_BYTES).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("path", ["/api/v1/frames", "/api/v1/subscriptions"])
def test_who_asks_before_sending_and_does_not_wait_learns_it_too(server: Running, path: str) -> None:
    with closing(http.client.HTTPConnection(*address(server), timeout=30)) as client:
        headers = {**REFUSED[path], "expect": "100-continue"}
        client.request("POST", path, body=bytes(BODY_BYTES), headers=headers)
        assert client.getresponse().status == 413


def test_a_body_that_never_ends_is_read_on_for_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_protocol, "UNREAD_BYTES_MAX", 1 << 20)
    sent = 0
    with running(tmp_path) as server, socket.create_connection(address(server), timeout=30) as client:
        client.sendall(head("/api/v1/tickets", f"content-length: {1 << 40}"))
        with suppress(ConnectionError):
            while sent < 256 << 20:
                sent += client.send(bytes(CHUNK_BYTES))
        assert sent < 64 << 20  # what the system's buffers hold is sent, too
        assert server.metric("connections_closed_total", reason="unread_body") == 1


def test_the_rest_of_a_body_is_waited_for_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_protocol, "UNREAD_S", 0.1)
    with running(tmp_path) as server, socket.create_connection(address(server), timeout=30) as client:
        client.sendall(head("/api/v1/tickets", f"content-length: {BODY_BYTES}"))
        said = b"".join(iter(lambda: client.recv(CHUNK_BYTES), b""))
        assert said.startswith(b"HTTP/1.1 413 ")
        assert server.metric("connections_closed_total", reason="unread_body") == 1


def test_a_connection_that_is_idle_after_a_refused_body_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn, "Config", functools.partial(uvicorn.Config, timeout_keep_alive=0.2))  # type: ignore[arg-type]
    with running(tmp_path) as server, socket.create_connection(address(server), timeout=30) as client:
        client.sendall(head("/api/v1/tickets", f"content-length: {BODY_BYTES}") + bytes(BODY_BYTES))
        said = b"".join(iter(lambda: client.recv(CHUNK_BYTES), b""))
        assert said.startswith(b"HTTP/1.1 413 ")
        assert server.metric("connections_closed_total", reason="unread_body") == 0
