"""Connections: accepted within limits, with timeouts for heads and for reading answers. On the event loop.

Limits hold in total, per client address, and for unauthenticated connections: those on which no authorised request has
succeeded yet. Each address may have a limited number of such connections at a time, and one that sends bad requests too
often is refused for a while. So no client can use up the process's files or the event loop that serves the agents. A
connection over a limit costs no TLS handshake, task or buffer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import h11
import uvicorn
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.schema.metrics import PROMETHEUS_PREFIX
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.security.auth import SAID_EVERY_S, Limits, host_of
from eagle_eye.server.security.tls import PeerProtocol

FILES_KEPT = 256  # of the process's file limit, reserved for everything but connections

_log = logging.getLogger(__name__)


class Connections:
    """All connections. ``refused(reason)`` is called for each one refused: "total", "address" or "rate"."""

    def __init__(self, limits: Limits, clock: Clock, refused: Callable[[str], None]) -> None:
        self._limits = limits
        self._clock = clock
        self._refused = refused
        self._unauthenticated: Counter[str] = Counter()
        self._said_s = -math.inf
        self.count = 0

    @property
    def unauthenticated(self) -> int:
        """Number of unauthenticated connections."""
        return self._unauthenticated.total()

    def admit(self, address: str) -> Connection | None:
        """Count a new connection from the address; return None if it must be refused."""
        host, limits = host_of(address), self._limits.settings
        most = max(min(limits.connections, _files_max() - FILES_KEPT), 1)
        if self.count >= most:
            why, limit = "total", most
        elif self._unauthenticated[host] >= min(limits.address_connections, most // 2 or 1):
            why, limit = "address", limits.address_connections
        elif self._limits.is_bad(address):
            why, limit = "rate", int(limits.bad_requests_per_s)
        else:
            self.count += 1
            self._unauthenticated[host] += 1
            return Connection(self, address, host)
        if not self._unauthenticated[host]:
            del self._unauthenticated[host]
        self._refused(why)
        now_s = self._clock.monotonic_s()
        if now_s - self._said_s >= SAID_EVERY_S:
            self._said_s = now_s
            _log.warning("connections are refused", extra={"by": why, "who": address, "limit": limit})
        return None

    def is_bad(self, address: str) -> bool:
        """Count a bad request; return whether its address has sent too many of them."""
        return self._limits.count_bad(address)

    def count_authenticated(self, host: str) -> None:
        """Decrease the count of unauthenticated connections."""
        self._unauthenticated[host] -= 1
        if not self._unauthenticated[host]:
            del self._unauthenticated[host]


class Connection:
    """One connection from its acceptance to its end."""

    def __init__(self, connections: Connections, address: str, host: str) -> None:
        self._connections = connections
        self._address = address
        self._host = host
        self._unauthenticated = True
        self._here = True

    def proven(self) -> None:
        """Mark the connection as authenticated."""
        if self._unauthenticated:
            self._unauthenticated = False
            self._connections.count_authenticated(self._host)

    def bad(self) -> bool:
        """Count a bad request; return whether the connection must be closed for it."""
        return self._connections.is_bad(self._address)

    def end(self) -> None:
        """Remove the connection from the counts; idempotent."""
        if self._here:
            self._here = False
            self._connections.count -= 1
            self.proven()


def _files_max() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class ConnectionCollector(Collector):
    """The number of open connections, read when scraped."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        """Yield one family."""
        family = GaugeMetricFamily(
            PROMETHEUS_PREFIX + "connections",
            "Open connections, by whether somebody who may ask has asked on them.",
            labels=["client"],
        )
        unauthenticated = self._connections.unauthenticated
        family.add_metric(["unauthenticated"], unauthenticated)
        family.add_metric(["known"], self._connections.count - unauthenticated)
        yield family


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


ROUND = 1_024  # connections accepted or refused before yielding to the event loop: a whole fleet may connect at once
HANDSHAKE_S, GOODBYE_S = 10.0, 5.0  # maximum durations of the TLS handshake and shutdown
ENTERED_S = 0.1  # for connections that are just being accepted
LAST_WORDS_S = 1.0  # for rows to be acknowledged, and answers to be read, once no other request is under way
ENDED_EVERY_S = 0.02  # how often to look whether requests under way have ended
REST_S = 1.0  # pause after the system ran out of resources for a connection


class Acceptor:
    """Accepts connections that ``connections`` admits; ``protocol(counted)`` creates protocols. On the event loop."""

    def __init__(
        self,
        listening: socket.socket,
        connections: Connections,
        protocol: Callable[[Connection], asyncio.Protocol],
        context: ssl.SSLContext | None,
    ) -> None:
        self._listening = listening
        self._connections = connections
        self._protocol = protocol
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._rest: asyncio.TimerHandle | None = None
        self._entering: set[asyncio.Task[None]] = set()
        listening.setblocking(False)

    def open(self) -> None:
        """Start accepting."""
        self._rest = None
        self._loop.add_reader(self._listening.fileno(), self._look)

    async def end(self) -> None:
        """Stop accepting, for good; open connections stay open, a handshake that is under way is broken off.

        Who has no handshake to make is let in first: ended half-way, nobody would learn of its end.
        """
        self.close()
        entering = list(self._entering)
        if entering:
            _, shaking_hands = await asyncio.wait(entering, timeout=ENTERED_S)
            for task in shaking_hands:
                task.cancel()
            await asyncio.gather(*entering, return_exceptions=True)

    def close(self) -> None:
        """Stop accepting; open connections stay open."""
        if self._rest is not None:
            self._rest.cancel()
        self._loop.remove_reader(self._listening.fileno())

    def _look(self) -> None:
        for _ in range(ROUND):
            try:
                connection, address = self._listening.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:  # out of files or memory: open connections may close meanwhile
                _log.error("no connection can be accepted for a moment", extra={"error": str(error)})
                self.close()
                self._rest = self._loop.call_later(REST_S, self.open)
                return
            counted = self._connections.admit(address[0])
            if counted is None:
                connection.close()
                continue
            task = self._loop.create_task(self._let_in(_Connected(connection, counted)))
            self._entering.add(task)
            task.add_done_callback(self._entering.discard)

    async def _let_in(self, connected: _Connected) -> None:
        limits = (
            {} if self._context is None else {"ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": GOODBYE_S}
        )
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._protocol(connected.counted), connected, ssl=self._context, **limits
            )
        except OSError:  # the handshake failed or timed out: ssl.SSLError and TimeoutError are OSErrors
            connected.counted.bad()
            connected.close()
        except asyncio.CancelledError:  # the server ends
            connected.close()
            raise


class _Connected(socket.socket):
    """An accepted connection; its end is counted, whoever closes it."""

    def __init__(self, connection: socket.socket, counted: Connection) -> None:
        family, kind, proto = connection.family, connection.type, connection.proto
        super().__init__(family, kind, proto, fileno=connection.detach())
        self.setblocking(False)
        self.counted = counted

    def close(self) -> None:
        """Close it."""
        self.counted.end()
        super().close()

    def detach(self) -> int:
        """Return its file descriptor, which uvloop closes by itself when the connection ends."""
        self.counted.end()
        return super().detach()


class AcceptingServer(uvicorn.Server):
    """uvicorn's server, with connections accepted by an ``Acceptor``."""

    def __init__(self, config: uvicorn.Config, listening: socket.socket, connections: Connections) -> None:
        super().__init__(config)
        self._listening = listening
        self._connections = connections
        self._acceptor: Acceptor | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 - uvicorn's signature
        """Start serving."""
        await super().startup(sockets=[])
        if self.started:
            self._acceptor = Acceptor(self._listening, self._connections, self._begun, self.config.ssl)
            self._acceptor.open()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 - uvicorn's signature
        """Stop accepting, let requests under way be answered for a while, and end all connections."""
        if self._acceptor is not None:
            await self._acceptor.end()
        self._listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._let_end(self.config.timeout_graceful_shutdown or 0)
        await super().shutdown(sockets=[])

    async def _let_end(self, within_s: float) -> None:
        """Wait until no request is under way; break off what is then, and close what has had its answer."""
        state, loop = self.server_state, asyncio.get_running_loop()
        end_s, answered_s = loop.time() + within_s, loop.time()
        while (state.connections or state.tasks) and not self.force_exit:
            now_s = loop.time()
            if state.tasks:
                answered_s = now_s
            if now_s >= end_s or now_s - answered_s >= LAST_WORDS_S:
                break
            await asyncio.sleep(ENDED_EVERY_S)
        tasks = list(state.tasks)
        if tasks:
            said = {"requests": len(tasks), "waited_s": within_s}
            _log.warning("requests that were still under way are broken off: their clients ask again", extra=said)
        for task in tasks:
            task.cancel()
        for connection in list(state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begun(self, counted: Connection) -> asyncio.Protocol:
        kind = self.config.http_protocol_class
        assert issubclass(kind, GuardedProtocol)  # noqa: S101 - ensured by connection_options
        protocol = kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        protocol.counted = counted
        return protocol
