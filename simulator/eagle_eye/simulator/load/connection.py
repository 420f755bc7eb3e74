"""One kept-alive connection that carries one request at a time. Touches: the network.

An asyncio protocol: with thousands of agents in one process every additional layer would cost a core.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Protocol, cast

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.simulator.load.answers import BadHttpAnswer, HttpAnswer, cut
from eagle_eye.simulator.load.target import LoadTarget

READ_BYTES = 1 << 16
FILES_BESIDE = 64  # open files beside the connections
_shared = bytearray(READ_BYTES)  # the event loop fills it and hands it over before it reads from anybody else
_view = memoryview(_shared)


class ConnectionOwner(Protocol):
    """The user of a connection."""

    def answered(self, answer: HttpAnswer) -> None:
        """Take the answer to the request that was sent."""
        ...

    def lost(self, why: str) -> None:
        """The connection is gone; ``why`` is one word for a count."""
        ...


class LoadConnection(asyncio.BufferedProtocol):
    """Sends a request, passes its answer to the owner. ``busy`` while an answer is pending."""

    def __init__(self, owner: ConnectionOwner) -> None:
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._why = "disconnected"
        self.busy = False

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None

    def send(self, request: bytes) -> None:
        """Send one request; the answer comes to the owner, or the connection's loss does."""
        if self._transport is None or self.busy:
            raise RuntimeError("the connection is not free")
        self.busy = True
        self._transport.write(request)

    def close(self, why: str) -> None:
        """Close at once; the owner's ``lost`` is called."""
        self._why = why
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._transport = None
        self.busy = False
        self._owner.lost(type(exc).__name__ if exc is not None else self._why)

    def eof_received(self) -> bool:
        """See asyncio."""
        return False

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - one size for all
        """See asyncio."""
        return _view

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio."""
        data = self._rest + _shared[:nbytes] if self._rest else bytes(_view[:nbytes])
        try:
            found = cut(data)
        except BadHttpAnswer:
            self.close("answer")
            return
        if found is None:
            self._rest = data
            return
        answer, self._rest = found
        if not self.busy or self._rest:
            self.close("answer")  # more answers than requests: nobody can say which is whose
            return
        self.busy = False
        if answer.last and self._transport is not None:
            self._transport.close()
            self._transport, self._why = None, "closed"
        self._owner.answered(answer)


async def connect(target: LoadTarget, owner: ConnectionOwner, number: int, timeout_s: float) -> LoadConnection:
    """Return an open connection, from the source address that fits its number. Raises OSError, TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        _, connection = await loop.create_connection(
            lambda: LoadConnection(owner), target.host, target.port, ssl=target.ssl, local_addr=target.source(number)
        )
    return connection


def allow_files(connections: int) -> None:
    """Let the process hold so many connections. Raises ConfigurationError."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if connections + FILES_BESIDE > hard:
        raise ConfigurationError(
            f"--nodes: {connections} connections need as many open files, and {hard} are allowed: raise the limit"
            " (ulimit -Hn) or start several load tests with different --prefix"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
