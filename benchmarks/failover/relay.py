"""A TCP relay on a free port of loopback that can be cut as a network is: nothing arrives, and nobody is told.

It can also hold one message, at the moment at which it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
CHUNK_BYTES = 1 << 16
BACKLOG = 128
FILLERS = 3  # connections that fill a backlog of none, so that Linux drops what comes after them


@dataclass
class Trap:
    """Holds what a client sends with ``last`` in it, after something with ``first`` on the same connection; once.

    ``sprung`` is called before the relay does anything else.
    """

    first: bytes
    last: bytes
    sprung: Callable[[], None]
    let_go: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.has_sprung = False
        self._began: set[int] = set()  # connections

    def springs(self, connection: int, content: bytes) -> bool:
        """Return whether this is what the trap is set for."""
        if self.has_sprung:
            return False
        if self.first in content:
            self._began.add(connection)
        self.has_sprung = connection in self._began and self.last in content
        return self.has_sprung


class Relay:
    """Passes connections on to what ``reach`` connects to. Linux only."""

    def __init__(self, reach: Callable[[], Awaitable[Streams]]) -> None:
        self.trap: Trap | None = None
        self._reach = reach
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._open = asyncio.Event()
        self._fillers: list[socket.socket] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._begin()

    def cut(self) -> None:
        """Pass nothing on any more, neither of connections that are open nor of new ones."""
        self._open.clear()
        if self._accepting is not None:
            self._accepting.cancel()
        self._listener.listen(0)
        for _ in range(FILLERS):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", self.port))
            self._fillers.append(filler)

    def mend(self) -> None:
        """Pass on again, if it was cut; connections from before are gone."""
        if self._open.is_set():
            return
        for filler in self._fillers:
            filler.close()
        self._fillers.clear()
        for writer in self._writers:
            writer.transport.abort()
        self._begin()

    async def close(self) -> None:
        """Close everything."""
        self.mend()
        tasks = [*self._tasks, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    def _begin(self) -> None:
        self._listener.listen(BACKLOG)
        self._open.set()
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(self._listener)
            task = loop.create_task(self._take(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _take(self, client: socket.socket) -> None:
        ends: list[Streams] = []
        try:
            ends.append(await asyncio.open_connection(sock=client))
            ends.append(await self._reach())
            self._writers.update(writer for _, writer in ends)
            (reader, writer), (there_reader, there_writer) = ends
            passing = [
                asyncio.ensure_future(self._pass(reader, there_writer, asks=True)),
                asyncio.ensure_future(self._pass(there_reader, writer, asks=False)),
            ]
            try:
                await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in passing:
                    way.cancel()
                await asyncio.gather(*passing, return_exceptions=True)
        except OSError:
            pass
        finally:
            for _, writer in ends:
                writer.transport.abort()
                self._writers.discard(writer)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, asks: bool) -> None:
        with contextlib.suppress(OSError):
            while content := await reader.read(CHUNK_BYTES):
                await self._open.wait()
                trap = self.trap
                if asks and trap is not None and trap.springs(id(writer), content):
                    trap.sprung()
                    await trap.let_go.wait()
                writer.write(content)
                await writer.drain()
