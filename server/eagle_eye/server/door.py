"""Connections accepted by ourselves, so that one that may not stay costs no handshake, no task and no buffer."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

import uvicorn

from eagle_eye.server.guarded_protocol import GuardedProtocol
from eagle_eye.server.visitors import Visit, Visitors

ROUND = 1_024  # connections let in or refused before others on the loop have their turn: a fleet comes all at once
HANDSHAKE_S, GOODBYE_S = 10.0, 5.0  # how long TLS may take to begin and to end
REST_S = 1.0  # after the system had no room for a connection

_log = logging.getLogger(__name__)


class Door:
    """Lets in from ``listening`` whom ``visitors`` admit; ``protocol(visit)`` begins a connection. On the loop."""

    def __init__(
        self,
        listening: socket.socket,
        visitors: Visitors,
        protocol: Callable[[Visit], asyncio.Protocol],
        context: ssl.SSLContext | None,
    ) -> None:
        self._listening = listening
        self._visitors = visitors
        self._protocol = protocol
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._rest: asyncio.TimerHandle | None = None
        self._entering: set[asyncio.Task[None]] = set()
        listening.setblocking(False)

    def open(self) -> None:
        """Let in from now on."""
        self._rest = None
        self._loop.add_reader(self._listening.fileno(), self._look)

    def close(self) -> None:
        """Let nobody in any more; who is in stays."""
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
            except OSError as error:  # no files or no memory are left: those who are in may leave some
                _log.error("no connection can be accepted for a moment", extra={"error": str(error)})
                self.close()
                self._rest = self._loop.call_later(REST_S, self.open)
                return
            visit = self._visitors.admit(address[0])
            if visit is None:
                connection.close()
                continue
            task = self._loop.create_task(self._let_in(_Connected(connection, visit)))
            self._entering.add(task)
            task.add_done_callback(self._entering.discard)

    async def _let_in(self, connected: _Connected) -> None:
        limits = (
            {} if self._context is None else {"ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": GOODBYE_S}
        )
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._protocol(connected.visit), connected, ssl=self._context, **limits
            )
        except OSError:  # the handshake failed, or took too long: ssl.SSLError and TimeoutError are such
            connected.visit.bad()
            connected.close()


class _Connected(socket.socket):
    """A connection that was let in; its end is counted whoever closes it."""

    def __init__(self, connection: socket.socket, visit: Visit) -> None:
        family, kind, proto = connection.family, connection.type, connection.proto
        super().__init__(family, kind, proto, fileno=connection.detach())
        self.setblocking(False)
        self.visit = visit

    def close(self) -> None:
        """Close it."""
        self.visit.end()
        super().close()

    def detach(self) -> int:
        """Return its file, which uvloop closes by itself when the connection ends."""
        self.visit.end()
        return super().detach()


class DoorServer(uvicorn.Server):
    """A server of uvicorn's that gets its connections through a door."""

    def __init__(self, config: uvicorn.Config, listening: socket.socket, visitors: Visitors) -> None:
        super().__init__(config)
        self._listening = listening
        self._visitors = visitors
        self._door: Door | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 - uvicorn's signature
        """Begin to serve."""
        await super().startup(sockets=[])
        if self.started:
            self._door = Door(self._listening, self._visitors, self._begun, self.config.ssl)
            self._door.open()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 - uvicorn's signature
        """Let nobody in any more, and end what is under way."""
        if self._door is not None:
            self._door.close()
        self._listening.close()
        await super().shutdown(sockets=[])

    def _begun(self, visit: Visit) -> asyncio.Protocol:
        kind = self.config.http_protocol_class
        assert issubclass(kind, GuardedProtocol)  # noqa: S101 - connection_options says so
        protocol = kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        protocol.visit = visit
        return protocol
