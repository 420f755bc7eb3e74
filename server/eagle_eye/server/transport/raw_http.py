"""HTTP below FastAPI: bodies with limits, answers, allowed methods, names in paths.

Also what requests from one of our servers to another have in common: their marks, and the client that sends them.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

import certifi
import httpx
from fastapi import FastAPI
from starlette.convertors import Convertor, register_url_convertor
from starlette.routing import Match

from eagle_eye.schema.problem import CONTENT_TYPE
from eagle_eye.server.model.errors import NO_HEADERS, Refusal

ASGIMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[ASGIMessage]]
Send = Callable[[ASGIMessage], Awaitable[None]]
_CLOSE: Mapping[str, str] = MappingProxyType({"Connection": "close"})  # do not wait further for a slow client
Taker = Callable[[ASGIMessage, Receive, Send], Awaitable[None]]


def headers_of(scope: ASGIMessage) -> dict[str, str]:
    """Return a request's headers, names in lower case."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


async def read_body(receive: Receive, headers: Mapping[str, str], limit: int, timeout_s: float, key: str) -> bytes:
    """Return a request's body. Raises Refusal 400, 408 and 413; ``key`` names the setting of the limit."""
    declared = headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > limit:
        raise _too_large(f"{declared} bytes are announced", limit, key)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refusal(400, "truncated", "the connection ended before the body did")
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > limit:
                    raise _too_large(f"more than {limit} bytes arrived", limit, key)
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise Refusal(
            408, "slow", f"the body did not arrive within {timeout_s:g} s; send less at a time", _CLOSE
        ) from None


async def refuse(send: Send, refusal: Refusal) -> None:
    """Send the problem document of a refusal."""
    await answer(send, refusal.status, CONTENT_TYPE, refusal.document(), refusal.headers)


async def answer(
    send: Send, status: int, content_type: str, body: bytes, headers: Mapping[str, str] = NO_HEADERS
) -> None:
    """Send an answer; 204 has neither content type nor length."""
    head: list[tuple[bytes, bytes]] = []
    if status != 204:
        head = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    head += [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


def _too_large(what: str, limit: int, key: str) -> Refusal:
    return Refusal(413, "oversized", f"{what}; a request may have {limit} ({key}): send less at a time")


# The methods that a path allows (RFC 9110): its routes' own, HEAD with GET, and OPTIONS.

_ROUTED_METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")


def methods_of_route(api: FastAPI, scope: MutableMapping[str, Any]) -> list[str]:
    """Return the methods that the request's path allows, empty for an unknown path."""
    return [
        method
        for method in _ROUTED_METHODS
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in api.routes)
    ]


def allow_header(methods: Collection[str]) -> Mapping[str, str]:
    """Return the Allow header for these methods and those that need no route."""
    more = {"OPTIONS", "HEAD"} if "GET" in methods else {"OPTIONS"}
    return {"Allow": ", ".join(sorted({*methods} | more))}


def method_refusal(method: str, methods: Collection[str]) -> Refusal:
    """Return the refusal of a method that is not allowed."""
    named = allow_header(methods)
    return Refusal(405, "method", f"{method[:20]} does not apply here; this takes {named['Allow']}", named)


def headless(send: Send) -> Send:
    """Return a ``send`` for HEAD: it ends the answer where its body begins, even that of an endless stream."""
    ended = False

    async def send_head(message: ASGIMessage) -> None:
        nonlocal ended
        if message["type"] == "http.response.start":
            await send(message)
        elif not ended:
            ended = True
            await send({"type": "http.response.body", "body": b""})

    return send_head


# Names of jobs and nodes in a request's path: ``%2F`` is part of the name, a plain slash ends it. ASGI passes the path
# decoded, where both look the same; its ``raw_path`` distinguishes them.

# What precedes a name.
_NAMED_PATHS = tuple(tuple(head.encode().split(b"/")) for head in ("/api/v1/jobs", "/api/v1/nodes", "/api/v1/nvrx"))
_SLASH = "\uffff"  # replaces a name's own slashes during routing; a noncharacter, so never part of a name


class _NameConvertor(Convertor[str]):
    """A path parameter ``{job:name}``: one segment, which may contain encoded slashes."""

    regex = "[^/]+"

    def convert(self, value: str) -> str:
        return value.replace(_SLASH, "/")

    def to_string(self, value: str) -> str:
        return value.replace("/", _SLASH)


def register_name_convertor() -> None:
    """Register the converter, so that routes created from now on may use ``{...:name}``."""
    register_url_convertor("name", _NameConvertor())


def routed(scope: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Return the request's scope with encoded slashes replaced in the path; the same scope if there are none."""
    raw: bytes = scope.get("raw_path") or b""
    if b"%2f" not in raw.lower():
        return scope
    segments = raw.split(b"/")
    head, rest = segments[:4], segments[4:]
    if tuple(head) not in _NAMED_PATHS or not rest:
        return scope
    name, *more = (unquote(segment.decode("ascii", "replace")) for segment in rest)
    return {**scope, "path": "/".join([*(part.decode() for part in head), name.replace("/", _SLASH), *more])}


# Requests from one of our servers to another.

# Of a request that a standby sent on: the leader that it was meant for leads no more, and it goes no further.
FORWARDED = b"eagle-eye-forwarded"
# Of a request that a cell's leader sent on to another cell's, which answers for its own cell alone.
OF_ONE_CELL = b"eagle-eye-of-one-cell"
SERVER_CONNECT_S = 2.0
SERVER_ANSWER_S = 60.0


@functools.cache
def _authorities() -> ssl.SSLContext:
    """Return who is trusted; read once, for all clients."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def server_client(answer_s: float = SERVER_ANSWER_S) -> httpx.AsyncClient:
    """Return a client for other servers of ours."""
    return httpx.AsyncClient(
        verify=_authorities(),
        trust_env=False,
        follow_redirects=False,
        timeout=httpx.Timeout(answer_s, connect=SERVER_CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
    )
