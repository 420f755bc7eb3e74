"""The floods: each sends as fast as it is let, and counts what it sent. A function that returns was closed out."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event

SOURCE = "127.0.0.2"
PATIENCE_S = 2.0
HELD_MAX = 5_000  # connections of each process that are opened and left
DRIP_S = 1.0

_FRAMES = b"POST /api/v1/frames HTTP/1.1\r\nhost: localhost\r\n"
_ROWS = _FRAMES + b"content-type: application/x-eagle-eye-rows\r\n"
BAD_TOKEN = _ROWS + b"authorization: Bearer ee_wrong\r\ncontent-length: 64\r\n\r\n" + bytes(64)
GARBAGE = bytes(range(128, 256)) + b"\r\n\r\n"
HUGE = _ROWS + b"authorization: Bearer ee_wrong\r\ncontent-length: 1000000000\r\n\r\n"
API = b"GET /api/v1/nodes HTTP/1.1\r\nhost: localhost\r\n\r\n"

Send = Callable[[socket.socket], int]  # returns how many requests it sent


def _requests(text: bytes, together: int) -> Send:
    """Return what sends a request again and again, ``together`` at a time, and reads what is answered."""

    def send(connection: socket.socket) -> int:
        connection.sendall(text * together)
        if not connection.recv(1 << 20):
            raise ConnectionResetError
        return together

    return send


def _huge(connection: socket.socket) -> int:
    connection.sendall(HUGE)
    with contextlib.suppress(OSError):
        for _ in range(64):
            connection.sendall(bytes(1 << 20))
    connection.recv(1 << 16)
    raise ConnectionResetError


def _opened(connection: socket.socket) -> int:
    connection.close()
    raise ConnectionResetError


SENDERS: dict[str, Send] = {
    "garbage": _requests(GARBAGE, 1),
    "bad tokens": _requests(BAD_TOKEN, 1),
    "bad tokens, pipelined": _requests(BAD_TOKEN, 50),
    "api without a token": _requests(API, 1),
    "huge bodies": _huge,
    "connect and close": _opened,
}
# What is sent on connections that are then left alone, but for a byte of the drip now and then.
HELD = {"idle": b"", "half requests": _FRAMES, "slow loris": _FRAMES + b"x"}
BY_NAME = (*SENDERS, *HELD)


def flood(kind: str, port: int, counted: Synchronized[int], stopping: Event) -> None:
    """Flood the port until told to stop; ``counted`` is raised by what was sent, or connections that were tried."""
    if kind in HELD:
        _hold(kind, port, counted, stopping)
        return
    send = SENDERS[kind]
    while not stopping.is_set():
        try:
            connection = _connect(port)
        except OSError:
            continue
        with connection:
            while not stopping.is_set():
                try:
                    done = send(connection)
                except OSError:  # it was closed for what was sent
                    _count(counted, 1)
                    break
                _count(counted, done)


def _hold(kind: str, port: int, counted: Synchronized[int], stopping: Event) -> None:
    held: list[socket.socket] = []
    dripped_s = time.monotonic()
    while not stopping.is_set():
        with contextlib.suppress(OSError):
            connection = _connect(port)
            held.append(connection)
            _count(counted, 1)
            connection.sendall(HELD[kind])
        if kind == "slow loris" and time.monotonic() - dripped_s >= DRIP_S:
            dripped_s = time.monotonic()
            for one in held:
                with contextlib.suppress(OSError):
                    one.send(b"x")
        if len(held) > HELD_MAX:
            held.pop(0).close()
    for one in held:
        one.close()


def _count(counted: Synchronized[int], done: int) -> None:
    with counted.get_lock():
        counted.value += done


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE_S, source_address=(SOURCE, 0))
