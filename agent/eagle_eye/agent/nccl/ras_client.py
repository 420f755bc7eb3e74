"""Asks NCCL's RAS service for the state of a job. Touches: a TCP connection to this host."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from eagle_eye.agent.nccl.ras_reply import Reply, parse

DEFAULT_PORT = 28_028
PROTOCOL = 2
REPLY_BYTES_MAX = 16 << 20  # a rank of one communicator is about 600 bytes in JSON
LINE_BYTES_MAX = 4_096
GATHER_S = 3  # how long the service waits for its peers: a healthy job answers within milliseconds
HANDSHAKE_S = 1.0
# All processes of a node listen on one port and the kernel picks one: a stopped process must not block the others.
HANDSHAKES_MAX = 4


class NoAnswer(Exception):
    """The service did not answer; ``refused`` where nothing listens."""

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


class TooLong(NoAnswer):
    """The reply exceeds the limit; the text format is shorter."""


def ask(
    port: int, deadline_s: float, *, text: bool = False, monotonic_s: Callable[[], float] = time.monotonic
) -> Reply:
    """Return what the service on this host's ``port`` knows of its job. Raises NoAnswer, BadReply.

    Requests JSON unless ``text``; accepts text where the service is older than 2.28.7.
    """
    until_s = monotonic_s() + deadline_s
    for attempt in range(HANDSHAKES_MAX):
        try:
            connection = _Connection(port, until_s, monotonic_s)
            break
        except TimeoutError:
            if attempt == HANDSHAKES_MAX - 1 or monotonic_s() >= until_s:
                raise NoAnswer(f"port {port}: no handshake within {HANDSHAKE_S:g} s; is its process stopped?") from None
        except ConnectionRefusedError:
            raise NoAnswer(f"port {port}: nobody listens", refused=True) from None
        except OSError as error:
            raise NoAnswer(f"port {port}: {error.strerror or error}") from None
    try:
        return parse(connection.status(text=text))
    except TimeoutError:
        raise NoAnswer(f"port {port}: no status within {deadline_s:g} s") from None
    except OSError as error:
        raise NoAnswer(f"port {port}: {error.strerror or error}") from None
    finally:
        connection.close()


class _Connection:
    """One connection; the service closes it after one status. Raises OSError, TimeoutError, NoAnswer."""

    def __init__(self, port: int, until_s: float, monotonic_s: Callable[[], float]) -> None:
        self._port = port
        self._until_s = until_s
        self._monotonic_s = monotonic_s
        self._unread = b""
        self._socket = socket.create_connection(("localhost", port), timeout=self._rest_s(HANDSHAKE_S))
        try:
            self._greet()
        except BaseException:
            self._socket.close()
            raise

    def status(self, *, text: bool) -> bytes:
        """Return the reply, as JSON where the service supports it and ``text`` is not set."""
        rest_s = self._rest_s()
        self._command(f"TIMEOUT {GATHER_S}", rest_s)  # a service without this command keeps its own timeout
        if not text:
            self._command("SET FORMAT json", rest_s)  # likewise, it then answers in text
        self._send("VERBOSE STATUS")
        parts, size = [self._unread], len(self._unread)
        while True:
            self._socket.settimeout(self._rest_s())
            part = self._socket.recv(1 << 16)
            if not part:
                return b"".join(parts)
            size += len(part)
            if size > REPLY_BYTES_MAX:
                raise TooLong(f"port {self._port}: more than {REPLY_BYTES_MAX} bytes; its job is too large for JSON")
            parts.append(part)

    def close(self) -> None:
        self._socket.close()

    def _greet(self) -> None:
        greeting = self._command(f"CLIENT PROTOCOL {PROTOCOL}", HANDSHAKE_S)
        if not greeting.upper().startswith("SERVER PROTOCOL "):
            raise NoAnswer(f"port {self._port}: no RAS service: it says {greeting[:80]!r}")

    def _send(self, command: str) -> None:
        self._socket.settimeout(self._rest_s())
        self._socket.sendall(command.encode() + b"\n")

    def _command(self, command: str, timeout_s: float) -> str:
        """Return the one-line answer to a command."""
        self._send(command)
        until_s = min(self._until_s, self._monotonic_s() + timeout_s)
        while b"\n" not in self._unread:
            if len(self._unread) > LINE_BYTES_MAX:
                raise NoAnswer(f"port {self._port}: no RAS service: a line of more than {LINE_BYTES_MAX} bytes")
            rest_s = until_s - self._monotonic_s()
            if rest_s <= 0:
                raise TimeoutError
            self._socket.settimeout(rest_s)
            part = self._socket.recv(LINE_BYTES_MAX)
            if not part:
                raise NoAnswer(f"port {self._port}: it closed the connection")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode("utf-8", errors="replace").rstrip("\r")

    def _rest_s(self, most_s: float = float("inf")) -> float:
        rest_s = min(most_s, self._until_s - self._monotonic_s())
        if rest_s <= 0:
            raise TimeoutError
        return rest_s
