"""Accepts connections itself, so that one over a limit costs no TLS handshake, task or buffer."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

import uvicorn

from eagle_eye.server.transport.connections import Connection, Connections
from eagle_eye.server.transport.http_protocol import GuardedProtocol

ROUND = 1_024  # connections accepted or refused before yielding to the event loop: a whole fleet may connect at once
HANDSHAKE_S, GOODBYE_S = 10.0, 5.0  # maximum durations of the TLS handshake and shutdown
ENTERED_S = 0.1  # for connections that are just being accepted
LAST_WORDS_S = 1.0  # for rows to be acknowledged, and answers to be read, once no other request is under way
ENDED_EVERY_S = 0.02  # how often to look whether requests under way have ended
REST_S = 1.0  # pause after the system ran out of resources for a connection

_log = logging.getLogger(__name__)


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
