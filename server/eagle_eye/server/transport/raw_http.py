"""Reads bodies with limits, and sends the answers of the telemetry endpoints, which bypass FastAPI."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

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
