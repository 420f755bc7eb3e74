"""The methods that a path of the API allows (RFC 9110): its routes' own, HEAD with GET, and OPTIONS."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

from fastapi import FastAPI
from starlette.routing import Match

from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.transport.raw_http import ASGIMessage, Send

_ROUTED = ("DELETE", "GET", "PATCH", "POST", "PUT")


def of_route(api: FastAPI, scope: MutableMapping[str, Any]) -> list[str]:
    """Return the methods that the request's path allows, empty for an unknown path."""
    return [
        method
        for method in _ROUTED
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in api.routes)
    ]


def allow(methods: Collection[str]) -> Mapping[str, str]:
    """Return the Allow header for these methods and those that need no route."""
    more = {"OPTIONS", "HEAD"} if "GET" in methods else {"OPTIONS"}
    return {"Allow": ", ".join(sorted({*methods} | more))}


def refusal(method: str, methods: Collection[str]) -> Refusal:
    """Return the refusal of a method that is not allowed."""
    named = allow(methods)
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
