"""The outermost layer: frames go straight to ingest, the page is served, all else is the API's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI

from eagle_eye.server.ingest import PATH, Ingest
from eagle_eye.server.services import Services

ASGIMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[ASGIMessage]]
Send = Callable[[ASGIMessage], Awaitable[None]]

_FOLDER = Path(__file__).parent / "page"
_PAGES = MappingProxyType(
    {
        "/": ("index.html", b"text/html; charset=utf-8"),
        "/app.js": ("app.js", b"text/javascript; charset=utf-8"),
        "/style.css": ("style.css", b"text/css; charset=utf-8"),
    }
)
# Everything that the page needs comes from this server; it loads and runs nothing else.
_SECURITY = (
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Front:
    """The server as an ASGI application."""

    def __init__(self, api: FastAPI, ingest: Ingest, services: Services) -> None:
        self.api = api
        self.services = services
        self._ingest = ingest
        self._files = {
            path: ((_FOLDER / name).read_bytes(), content_type) for path, (name, content_type) in _PAGES.items()
        }

    async def __call__(self, scope: ASGIMessage, receive: Receive, send: Send) -> None:
        """Answer one connection's event."""
        if scope["type"] != "http":
            await self.api(scope, receive, send)
            return
        path = scope["path"]
        if path == PATH:
            await self._ingest(scope, receive, send)
        elif path in self._files and scope["method"] in ("GET", "HEAD"):
            await self._page(path, scope["method"], send)
        else:
            await self.api(scope, receive, _secured(send))

    def stop(self) -> None:
        """Let the readers of /api/v1/events go; may be called from any thread or a signal handler."""
        self.services.stopping.set()
        self.services.signal.notify()

    async def _page(self, path: str, method: str, send: Send) -> None:
        content, content_type = self._files[path]
        headers = [
            (b"content-type", content_type),
            (b"content-length", str(len(content)).encode()),
            (b"cache-control", b"no-cache"),
            *_SECURITY,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if method == "HEAD" else content})


def _secured(send: Send) -> Send:
    async def secured(message: ASGIMessage) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *_SECURITY]
        await send(message)

    return secured
