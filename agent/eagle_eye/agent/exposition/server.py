"""Serves /metrics over HTTP/1.1, one response per connection. Touches: one listening socket, one thread.

One event-loop thread serves all connections, so that a slow or hostile client affects only itself: the number of
connections, request size and duration are bounded, and all share one page.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from eagle_eye.agent.exposition.text import CONTENT_TYPE
from eagle_eye.agent.loop.drops import Drops
from eagle_eye.schema.listening import why_not

PATH = "/metrics"
CONNECTIONS_MAX = 8  # a Prometheus or two, and a human
REQUEST_BYTES_MAX = 8_192
CONNECTION_S_MAX = 10.0  # from accepting to the last byte: Prometheus' own timeout by default
LISTEN_EVERY_S = 30.0  # how often a port in use is retried
_READ_BYTES = 4_096

_log = logging.getLogger("eagle_eye.agent")


class _Connection:
    """One client: bytes received, and bytes still to send."""

    def __init__(self, end: socket.socket, deadline_s: float) -> None:
        self.end = end
        self.deadline_s = deadline_s
        self.said = b""
        self.head = memoryview(b"")
        self.body = memoryview(b"")


class MetricsServer:
    """Listens until stopped. A port in use is logged once and retried; the agent keeps running.

    Connections beyond CONNECTIONS_MAX are closed, counted as ``metrics_connections``; those that take too long as
    ``metrics_slow``.
    """

    def __init__(
        self,
        listen: str,
        page: Callable[[], bytes],
        drops: Drops,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``listen`` is host:port. Raises ValueError naming the expected form."""
        self._address = address(listen)
        self._listen = listen
        self._page = page
        self._drops = drops
        self._monotonic_s = monotonic_s
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        self._listener: socket.socket | None = None
        self._listen_due_s = 0.0
        self._said = False
        self._stopping = False
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        """Start listening, if the port is available."""
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._open()
        self._thread.start()

    @property
    def port(self) -> int | None:
        """The port, None while not listening."""
        listener = self._listener
        return int(listener.getsockname()[1]) if listener is not None else None

    def stop(self) -> None:
        """Close all sockets."""
        if not self._stopping:
            self._stopping = True
            self._wake.send(b"x")
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._serve()
            except Exception:  # noqa: BLE001 - the page must not end with one client's oddity
                _log.exception("serving %s failed because of a bug in the agent; going on", PATH)
                self._close_all()
        self._close_all()
        listener, self._listener = self._listener, None
        for end in (listener, self._wake, self._woken):
            if end is not None:
                end.close()
        self._selector.close()

    def _open(self) -> None:
        host, port = self._address
        self._listen_due_s = self._monotonic_s() + LISTEN_EVERY_S
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        end = None
        try:
            end = socket.socket(family, socket.SOCK_STREAM)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            end.setblocking(False)
            end.bind((host, port))
            end.listen(CONNECTIONS_MAX)
        except OSError as error:
            if end is not None:
                end.close()
            if not self._said:
                self._said = True
                _log.warning("metrics_listen: %s; trying again", why_not(error, host, port))
            return
        self._listener = end
        self._selector.register(end, selectors.EVENT_READ)
        _log.info("serves http://%s%s", self._listen, PATH)

    def _serve(self) -> None:
        now_s = self._monotonic_s()
        if self._listener is None and now_s >= self._listen_due_s:
            self._open()
        due_s = [connection.deadline_s for connection in self._connections.values()]
        if self._listener is None:
            due_s.append(self._listen_due_s)
        ready = self._selector.select(max(0.0, min(due_s) - now_s) if due_s else None)
        for key, events in ready:
            connection = self._connections.get(key.fd)
            if key.fileobj is self._listener:
                self._accept()
            elif connection is not None and key.fileobj is connection.end:  # not one that has since reused its number
                self._go_on(connection, events)
        now_s = self._monotonic_s()
        for connection in [c for c in self._connections.values() if now_s >= c.deadline_s]:
            self._drops.count("metrics_slow")
            self._close(connection)

    def _accept(self) -> None:
        assert self._listener is not None  # noqa: S101 - it was ready
        try:
            end, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # gone again
            return
        except OSError as error:  # out of descriptors: the socket would stay ready and keep this thread busy
            _log.warning("no connection can be taken for %s s: %s", LISTEN_EVERY_S, error.strerror)
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
            self._listen_due_s = self._monotonic_s() + LISTEN_EVERY_S
            return
        if len(self._connections) >= CONNECTIONS_MAX:
            self._drops.count("metrics_connections")
            end.close()
            return
        end.setblocking(False)
        self._connections[end.fileno()] = _Connection(end, self._monotonic_s() + CONNECTION_S_MAX)
        self._selector.register(end, selectors.EVENT_READ)

    def _go_on(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read(connection)
            else:
                self._write(connection)
        except BlockingIOError:
            return
        except OSError:  # the client has gone
            self._close(connection)

    def _read(self, connection: _Connection) -> None:
        said = connection.end.recv(_READ_BYTES)
        connection.said += said
        if b"\r\n\r\n" in connection.said or b"\n\n" in connection.said:
            head, body = self._answer(connection.said)
        elif len(connection.said) > REQUEST_BYTES_MAX:
            head, body = _answer(431, b"the request is too long\n")
        elif said:
            return
        else:
            self._close(connection)
            return
        connection.head, connection.body = memoryview(head), memoryview(body)
        self._selector.modify(connection.end, selectors.EVENT_WRITE)

    def _write(self, connection: _Connection) -> None:
        if connection.head:
            connection.head = connection.head[connection.end.send(connection.head) :]
        elif connection.body:
            connection.body = connection.body[connection.end.send(connection.body) :]
        if not connection.head and not connection.body:
            self._close(connection)

    def _answer(self, request: bytes) -> tuple[bytes, bytes]:
        words = request.partition(b"\n")[0].split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _answer(400, b"expected GET /metrics HTTP/1.1\n")
        if words[0] not in (b"GET", b"HEAD"):
            return _answer(405, b"expected GET\n")
        if words[1].partition(b"?")[0] != PATH.encode():
            return _answer(404, b"the metrics are at /metrics\n")
        head, body = _answer(200, self._page())
        return head, body if words[0] == b"GET" else b""

    def _close(self, connection: _Connection) -> None:
        self._connections.pop(connection.end.fileno(), None)
        self._selector.unregister(connection.end)
        connection.end.close()

    def _close_all(self) -> None:
        for connection in list(self._connections.values()):
            self._close(connection)


_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
}


def _answer(status: int, body: bytes) -> tuple[bytes, bytes]:
    """Return a response's head and body."""
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
        f"{'Allow: GET, HEAD' if status == 405 else 'Cache-Control: no-store'}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii"), body


def address(listen: str) -> tuple[str, int]:
    """Return the host, an IP address, and the port of ``host:port``. Raises ValueError naming the expected form."""
    expected = f"expected an address and a port such as 127.0.0.1:8471 or [::1]:8471, got {listen[:100]!r}"
    try:
        parts = urlsplit(f"//{listen}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise ValueError(expected) from None
    if port is None or parts.path or parts.username is not None or not _is_address(host):
        raise ValueError(expected)
    return host, port


def _is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, host)
            return True
    return False
