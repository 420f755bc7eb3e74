"""A store's two connections to another node's: one for shards, one for messages, which must not wait for shards."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import TypeVar

from eagle_eye.checkpoint.connection import (
    NONCE_BYTES,
    ProtocolError,
    SendPace,
    StoreConnection,
    address_of,
    answer,
    tuned,
)
from eagle_eye.checkpoint.messages import (
    VERSION,
    Bytes,
    Challenge,
    CopyInfo,
    Find,
    Found,
    Greet,
    Message,
    Proceed,
    Put,
    Read,
    Reserve,
    Reserved,
    Stored,
)
from eagle_eye.checkpoint.traffic import CopyUnwanted

MessageT = TypeVar("MessageT")

CONNECT_WITHIN_S = 5.0
ANSWER_WITHIN_S = 30.0
RESERVE_WITHIN_S = 120.0  # of gigabytes, seconds each


class Peer:
    """Another node's store. Connects on demand, and again after an error, until it is closed."""

    def __init__(self, node: str, address: str, job: str, key: bytes) -> None:
        self.node = node
        self.address = address
        self._job = job
        self._key = key
        self._shards: StoreConnection | None = None
        self._words: StoreConnection | None = None
        self._closed = False
        self._moving = asyncio.Lock()
        self._speaking = asyncio.Lock()

    async def send_message(self, message: Message) -> None:
        """Send a message that has no answer. Raises OSError."""
        async with self._speaking:
            try:
                self._words = _living(self._words) or await self._connect()
                await self._words.send(message)
            except OSError:
                self._close_words()
                raise

    async def reserve(self, wish: Reserve) -> None:
        """Have memory reserved there. Raises OSError; ProtocolError with the reason where it is refused."""
        async with self._moving:
            await self._ask(wish, Reserved, RESERVE_WITHIN_S)

    async def put(self, put: Put, data: memoryview, pace_to: Callable[[str], SendPace]) -> Proceed:
        """Bring a copy there, and return what that store said: whether it took it, or why not.

        ``pace_to`` returns the pace to an IP address. Raises OSError, ProtocolError, Unwanted.
        """
        async with self._moving:
            proceed: Proceed = await self._ask(put, Proceed)
            if not proceed.yes:
                return proceed
            try:
                connection = self._connected()
                await connection.send_data(data, pace_to(connection.host))
                stored = await asyncio.wait_for(connection.expect(Stored), ANSWER_WITHIN_S)
            except CopyUnwanted:
                self._close_shards()  # the other side still waits for the rest
                raise
            except (OSError, asyncio.TimeoutError) as error:
                self._close_shards()
                raise ConnectionError(f"{self.node} did not take a shard: {error or 'no answer'}") from error
            if not stored.yes:
                raise ProtocolError(f"{self.node} refused a shard: {stored.reason}")
            return proceed

    async def describe(self, plan: str, rank: int, step: int) -> CopyInfo | None:
        """Return the copy that is held there, None for none. Raises OSError."""
        async with self._moving:
            found: Found = await self._ask(Find(plan, rank, step), Found)
            return found.copy

    async def fetch(self, copy: CopyInfo, into: memoryview) -> bytes | None:
        """Fill the view with a copy, and return its chunks' sums; None where it is not held there. Raises OSError."""
        async with self._moving:
            answered: Bytes = await self._ask(Read(copy.plan, copy.rank, copy.step, 0, copy.length), Bytes)
            if answered.length < 0:
                return None
            try:
                if answered.length != copy.length:
                    raise ProtocolError(f"{answered.length:,} bytes from {self.node} for a copy of {copy.length:,}")
                await self._connected().receive_into(into)
            except OSError:
                self._close_shards()
                raise
            return answered.sums

    def close(self) -> None:
        """End both connections, and what is under way: a connection that is being made is not used any more."""
        self._closed = True
        self._close_shards()
        self._close_words()

    def _close_shards(self) -> None:
        if self._shards is not None:
            self._shards.close()
        self._shards = None

    def _close_words(self) -> None:
        if self._words is not None:
            self._words.close()
        self._words = None

    def _connected(self) -> StoreConnection:
        if self._shards is None:
            raise ConnectionError(f"{self.node} is gone")
        return self._shards

    async def _ask(self, message: Message, kind: type[MessageT], within_s: float = ANSWER_WITHIN_S) -> MessageT:
        try:
            self._shards = _living(self._shards) or await self._connect()
            await self._shards.send(message)
            return await asyncio.wait_for(self._shards.expect(kind), within_s)
        except ProtocolError:
            self._close_shards()
            raise
        except (OSError, asyncio.TimeoutError) as error:
            self._close_shards()
            raise ConnectionError(f"{self.node} ({self.address}) does not answer: {error or 'time is over'}") from error

    async def _connect(self) -> StoreConnection:
        loop = asyncio.get_running_loop()
        host, port = address_of(self.address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await asyncio.wait_for(loop.sock_connect(sock, (host, port)), CONNECT_WITHIN_S)
            connection = StoreConnection(tuned(sock))
            nonce = os.urandom(NONCE_BYTES)
            await connection.send(Greet(VERSION, self._job, nonce))
            challenge = await asyncio.wait_for(connection.expect(Challenge), ANSWER_WITHIN_S)
            await connection.send(answer(self._key, nonce, challenge))
        except asyncio.TimeoutError as error:
            sock.close()
            raise ConnectionError(f"{self.address} does not answer in time") from error
        except BaseException:
            sock.close()
            raise
        if self._closed:
            connection.close()
            raise ConnectionError(f"{self.node} is not spoken to any more")
        return connection


def _living(connection: StoreConnection | None) -> StoreConnection | None:
    """Return the connection unless the peer has closed it: data sent to a closed one is lost silently."""
    if connection is not None and connection.ended():
        connection.close()
        return None
    return connection
