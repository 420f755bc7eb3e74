"""HTTP protocol with timeouts for heads and for reading answers, and limits on bad requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import h11

from eagle_eye.server.security.limits import SAID_EVERY_S
from eagle_eye.server.security.tls import PeerProtocol

STALL_S = 60.0  # how long a client may leave an answer unread
CONNECTION = "connection"  # in an ASGI scope's state
# Of a body whose request is already answered: it is read and discarded. A client that writes the whole body before it
# reads would lose the answer if the connection were closed with bytes unread (RFC 9112, section 9.6).
UNREAD_BYTES_MAX, UNREAD_S = 32 << 20, 10.0

_OVERDUE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def is_bad(status: int) -> bool:
    """Return whether this status answers bad telemetry: malformed, or from an unknown sender."""
    return 400 <= status < 500 and status != 429


class Seldom(logging.Filter):
    """Lets each warning text through once in ``SAID_EVERY_S``; errors always.

    Not those of a request that the server itself broke off as it ended, which it says in a line of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._said_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged."""
        if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
            return False
        if record.levelno > logging.WARNING:
            return True
        now_s = time.monotonic()
        if now_s - self._said_s.get(record.msg, -SAID_EVERY_S) < SAID_EVERY_S:
            return False
        self._said_s[record.msg] = now_s
        return True


# uvicorn warns about each malformed request, in constant texts.
_log = logging.getLogger(__name__)
_log.addFilter(Seldom())


class CountedConnection(Protocol):
    """A connection as counted by ``connections.py``."""

    def proven(self) -> None:
        """Mark the connection as authenticated."""
        ...

    def bad(self) -> bool:
        """Count a bad request; return whether the connection must be closed for it."""
        ...


class UncountedConnection:
    """A connection without limits."""

    def proven(self) -> None:
        """Do nothing."""

    def bad(self) -> bool:
        """Return False: it may stay open."""
        return False


class GuardedProtocol(PeerProtocol):
    """One connection. Subclasses set ``closed`` and ``head_timeout_s``.

    ``closed(reason)`` is called for each that is closed because of its client: "slow_head", "slow_reader",
    "unread_body", "malformed" or "rate".
    """

    closed: Callable[[str], None]
    head_timeout_s: Callable[[], float]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.logger = _log
        self.counted: CountedConnection = UncountedConnection()
        self.is_unauthenticated = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._unread_bytes = 0

    def prove(self) -> None:
        """Mark the connection as authenticated."""
        self.is_unauthenticated = False
        self.counted.proven()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; the timeout for the first head starts here."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, CONNECTION: self.counted}
        self.await_head()

    def data_received(self, data: bytes) -> None:
        """Process received bytes."""
        if self._unread_timer is not None:
            self._unread_bytes += len(data)
            if self._unread_bytes > UNREAD_BYTES_MAX:
                self._give_up_body()
                return
        super().data_received(data)
        if self._unread_timer is not None and not self._answered_early():
            self._body_ended()
        self._mind_head()

    def on_response_complete(self) -> None:
        """Continue with the next request, after the rest of this one's body."""
        super().on_response_complete()
        if self._answered_early() and not self.transport.is_closing():
            self._unread_bytes = 0
            self._unread_timer = self.loop.call_later(UNREAD_S, self._give_up_body)
        self._mind_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up after the connection."""
        self.head_came()
        self._lose_unread_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def await_head(self) -> None:
        """Start the timeout for the next head, unless it is already running."""
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s(), self._overdue)

    def head_came(self) -> None:
        """Stop the timeout for the head."""
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def turn_away(self, reason: str) -> None:
        """Close once what was written is sent."""
        self.closed(reason)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request."""
        self.closed("malformed")
        self.counted.bad()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # an answer has begun, so no error can be sent
            self.transport.abort()

    def pause_writing(self) -> None:
        """Wait for the client to read, with a timeout."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_S, self._stalled)

    def resume_writing(self) -> None:
        """Resume writing."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        if self.flow is not None:
            super().resume_writing()

    def _mind_head(self) -> None:
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self.await_head()
        else:
            self.head_came()

    def _overdue(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.counted.bad()
            self.transport.write(_OVERDUE)
            self.turn_away("slow_head")

    def _answered_early(self) -> bool:
        """Return whether the request is answered while more of its body is to come."""
        return self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY

    def _body_ended(self) -> None:
        self._lose_unread_timer()
        # The timer that was set with the answer ended with the body's next bytes.
        if self.timeout_keep_alive_task is None and self.conn.their_state is h11.IDLE:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _give_up_body(self) -> None:
        self._lose_unread_timer()
        if not self.transport.is_closing():
            self.turn_away("unread_body")

    def _lose_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _stalled(self) -> None:
        self._stall_timer = None
        self.closed("slow_reader")
        self.transport.abort()
