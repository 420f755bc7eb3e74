"""Fast path for agents' connections: takes row requests directly from the socket, leaving everything else to uvicorn.

A complete and ordinary row request costs no task, no scope and no parsing of a head that is equal to the previous one.
Unusual requests take the normal path through ``Ingest``, with the same result.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, Protocol

import h11
import msgspec

from eagle_eye.schema.problem import CONTENT_TYPE as PROBLEM_TYPE
from eagle_eye.schema.rows import CONTENT_TYPE
from eagle_eye.server.ingest.decoding import RETRY_UNAVAILABLE_S
from eagle_eye.server.ingest.frames import PATH, RowsIngest
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import Refusal, StoreUnavailable
from eagle_eye.server.security.auth import CachedPrincipal, Credentials, Principal
from eagle_eye.server.telemetry.counters import Telemetry
from eagle_eye.server.transport.connections import GuardedProtocol, is_bad

WHOLE_BYTES_MAX = 1 << 16  # of a request taken here; larger ones take the normal path
HEAD_BYTES_MAX = 4_096

_LINE = b"POST " + PATH.encode() + b" HTTP/1.1\r\n"
_END = b"\r\n\r\n"
# Headers that may be present without making a request unusual.
_PLAIN = frozenset(
    {"host", "user-agent", "accept", "accept-encoding", "authorization", "content-length", "content-type"}
)

_log = logging.getLogger(__name__)


class _Principals(Protocol):
    def authenticate(self, credentials: Credentials, held: CachedPrincipal | None = None) -> CachedPrincipal:
        """Return the principal's pass. Raises Refusal."""
        ...


class Heads:
    """The beginnings of answers, valid while uvicorn's default headers are ``made_for``."""

    __slots__ = ("good", "made_for")

    def __init__(self) -> None:
        self.made_for: object = None
        self.good = b""


class Taker(msgspec.Struct, frozen=True):
    """What a request needs. ``admit(principal)`` raises Refusal 429; ``patience_s`` is the timeout for a body.

    ``head_timeout_s()`` is the timeout for a head, and ``closed`` is called as in ``GuardedProtocol``.
    """

    rows: RowsIngest
    principals: _Principals
    admit: Callable[[Principal], None]
    telemetry: Telemetry
    clock: Clock
    bytes_max: int
    patience_s: float
    heads: Heads
    head_timeout_s: Callable[[], float]
    closed: Callable[[str], None]


class _Head(msgspec.Struct, frozen=True, gc=False):
    raw: bytes
    credentials: Credentials
    body_bytes: int


class FrameProtocol(GuardedProtocol):
    """One connection. ``taker`` is set by ``protocol_of``."""

    taker: Taker

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head: _Head | None = None
        self._pass: CachedPrincipal | None = None  # of the head's credentials
        self._untouched = True  # uvicorn has seen nothing, or has finished with all that it saw
        self._held = b""  # the received part of an incomplete or following request
        self._waits = False  # for the answer to a request that was taken
        self._ends = False  # the server shuts down once the answer is sent
        self._active_s = 0.0
        self._idle: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Process received bytes."""
        if self._held:
            data = self._held + data
            self._held = b""
        if self._waits:
            self._held = data
            if len(data) > WHOLE_BYTES_MAX:
                self.transport.pause_reading()  # until the answer is sent
            return
        if not data.startswith(_LINE) or not self._between_requests():
            self._hand_on(data)
            return
        end = data.find(_END)
        if end < 0:
            self.await_head()
            self._hold(data, HEAD_BYTES_MAX)
            return
        self.head_came()
        head = self._head
        if head is None or not data.startswith(head.raw) or len(head.raw) != end:
            head = self._head = self._read(data[:end])
            self._pass = None
        if head is None:
            self._hand_on(data)
            return
        begin = end + len(_END)
        whole = begin + head.body_bytes
        if len(data) < whole:
            self._hold(data, WHOLE_BYTES_MAX)
            return
        self._lose_patience()
        self._held = data[whole:]
        self._take(head, data[begin:whole])

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up after the connection."""
        for timer in (self._idle, self._patience):
            if timer is not None:
                timer.cancel()
        self._idle = self._patience = None
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Let the request in progress be answered, then close."""
        if self._waits:
            self._ends = True
        else:
            super().shutdown()

    def _between_requests(self) -> bool:
        """Return whether uvicorn has nothing in progress on this connection."""
        if self._untouched:
            return True
        if self.cycle is not None and not self.cycle.response_complete:
            return False
        conn = self.conn
        self._untouched = conn.our_state is h11.IDLE and conn.their_state is h11.IDLE and not conn.trailing_data[0]
        return self._untouched

    def _hand_on(self, data: bytes) -> None:
        """Pass the bytes to uvicorn."""
        self._lose_patience()
        self._untouched = False
        super().data_received(data)

    def _hold(self, data: bytes, most: int) -> None:
        """Buffer an incomplete request, with a timeout for the body from its first byte on."""
        if len(data) > most:
            self._hand_on(data)
            return
        self._held = data
        if self._patience is None:
            self._patience = self.loop.call_later(self.taker.patience_s, self._hand_over)

    def _hand_over(self) -> None:
        """Stop waiting: uvicorn and Ingest handle a request that does not end."""
        data, self._held = self._held, b""
        self._hand_on(data)

    def _lose_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _read(self, raw: bytes) -> _Head | None:
        """Return the parsed head, or None if it is unusual in any way."""
        headers: dict[str, str] = {}
        for line in raw[len(_LINE) :].split(b"\r\n"):
            name, colon, value = line.partition(b":")
            key = name.decode("latin-1").lower()
            if not colon or key not in _PLAIN or key in headers:
                return None
            headers[key] = value.decode("latin-1").strip()
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdigit() and len(length) <= 8) or "host" not in headers:
            return None
        if int(length) > min(WHOLE_BYTES_MAX - HEAD_BYTES_MAX, self.taker.bytes_max):
            return None
        if (
            headers.get("content-type") != CONTENT_TYPE
            or headers.get("connection", "keep-alive").lower() != "keep-alive"
        ):
            return None
        return _Head(raw, Credentials.of("POST", headers, self.app_state), int(length))

    def _take(self, head: _Head, body: bytes) -> None:
        taker = self.taker
        self._unset_keepalive_if_required()
        self._waits = True
        try:
            held = self._pass = taker.principals.authenticate(head.credentials, self._pass)
            taker.admit(held.principal)
            started_s = taker.clock.monotonic_s()
            if not taker.rows.take_if_usual(held.principal, body, started_s, self):
                taker.rows.take_rows(held.principal, body, started_s, self.answer)
        except Exception as error:  # noqa: BLE001 - no outer layer answers and counts these errors
            self.refuse(error)

    def refuse(self, error: Exception) -> None:
        """Answer the taken request with a problem document, and count it; see ``Asker``."""
        if isinstance(error, StoreUnavailable):  # the token cannot be looked up
            error = Refusal(503, "storage", str(error), {"Retry-After": str(RETRY_UNAVAILABLE_S)})
        if not isinstance(error, Refusal):
            _log.error("rows could not be taken for a reason that was not foreseen", exc_info=error)
            error = Refusal(500, "internal", "the server failed; its log says why")
        self.taker.telemetry.rejected.labels(error.reason).inc()
        self.answer(error.status, error.document(), error.headers)

    def accept(self, body: bytes) -> None:
        """Answer the taken request with 200 and a JSON body; see ``Asker``."""
        self._waits = False
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.is_unauthenticated:
            self.prove()
        self.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (self._good_head(), len(body), body))
        self._go_on_soon()

    def answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Answer the taken request; see ``Asker``."""
        if status == 200:
            self.accept(body)
            return
        self._waits = False
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        last = is_bad(status) and self.counted.bad()
        if last:
            headers = {**headers, "Connection": "close"}
        self.transport.write(_head(status, self.server_state.default_headers, headers, PROBLEM_TYPE, body))
        if last:
            self.turn_away("rate")
            return
        self._go_on_soon()

    def _go_on_soon(self) -> None:
        """Await the next request, or process the one that arrived meanwhile."""
        if self._ends:
            self.transport.close()
            return
        self._active_s = self.loop.time()
        if self._idle is None:
            self._idle = self.loop.call_later(self.timeout_keep_alive, self._look_idle)
        if self._held:
            self.loop.call_soon(self._go_on)

    def _good_head(self) -> bytes:
        """Return the beginning of a 200 answer; uvicorn renews the headers, including the date, every second."""
        heads, now = self.taker.heads, self.server_state.default_headers
        if heads.made_for is not now:
            lines = b"".join(b"%b: %b\r\n" % header for header in now)
            heads.made_for, heads.good = now, b"HTTP/1.1 200 OK\r\n%bcontent-type: application/json\r\n" % lines
        return heads.good

    def _go_on(self) -> None:
        """Process what arrived while the answer was awaited."""
        self.transport.resume_reading()
        if self._held and not self._waits and not self.transport.is_closing():
            self.data_received(b"")

    def _look_idle(self) -> None:
        """Close a connection that was last used here and has been idle for too long."""
        self._idle = None
        idle_s = self.loop.time() - self._active_s
        if self._waits or self._held or not self._between_requests() or self.timeout_keep_alive_task is not None:
            idle_s = 0.0  # another component handles it, or it is busy
        if idle_s >= self.timeout_keep_alive:
            self.timeout_keep_alive_handler()
        else:
            self._idle = self.loop.call_later(self.timeout_keep_alive - idle_s, self._look_idle)


def protocol_of(taker: Taker) -> type[FrameProtocol]:
    """Return the protocol class of a server's connections."""
    timeout_s, closed = staticmethod(taker.head_timeout_s), staticmethod(taker.closed)
    return type("ServerProtocol", (FrameProtocol,), {"taker": taker, "head_timeout_s": timeout_s, "closed": closed})


def standby_protocol_of(taker: Taker) -> type[GuardedProtocol]:
    """Return the protocol class of a standby's connections: it takes nothing itself."""
    timeout_s, closed = staticmethod(taker.head_timeout_s), staticmethod(taker.closed)
    return type("StandbyProtocol", (GuardedProtocol,), {"head_timeout_s": timeout_s, "closed": closed})


def _head(
    status: int, default: Iterable[tuple[bytes, bytes]], headers: Mapping[str, str], kind: str, body: bytes
) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()]
    lines += [b"%b: %b" % header for header in default]
    lines += [f"{name.lower()}: {value}".encode() for name, value in headers.items()]
    lines += [b"content-type: %b" % kind.encode(), b"content-length: %d" % len(body), b"", body]
    return b"\r\n".join(lines)
