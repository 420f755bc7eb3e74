"""Frames over a socket, for the store's event loop and for ranks' threads; and the TCP handshake."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import hmac
import os
import socket
import struct
import termios
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from eagle_eye.checkpoint.messages import (
    FRAME_BYTES_MAX,
    VERSION,
    Challenge,
    Greet,
    Message,
    Proof,
    RequestRefused,
    decode,
    encode,
)

NONCE_BYTES = 16
PIECE_BYTES = 8 << 20  # each costs the event loop about a tenth of a millisecond
STALLED_S = 30.0
UNPROVEN_FRAME_BYTES_MAX = 1 << 16  # from a peer that has not yet proven that it has the job's key
SILENT_FOR_S = 30  # after this, a node without power or network counts as gone

MessageT = TypeVar("MessageT")


class ProtocolError(ConnectionError):
    """The peer violates the protocol."""


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is no address: HOST:PORT is one")
    return host.strip("[]"), int(port)


def proof(key: bytes, side: bytes, ours: bytes, theirs: bytes) -> bytes:
    """Return the proof of having the job's key for these two nonces."""
    return hmac.new(key, side + ours + theirs, hashlib.sha256).digest()


class SendPace(Protocol):
    """Paces the sending of a shard, piece by piece."""

    def piece(self, left: int, unsent: Callable[[], int]) -> AbstractAsyncContextManager[int]:
        """Wait until some of the remaining bytes may be sent; enter with how many, exit once they are sent.

        ``unsent`` returns how many earlier bytes are not acknowledged yet. Raises OSError.
        """
        ...


def tuned(sock: socket.socket) -> socket.socket:
    """Return a TCP socket that sends without delay, and gives up on a silent peer."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_USER_TIMEOUT", SILENT_FOR_S * 1000)):
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return sock


class StoreConnection:
    """A connection of the store, in its event loop. One coroutine receives; any may send."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._at_work = 0
        self._closed = False

    @property
    def peer_pid(self) -> int:
        """The pid of a Unix socket's peer; 0 where it is not visible to this process."""
        pid, _, _ = struct.unpack("3i", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid)

    @property
    def host(self) -> str:
        """The peer's IP address. Raises OSError."""
        host: str = self._socket.getpeername()[0]
        return host

    async def send(self, message: Message, data: memoryview | None = None, pace: SendPace | None = None) -> None:
        """Send a message and its data, uninterrupted. Raises OSError."""
        async with self._sending:
            with self._working():
                await self._loop.sock_sendall(self._socket, encode(message))
                if data is not None:
                    await self._send_data(data, pace)

    async def send_data(self, data: memoryview, pace: SendPace | None = None) -> None:
        """Send the announced data at a pace, None: at once. Raises OSError."""
        async with self._sending:
            with self._working():
                await self._send_data(data, pace)

    async def receive(self, bytes_max: int = FRAME_BYTES_MAX) -> Message | None:
        """Return the next message, None at the end. Raises ProtocolError, ConnectionError."""
        head = bytearray(4)
        if not await self.receive_into(memoryview(head), end_allowed=True):
            return None
        body = bytearray(frame_length(head, bytes_max))
        await self.receive_into(memoryview(body))
        return parsed(body)

    async def expect(self, kind: type[MessageT]) -> MessageT:
        """Return the next message, which must be of this kind. Raises ProtocolError, with the reason if refused."""
        return expected(await self.receive(), kind)

    async def receive_into(self, view: memoryview, *, end_allowed: bool = False) -> bool:
        """Fill the view. False if the peer closed before the first byte and ``end_allowed``."""
        filled = 0
        with self._working():
            while filled < len(view):
                count = await self._loop.sock_recv_into(self._socket, view[filled:])
                if count == 0:
                    if filled == 0 and end_allowed:
                        return False
                    raise ProtocolError("the other side ended in the middle of a message")
                filled += count
        return True

    def ended(self) -> bool:
        """Whether the peer has closed it. Not to be called while another coroutine receives."""
        try:
            return not self._closed and self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    async def _send_data(self, data: memoryview, pace: SendPace | None) -> None:
        start = 0
        while start < len(data):
            going = contextlib.nullcontext(PIECE_BYTES) if pace is None else pace.piece(len(data) - start, self._unsent)
            async with going as count:
                sending = self._loop.sock_sendall(self._socket, data[start : start + count])
                try:
                    await asyncio.wait_for(sending, STALLED_S)
                except asyncio.TimeoutError as error:
                    raise ConnectionError(f"the other side takes nothing any more, for {STALLED_S:g} s") from error
            start += count

    def _unsent(self) -> int:
        """Return how many bytes are unacknowledged, 0 where the kernel does not report it."""
        try:
            unsent: int = struct.unpack("=i", fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)))[0]
        except OSError:
            return 0
        return unsent

    def close(self) -> None:
        """Close it; a pending read of data fails, a pending read of a message returns the end."""
        if self._closed:
            return
        self._closed = True
        # Not closed under a waiting reader: its descriptor could be reused before the loop has noticed.
        with contextlib.suppress(OSError):  # it had already ended
            self._socket.shutdown(socket.SHUT_RDWR)
        self._close_if_done()

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        if self._closed:
            raise ConnectionError("the connection has ended")
        self._at_work += 1
        try:
            yield
        finally:
            self._at_work -= 1
            self._close_if_done()

    def _close_if_done(self) -> None:
        if self._closed and not self._at_work:
            self._socket.close()


class BlockingConnection:
    """A rank's connection. Not thread-safe, except that one thread may receive while another sends."""

    def __init__(self, sock: socket.socket, timeout_s: float | None) -> None:
        sock.settimeout(timeout_s)
        self._socket = sock

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError."""
        self._socket.sendall(encode(message))

    def receive(self) -> Message | None:
        """Return the next message, None at the end. Raises ProtocolError, OSError."""
        head = bytearray(4)
        if not self._fill(memoryview(head), end_allowed=True):
            return None
        body = bytearray(frame_length(head))
        self._fill(memoryview(body))
        return parsed(body)

    def request(self, message: Message, kind: type[MessageT]) -> MessageT:
        """Return the answer to a message. Raises ProtocolError, OSError; a refusal's reason is in the error."""
        self.send(message)
        return expected(self.receive(), kind)

    def receive_into(self, view: memoryview, seen: Callable[[memoryview], None] = lambda _: None) -> None:
        """Fill the view; calls ``seen`` with each piece as it arrives. Raises ProtocolError, OSError."""
        self._fill(view, seen=seen)

    def set_timeout(self, timeout_s: float | None) -> None:
        """Set the timeout from now on."""
        self._socket.settimeout(timeout_s)

    def close(self) -> None:
        """Close it, also for a thread that waits in ``receive``."""
        with contextlib.suppress(OSError):  # it had ended
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _fill(
        self, view: memoryview, *, end_allowed: bool = False, seen: Callable[[memoryview], None] = lambda _: None
    ) -> bool:
        filled = 0
        while filled < len(view):
            count = self._socket.recv_into(view[filled:])
            if count == 0:
                if filled == 0 and end_allowed:
                    return False
                raise ProtocolError("the other side ended in the middle of a message")
            seen(view[filled : filled + count])
            filled += count
        return True


def connect_local(path: Path, timeout_s: float) -> BlockingConnection:
    """Connect to the store that listens on this Unix socket. Raises OSError where none does."""
    sock = socket.socket(socket.AF_UNIX)
    connection = BlockingConnection(sock, timeout_s)
    try:
        sock.connect(str(path))
    except BaseException:
        connection.close()
        raise
    return connection


def connect(address: str, job: str, key: bytes, timeout_s: float) -> BlockingConnection:
    """Connect a rank to another node's store, with mutual proof. Raises OSError, ValueError."""
    connection = BlockingConnection(tuned(socket.create_connection(address_of(address), timeout_s)), timeout_s)
    try:
        nonce = os.urandom(NONCE_BYTES)
        challenge = connection.request(Greet(VERSION, job, nonce), Challenge)
        connection.send(answer(key, nonce, challenge))
    except BaseException:
        connection.close()
        raise
    return connection


def answer(key: bytes, nonce: bytes, challenge: Challenge) -> Proof:
    """Return the answer to a store's challenge. Raises ProtocolError if it has another key."""
    if not hmac.compare_digest(challenge.proof, proof(key, b"store", nonce, challenge.nonce)):
        raise ProtocolError("the store does not have this job's key")
    return Proof(proof(key, b"peer", nonce, challenge.nonce))


def frame_length(head: bytes | bytearray, bytes_max: int = FRAME_BYTES_MAX) -> int:
    """Return the length in a frame's first four bytes. Raises ProtocolError."""
    length = int.from_bytes(head, "big")
    if length > bytes_max:
        raise ProtocolError(f"a message of {length:,} bytes; {bytes_max:,} is the limit")
    return length


def parsed(body: bytearray) -> Message:
    """Return the message of a frame. Raises ProtocolError."""
    try:
        return decode(bytes(body))
    except msgspec.DecodeError as error:
        raise ProtocolError(f"not a message of version {VERSION}: {error}") from error


def expected(message: Message | None, kind: type[MessageT]) -> MessageT:
    """Return the message if it is of the kind. Raises ProtocolError."""
    if isinstance(message, kind):
        return message
    if isinstance(message, RequestRefused):
        raise ProtocolError(message.reason)
    if message is None:
        raise ProtocolError(f"the other side ended where {kind.__name__} was expected")
    raise ProtocolError(f"{type(message).__name__} where {kind.__name__} was expected")
