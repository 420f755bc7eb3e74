"""A standby sends a request on as it came, and the leader's answer back as it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from eagle_eye.server.security.auth import CERTIFICATE_NAMES
from eagle_eye.server.security.settings import TlsSettings
from eagle_eye.server.transport.raw_http import FORWARDED
from eagle_eye.server.web.forwarding import Forwarding, LeaderUnreached, UnreachedNodes

LEADER = "http://leader:8470"
Answering = Callable[[httpx.Request], httpx.Response]


def scope(*headers: tuple[bytes, bytes], method: str = "POST", **more: Any) -> dict[str, Any]:
    return {
        "type": "http",
        "method": method,
        "raw_path": b"/api/v1/nodes/n%201/exclude",
        "query_string": b"why=x",
        "headers": [(b"host", b"standby:8470"), (b"authorization", b"Bearer ee_1"), *headers],
        **more,
    }


class Client:
    """The client of one request: its body in parts; it stays until it has its answer, unless it ``leaves``."""

    def __init__(self, *parts: bytes, leaves: bool = False) -> None:
        self.parts = list(parts)
        self.leaves = leaves
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        if self.parts:
            return {"type": "http.request", "body": self.parts.pop(0), "more_body": bool(self.parts)}
        if not self.leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)


def ask(
    asked: dict[str, Any], client: Client, answering: Answering, leader: str = LEADER, needed: bool = False
) -> list[dict[str, Any]]:
    """Have the request answered by a leader that answers so, and return what was sent."""

    async def run() -> None:
        transport = httpx.MockTransport(answering)
        tls = TlsSettings(client_ca_file="ca.pem", client_certificates="all") if needed else TlsSettings()
        forwarding = Forwarding(
            lambda: leader,
            tls,
            UnreachedNodes(1.0, time.monotonic),
            httpx.AsyncClient(transport=transport, timeout=5.0),
        )
        await asyncio.wait_for(forwarding.answer(asked, client.receive, client.send), 5.0)
        await forwarding.close()

    asyncio.run(run())
    return client.sent


def test_path_headers_and_body_arrive_as_they_came_and_the_host_is_the_clients() -> None:
    got: list[httpx.Request] = []

    def answering(request: httpx.Request) -> httpx.Response:
        got.append(request)
        return httpx.Response(200)

    ask(scope((b"content-length", b"4"), (b"connection", b"close")), Client(b"ab", b"cd"), answering)
    (request,) = got
    assert (str(request.url), request.content) == (f"{LEADER}/api/v1/nodes/n%201/exclude?why=x", b"abcd")
    assert request.headers["host"] == "standby:8470"  # by which the leader knows a web page that misuses a browser
    assert request.headers["authorization"] == "Bearer ee_1"
    assert request.headers["content-length"] == "4"
    assert "connection" not in request.headers


def test_status_headers_and_bytes_of_the_answer_are_the_leaders() -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"sl"
        yield b"ow"

    def answering(_: httpx.Request) -> httpx.Response:
        return httpx.Response(429, headers={"retry-after": "7", "date": "then"}, content=parts())

    start, *bodies = ask(scope(), Client(b""), answering)
    assert start["status"] == 429
    assert (b"retry-after", b"7") in start["headers"]
    assert b"date" not in dict(start["headers"])  # the standby's server adds its own
    assert b"".join(one["body"] for one in bodies) == b"slow"
    assert [one.get("more_body", False) for one in bodies][-1] is False


def test_an_answer_that_sends_a_node_to_another_cell_names_that_cells_leader() -> None:
    other = {"eagle-eye-leader": "http://west:8470", "eagle-eye-cell-leader": "http://west:8470"}
    start, *_ = ask(scope(), Client(b""), lambda _: httpx.Response(503, headers=other))
    assert [value for name, value in start["headers"] if name == b"eagle-eye-leader"] == [b"http://west:8470"]


def test_an_answer_names_the_leader_that_this_server_sent_it_to_and_no_other() -> None:
    other = {"eagle-eye-leader": "http://another:8470"}  # as a server says that leads no more
    start, *_ = ask(scope(), Client(b""), lambda _: httpx.Response(503, headers=other))
    assert [value for name, value in start["headers"] if name == b"eagle-eye-leader"] == [LEADER.encode()]


@pytest.mark.parametrize(
    ("asked", "leader", "needed", "why"),
    [
        (scope(), "", False, "nobody leads"),
        (scope((FORWARDED, b"1")), LEADER, False, "took this one for the leader"),
        (scope(state={CERTIFICATE_NAMES: frozenset({"n1"})}), LEADER, False, "certificate"),
        (scope(), LEADER, True, "certificate"),
    ],
    ids=["no leader", "sent on before", "shown a certificate", "certificates needed"],
)
def test_what_must_not_be_sent_on_is_not(asked: dict[str, Any], leader: str, needed: bool, why: str) -> None:
    client = Client(b"")
    with pytest.raises(LeaderUnreached, match=why):
        ask(asked, client, lambda _: httpx.Response(200), leader, needed)
    assert client.sent == []


def test_a_leader_that_does_not_answer_is_named_without_an_answer_to_the_client() -> None:
    def answering(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("to an address")

    client = Client(b"")
    with pytest.raises(LeaderUnreached, match=r"http://leader:8470 leads and cannot be reached \(ConnectError\)"):
        ask(scope(), client, answering)
    assert client.sent == []


def test_an_endless_answer_ends_when_its_client_leaves() -> None:
    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        await asyncio.Event().wait()

    ask(scope(method="GET"), Client(leaves=True), lambda _: httpx.Response(200, content=events()))


def test_a_request_that_a_silent_leader_does_not_answer_ends_when_the_server_stops_standing_by() -> None:
    async def run() -> None:
        asked = asyncio.Event()

        async def silent(_: httpx.Request) -> httpx.Response:
            asked.set()
            await asyncio.Event().wait()
            return httpx.Response(200)

        client = httpx.AsyncClient(transport=httpx.MockTransport(silent))
        forwarding = Forwarding(lambda: LEADER, TlsSettings(), UnreachedNodes(1.0, time.monotonic), client)
        answer = asyncio.create_task(forwarding.answer(scope(), Client(b"").receive, Client().send))
        await asked.wait()
        forwarding.stop()
        with pytest.raises(LeaderUnreached, match="no longer stands by"):
            await asyncio.wait_for(answer, 5.0)
        await forwarding.close()

    asyncio.run(run())
