"""The restart points of a node's ranks, as its runner sees them. Touches a Unix socket in the abstract namespace.

Only a rank's own runner tells it to continue, and only while it waits: so none starts an attempt that is not its own.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from eagle_eye.orchestrators.launch.own_process import note
from eagle_eye.schema.restart_point import PACKET_BYTES_MAX, REASON_CHARS_MAX, AtPoint, GoOn

CONNECTIONS_MAX = 1024
SENT_WITHIN_S = 1.0  # a waiting rank reads at once

_CREDENTIALS = struct.Struct("3i")
_decode = msgspec.json.Decoder(AtPoint).decode


@dataclass
class _Connection:
    socket: socket.socket
    said: AtPoint | None = None


class RestartPoints:
    """The restart points of the running ranks. ``heard`` gets their messages. Used only by the runner's main thread.

    ``name`` is the socket's; "" where there can be none, and then no rank has a restart point.
    """

    def __init__(self, selector: selectors.BaseSelector, heard: Callable[[AtPoint], None]) -> None:
        self._selector = selector
        self._heard = heard
        self._connections: list[_Connection] = []
        self.name = f"eagle-eye-restart-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(b"\0" + self.name.encode())
            self._listener.listen()
        except OSError as error:
            note(f"ranks have no restart points: {error}")
            self.name = ""
            return
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def ranks(self, attempt: int) -> set[int]:
        """Return the ranks that have a restart point in this attempt."""
        return {said.rank for one in self._connections if (said := one.said) is not None and said.attempt == attempt}

    def go_on(self, word: GoOn) -> None:
        """Tell ranks that wait, in an earlier attempt, to continue."""
        for one in list(self._connections):
            if one.said is not None and one.said.waits and one.said.attempt < word.attempt:
                try:
                    one.socket.sendall(msgspec.json.encode(word))
                except OSError as error:  # it has exited, which its agent reports
                    note(f"rank {one.said.rank} is not told to go on: {error}")
                    self._drop(one)

    def clear(self) -> None:
        """Forget all ranks: they have exited."""
        for one in list(self._connections):
            self._drop(one)

    def disown(self) -> None:
        """Release in a forked process, which does not own them."""
        for sock in (self._listener, *(one.socket for one in self._connections)):
            sock.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.geteuid() or len(self._connections) >= CONNECTIONS_MAX:
            sock.close()
            return
        sock.settimeout(SENT_WITHIN_S)
        one = _Connection(sock)
        self._connections.append(one)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._read, one))

    def _read(self, one: _Connection) -> None:
        try:
            content = one.socket.recv(PACKET_BYTES_MAX)
            said = _decode(content) if content else None
        except (OSError, msgspec.DecodeError):
            said = None
        if said is None:
            self._drop(one)
            return
        one.said = msgspec.structs.replace(said, reason=said.reason[:REASON_CHARS_MAX])
        self._heard(one.said)

    def _drop(self, one: _Connection) -> None:
        self._connections.remove(one)
        self._selector.unregister(one.socket)
        one.socket.close()
