"""The outermost ASGI layer: routes telemetry to its endpoints, serves the page, passes the rest to the API."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from fastapi import FastAPI

from eagle_eye.schema.problem import CONTENT_TYPE, LEADER_HEADER, STANDBY_HEADER, WITHOUT_CELLS_HEADER
from eagle_eye.server.api import credentials
from eagle_eye.server.api.description import OPEN
from eagle_eye.server.api.visibility import looked_through
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.ingest.frames import PATH, Ingest
from eagle_eye.server.ingest.remote_write.endpoint import PATH as WRITE_PATH
from eagle_eye.server.ingest.remote_write.endpoint import RemoteWrite
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import Refusal, StoreUnavailable
from eagle_eye.server.monitor.cells import Cells
from eagle_eye.server.security.auth import Credentials, Limits, Principals, Tokens
from eagle_eye.server.security.people import People
from eagle_eye.server.security.tls import Certificates
from eagle_eye.server.store.leadership import Leadership
from eagle_eye.server.store.store import ChangeSignal, Store
from eagle_eye.server.telemetry.counters import Telemetry
from eagle_eye.server.transport import raw_http
from eagle_eye.server.transport.connections import (
    CONNECTION,
    ConnectionCollector,
    Connections,
    CountedConnection,
    is_bad,
)
from eagle_eye.server.transport.raw_http import FORWARDED, ASGIMessage, Receive, Send, Taker, answer, headers_of, routed
from eagle_eye.server.web.forwarding import Asked, Forwarding, JointAnswers, LeaderUnreached
from eagle_eye.server.web.frame_protocol import Heads
from eagle_eye.server.web.frame_protocol import Taker as FrameTaker

# The live page's files as served, and its content security policy.

PAGE_FOLDER = Path(__file__).parent / "page"
_PAGE_TYPES: Mapping[str, bytes] = MappingProxyType(
    {
        ".html": b"text/html; charset=utf-8",
        ".js": b"text/javascript; charset=utf-8",
        ".mjs": b"text/javascript; charset=utf-8",
        ".css": b"text/css; charset=utf-8",
        ".svg": b"image/svg+xml",
    }
)
_IMPORT_MAP = re.compile(rb'<script type="importmap">(.*?)</script>', re.DOTALL)


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file; ``etag`` changes with its content."""

    content: bytes
    content_type: bytes
    etag: bytes


def read_page(folder: Path = PAGE_FOLDER) -> dict[str, PageFile]:
    """Return the files to serve, by path; "/" is index.html. Files of types that browsers do not need are left out."""
    found: dict[str, PageFile] = {}
    for file in sorted(folder.rglob("*")):
        content_type = _PAGE_TYPES.get(file.suffix)
        if content_type is None or not file.is_file():
            continue
        content = file.read_bytes()
        name = file.relative_to(folder).as_posix()
        etag = b'"%s"' % hashlib.sha256(content).hexdigest()[:32].encode()
        found["/" if name == "index.html" else f"/{name}"] = PageFile(content, content_type, etag)
    return found


def content_security_policy(index: bytes) -> bytes:
    """Return the policy for a page that loads and runs only this server's files.

    Browsers support import maps only inline, so the one in ``index`` is allowed by its hash. Trusted types are required
    and no policy may create any, so that a script that assigns text as markup causes an error, not an element.
    """
    maps = [base64.b64encode(hashlib.sha256(found).digest()).decode() for found in _IMPORT_MAP.findall(index)]
    scripts = " ".join(["'self'", *(f"'sha256-{digest}'" for digest in maps)])
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script';"
        " trusted-types 'none'"
    ).encode()


# The dispatcher.

_SECURITY = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
# Browsers that have connected once over TLS will not connect without it for a year.
_HSTS = (b"strict-transport-security", b"max-age=31536000")
# Paths that stay reachable when others send too many requests, for monitoring.
_UNLIMITED = frozenset({"/healthz", "/leadz", "/readyz"})
# Paths that a standby answers for itself, beside the page's files.
_OWN = _UNLIMITED | {"/api/v1/leader", "/metrics", "/openapi.json"}
_FOR_PROGRAMS = "/api/"  # where nobody strays by a mistyped address
MISSING = "/missing.html"  # the page's file for addresses that lead nowhere
RETRY_LEADER_S = 1  # a leader is found within seconds
# Paths whose answers do not prove authentication.
_OPEN = OPEN | {"/openapi.json"} | credentials.OPEN


class Needs(Protocol):
    """The dispatcher's dependencies."""

    cells: Cells | None
    certificates: Certificates | None
    clock: Clock
    config: ServerConfig
    leadership: Leadership | None
    limits: Limits
    people: People
    signal: ChangeSignal
    stopping: threading.Event
    store: Store
    telemetry: Telemetry
    tokens: Tokens


ServicesT = TypeVar("ServicesT", bound=Needs)


class Dispatcher(Generic[ServicesT]):
    """The server as an ASGI application. ``reload()`` has the configuration reread, from any thread."""

    def __init__(
        self,
        api: FastAPI,
        ingest: Ingest,
        remote_write: RemoteWrite,
        services: ServicesT,
        reload: Callable[[], None],
        forwarding: Forwarding | None = None,
        joint: JointAnswers | None = None,
    ) -> None:
        """With ``forwarding`` this server stands by: what only the leader can do is sent there.

        With ``joint`` there may be other cells, which have their part in answers.
        """
        self.forwarding = forwarding
        self.joint = joint
        self.api = api
        self.services = services
        self.reload = reload
        self._files = read_page()
        policy = (b"content-security-policy", content_security_policy(self._files["/"].content))
        self._headers = (policy, *_SECURITY) if services.certificates is None else (policy, *_SECURITY, _HSTS)
        config = services.config.ingest
        self.taker = FrameTaker(
            ingest.rows,
            Principals(
                services.tokens,
                services.store,
                services.clock,
                stands_by=forwarding is not None,
                looked=None if services.cells is None else services.cells.note_newest,
            ),
            services.limits.check_frames,
            services.telemetry,
            services.clock,
            config.body_bytes_max,
            config.body_timeout_s,
            Heads(),
            lambda: services.limits.settings.head_timeout_s,
            lambda reason: services.telemetry.connections_closed.labels(reason).inc(),
        )
        counted = services.telemetry.connections_refused
        self.connections = Connections(services.limits, services.clock, lambda reason: counted.labels(reason).inc())
        services.telemetry.registry.register(ConnectionCollector(self.connections))
        self._takers: dict[str, Taker] = {PATH: ingest, WRITE_PATH: remote_write}

    async def __call__(self, scope: ASGIMessage, receive: Receive, send: Send) -> None:
        """Handle one connection's event."""
        if scope["type"] != "http":
            await self.api(scope, receive, send)
            return
        path = scope["path"]
        taker = self._takers.get(path)
        unjudged = path in self._files or path in _OPEN or scope["method"] == "OPTIONS"
        send = _watched(scope, send, unjudged=unjudged, telemetry=taker is not None)
        if taker is not None and scope["method"] != "OPTIONS":
            if self.forwarding is not None:
                await self._forward(self.forwarding, scope, receive, send)
                return
            await taker(scope, receive, send)
            return
        try:
            if path not in _UNLIMITED and scope["client"] is not None:
                self.services.limits.check_address(scope["client"][0])
        except Refusal as refusal:
            counted: CountedConnection | None = scope.get("state", {}).get(CONNECTION)
            await self._refuse(refusal, _closing(send) if counted is not None and counted.bad() else send)
            return
        if self.forwarding is not None and not (path in self._files or path in _OWN):
            await self._forward(self.forwarding, scope, receive, send)
            return
        if path in self._files and scope["method"] in ("GET", "HEAD"):
            await self._page(scope, send)
            return
        if scope["method"] == "OPTIONS" and (found := self._methods(scope)):
            await answer(self._secured(send), 204, "", b"", raw_http.allow_header(found))
        elif path in self._files:
            await self._refuse(raw_http.method_refusal(scope["method"], ["GET"]), send)
        else:
            await self._call_cells(scope, receive, send)

    async def _call_cells(self, scope: ASGIMessage, receive: Receive, send: Send) -> None:
        """Answer by the API, or together with other cells."""
        what = None if self.joint is None else self.joint.concerned(scope)
        if self.joint is None or what is None:
            await self._call_api(scope, receive, send)
        else:
            await self._join(self.joint, what, scope, receive, send)

    async def _join(self, joint: JointAnswers, what: Asked, scope: ASGIMessage, receive: Receive, send: Send) -> None:
        """Answer with the answer of the cell that it is up to, or for all cells."""
        cell = await joint.other_cell(what, scope)
        if cell:
            believed = self.services.people.forwardable(scope["headers"], scope.get("state", {}))
            try:
                await joint.forward(cell, {**scope, "headers": believed}, receive, send)
            except LeaderUnreached as error:
                if scope["method"] not in ("GET", "HEAD"):
                    why = f"this request is for cell {cell}: {error}; try again"
                    await self._refuse(Refusal(503, "standby", why, {"Retry-After": str(RETRY_LEADER_S)}), send)
                    return
                await self._call_api(scope, receive, _with(send, WITHOUT_CELLS_HEADER, cell))
            return
        if scope["method"] != "GET" or not what.whole:
            await self._call_api(scope, receive, send)
            return
        kept = WithheldAnswer(send)
        await self._call_api(scope, receive, kept)
        if kept.answer is not None:
            believed = self.services.people.forwardable(scope["headers"], scope.get("state", {}))
            body, heads = await joint.joined(what, {**scope, "headers": believed}, kept.answer)
            await kept.send_instead(body, heads)

    async def _forward(self, forwarding: Forwarding, scope: ASGIMessage, receive: Receive, send: Send) -> None:
        """Answer with the leader's answer; without one, what is only read is answered from the records."""
        believed = self.services.people.forwardable(scope["headers"], scope.get("state", {}))
        try:
            await forwarding.answer({**scope, "headers": believed}, receive, send)
        except LeaderUnreached as error:
            if scope["path"] == PATH and forwarding.leader:
                self._note_unreached(forwarding, scope)
            if scope["method"] in ("GET", "HEAD"):
                await self._call_api(scope, receive, _with(send, STANDBY_HEADER, str(error)))
                return
            why = f"this server stands by: {error}; try again, or ask the leader itself"
            headers = {"Retry-After": str(RETRY_LEADER_S)}
            if forwarding.leader:
                headers[LEADER_HEADER] = forwarding.leader
            await self._refuse(Refusal(503, "standby", why, headers), send)

    def _note_unreached(self, forwarding: Forwarding, scope: ASGIMessage) -> None:
        """Note which node's agent has asked in vain, if its token says so; another server's request is no agent's."""
        headers, leadership = headers_of(scope), self.services.leadership
        if FORWARDED.decode() in headers:
            return
        if leadership is None or leadership.lease_problem:
            return  # without the database no token can be looked up, and nothing be wished
        try:
            credentials = Credentials.of(scope["method"], headers, scope.get("state", {}))
            node = self.taker.principals.authenticate(credentials).principal.node
        except (Refusal, StoreUnavailable):
            return
        if node is not None:
            forwarding.unreached.record_node(node)

    def _methods(self, scope: ASGIMessage) -> list[str]:
        """Return the methods that the request's path allows, except HEAD and OPTIONS; empty for an unknown path."""
        if scope["path"] in self._takers:
            return ["POST"]
        return ["GET"] if scope["path"] in self._files else raw_http.methods_of_route(self.api, routed(scope))

    async def _call_api(self, scope: ASGIMessage, receive: Receive, send: Send) -> None:
        if self._is_strayed(scope):
            self.services.telemetry.refused.labels("not_found").inc()
            await self._page({**scope, "path": MISSING}, send, 404)
            return
        scope = routed(scope)
        if scope["method"] == "HEAD" and "GET" in raw_http.methods_of_route(self.api, scope):
            scope, send = {**scope, "method": "GET"}, raw_http.headless(send)
        answered = False

        async def noted(message: ASGIMessage) -> None:
            nonlocal answered
            await send(message)
            answered = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self.api(scope, receive, self._secured(looked_through(noted, scope.setdefault("state", {}))))
        except Exception:
            if not answered:
                raise
            # It was answered with 500, counted and logged where it was first caught; starlette raises it again. The
            # connection is intact, and uvicorn would close it before its client's next request.

    def stop(self) -> None:
        """End the streams of /api/v1/events; may be called from any thread or a signal handler."""
        self.services.stopping.set()
        self.services.signal.notify()
        if self.forwarding is not None:
            self.forwarding.stop()

    def _is_strayed(self, scope: ASGIMessage) -> bool:
        """Return whether a person's browser asks for a page that does not exist; programs get problem details."""
        if scope["method"] not in ("GET", "HEAD") or scope["path"].startswith(_FOR_PROGRAMS) or self._methods(scope):
            return False
        return any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])

    async def _page(self, scope: ASGIMessage, send: Send, status: int = 200) -> None:
        file = self._files[scope["path"]]
        known = status == 200 and (b"if-none-match", file.etag) in map(tuple, scope["headers"])
        content = b"" if known or scope["method"] == "HEAD" else file.content
        headers = [(b"etag", file.etag), (b"cache-control", b"no-cache"), *self._headers]
        if not known:
            headers += [(b"content-type", file.content_type), (b"content-length", str(len(file.content)).encode())]
        await send({"type": "http.response.start", "status": 304 if known else status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _refuse(self, refusal: Refusal, send: Send) -> None:
        self.services.telemetry.refused.labels(refusal.reason).inc()
        await answer(self._secured(send), refusal.status, CONTENT_TYPE, refusal.document(), refusal.headers)

    def _secured(self, send: Send) -> Send:
        async def secured(message: ASGIMessage) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._headers]
            await send(message)

        return secured


class WithheldAnswer:
    """A ``send`` that keeps a whole answer of 200 back, and passes on every other."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: ASGIMessage = {}
        self._chunks: list[bytes] = []
        self.answer: bytes | None = None

    async def __call__(self, message: ASGIMessage) -> None:
        """Take a part of the answer."""
        if message["type"] == "http.response.start":
            self._start = message
        if self._start.get("status") != 200:
            await self._send(message)
        elif message["type"] == "http.response.body":
            self._chunks.append(message.get("body", b""))
            if not message.get("more_body", False):
                self.answer = b"".join(self._chunks)

    async def send_instead(self, body: bytes, heads: Mapping[str, str]) -> None:
        """Send the answer with another body, and with these headers as well."""
        kept = [(name, value) for name, value in self._start["headers"] if name.lower() != b"content-length"]
        more = [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in heads.items()]
        length = (b"content-length", str(len(body)).encode())
        await self._send({**self._start, "headers": [*kept, *more, length]})
        await self._send({"type": "http.response.body", "body": body})


def _watched(scope: ASGIMessage, send: Send, *, unjudged: bool, telemetry: bool) -> Send:
    """Return a ``send`` that records what the answer shows about the connection's client."""
    counted: CountedConnection | None = scope.get("state", {}).get(CONNECTION)
    if counted is None or unjudged:
        return send

    async def watched(message: ASGIMessage) -> None:
        last = False
        if message["type"] == "http.response.start":
            if message["status"] < 400:
                counted.proven()
            else:
                last = telemetry and is_bad(message["status"]) and counted.bad()
        await (_closing(send) if last else send)(message)

    return watched


def _closing(send: Send) -> Send:
    """Return a ``send`` for the connection's last answer."""
    return _with(send, "connection", "close")


def _with(send: Send, name: str, value: str) -> Send:
    """Return a ``send`` that adds a header to the answer."""
    header = name.lower().encode(), value.encode("latin-1", "replace")

    async def adding(message: ASGIMessage) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], header]
        await send(message)

    return adding
