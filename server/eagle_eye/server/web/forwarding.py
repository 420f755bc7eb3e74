"""Sends requests on from a standby to the server that leads, and answers back, unchanged. Touches: the network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from eagle_eye.schema.problem import CELL_LEADER_HEADER, LEADER_HEADER
from eagle_eye.server.security.auth import CERTIFICATE_NAMES
from eagle_eye.server.security.settings import TlsSettings
from eagle_eye.server.transport.other_servers import FORWARDED, client
from eagle_eye.server.transport.raw_http import ASGIMessage, Receive, Send
from eagle_eye.server.web.unreached_nodes import UnreachedNodes

_LEADER = LEADER_HEADER.lower().encode()
# Of one connection alone (RFC 9110, section 7.6.1), or set anew by who answers.
_OF_A_CONNECTION = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"date", b"server", _LEADER),
    }
)


class LeaderUnreached(Exception):
    """The leader gave no answer, and nothing was sent to the client; the text says why."""


class Forwarding:
    """Answers with what the leader answers. ``leader()`` is its URL, "" where there is none."""

    def __init__(
        self,
        leader: Callable[[], str],
        tls: TlsSettings,
        unreached: UnreachedNodes,
        to: httpx.AsyncClient | None = None,
    ) -> None:
        """``tls`` says whether every client must show the servers a certificate of its own."""
        self.unreached = unreached
        self._leader = leader
        self._certificates_needed = bool(tls.client_ca_file) and tls.client_certificates == "all"
        self._client = to or client()
        self._open: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def leader(self) -> str:
        """The leader's URL, "" where there is none."""
        return self._leader()

    async def answer(self, scope: ASGIMessage, receive: Receive, send: Send) -> None:
        """Send the request on and answer it, with the leader's name. Raises LeaderUnreached."""
        await self.answer_of(self._leader(), scope, receive, send)

    async def answer_of(
        self, leader: str, scope: ASGIMessage, receive: Receive, send: Send, mark: bytes = FORWARDED
    ) -> None:
        """Send the request on to a server, "" for none, and answer it, with its name. Raises LeaderUnreached.

        What has the ``mark`` already goes no further.
        """
        self._loop = asyncio.get_running_loop()
        request = self._request(leader, scope, receive, mark)
        asking = asyncio.create_task(self._asked(leader, request))
        self._open.add(asking)
        try:
            await asyncio.wait({asking})
        finally:
            self._open.discard(asking)
            asking.cancel()
        if asking.cancelled():
            raise LeaderUnreached("this server no longer stands by")
        response = asking.result()
        passing = asyncio.create_task(_pass_on(response, leader, send))
        gone = asyncio.create_task(_end_of(receive))
        self._open.add(passing)
        try:
            await asyncio.wait({passing, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._open.discard(passing)
            for task in (passing, gone):
                task.cancel()
            # A leader that breaks off has the client's connection closed: its answer is not whole.
            await asyncio.gather(passing, gone, return_exceptions=True)
            await response.aclose()

    def stop(self) -> None:
        """End the requests that are under way, answered or not; may be called from any thread or a signal handler."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._open])

    async def close(self) -> None:
        """Release the connections."""
        await self._client.aclose()

    def _request(self, leader: str, scope: ASGIMessage, receive: Receive, mark: bytes) -> httpx.Request:
        named = {name for name, _ in scope["headers"]}
        if not leader:
            raise LeaderUnreached("nobody leads at present")
        if mark in named:
            raise LeaderUnreached("another server took this one for the leader")
        if self._certificates_needed or scope.get("state", {}).get(CERTIFICATE_NAMES):
            raise LeaderUnreached("a client's certificate counts on its own connection only")
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        headers = [one for one in scope["headers"] if one[0] not in _OF_A_CONNECTION and one[0] != FORWARDED]
        has_body = b"content-length" in named or b"transfer-encoding" in named
        return httpx.Request(
            scope["method"],
            httpx.URL(leader).copy_with(raw_path=scope["raw_path"] + query),
            headers=[*headers, (mark, b"1")],
            content=_body(receive) if has_body else None,
        )

    async def _asked(self, leader: str, request: httpx.Request) -> httpx.Response:
        try:
            return await self._client.send(request, stream=True)
        except (httpx.HTTPError, OSError) as error:
            # Only the type of error: its text may contain an address.
            raise LeaderUnreached(f"{leader} leads and cannot be reached ({type(error).__name__})") from error


async def _pass_on(response: httpx.Response, leader: str, send: Send) -> None:
    headers = [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in _OF_A_CONNECTION]
    other = response.headers.get(CELL_LEADER_HEADER)  # of another cell, which judges the node's job
    headers.append((_LEADER, (other or leader).encode("latin-1", "replace")))
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    async for chunk in response.aiter_raw():
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise OSError("the client left before its request was whole")
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


async def _end_of(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
