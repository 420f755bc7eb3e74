"""Answers NVRx's node health check: ft_launcher asks over gRPC before its node enters a rendezvous.

One method, ``/nvhcd.HealthCheckService/RunHealthCheck``, over HTTP/2 on a Unix socket (NVRx,
shared_utils/proto/nvhcd.proto and health_check.py, 0.7.0). Only a sick verdict keeps a node out; an unknown one is
answered with the status UNAVAILABLE, which every version treats as a check that was not made. The call's arguments are
ignored. Touches: one listening Unix socket, two threads, a child process per verdict.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import quote

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded, StreamReset
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes

from eagle_eye.agent.collector import Drops
from eagle_eye.agent.host_verdict import EXIT_CODES
from eagle_eye.agent.node_check import Ran

METHOD = b"/nvhcd.HealthCheckService/RunHealthCheck"
CONNECTIONS_MAX = 8  # one launcher per node, and its restarts
STREAMS_MAX = 8
REQUEST_BYTES_MAX = 1 << 16
UNSENT_BYTES_MAX = 1 << 18  # all answers to a launcher together are a tenth of it
CONNECTION_S_MAX = 120.0  # NVRx waits for 60 s
VERDICT_S_MAX = 30.0
FRESH_S = 5.0  # launchers that ask together share one verdict
LISTEN_EVERY_S = 30.0  # how long no connection is accepted after running out of descriptors
MODE = 0o666  # a launcher runs as its user, and learns nothing secret here
_READ_BYTES = 1 << 14
_UNIMPLEMENTED = 12
_UNAVAILABLE = 14

_log = logging.getLogger("eagle_eye.agent")


class HostHealth(NamedTuple):
    """The verdict on this host, and its reasons: what makes it sick, or what could not be checked."""

    state: Literal["healthy", "sick", "cannot_tell"]
    reasons: tuple[str, ...] = ()


def health_of(ran: Ran) -> HostHealth:
    """Return the verdict of a child that ran ``eagle-eye agent --once --check``."""
    if ran.why:
        return HostHealth("cannot_tell", (ran.why,))
    reported = ran.output.decode("utf-8", "replace").splitlines()
    if ran.status == EXIT_CODES["sick"]:
        return HostHealth("sick", tuple(line.removeprefix("sick: ") for line in reported if line.startswith("sick: ")))
    if ran.status == EXIT_CODES["healthy"]:
        return HostHealth("healthy")
    return HostHealth("cannot_tell", (ran.complaint.replace("\n", "; ") or f"the check ended with {ran.status}",))


class _Connection:
    """One client: its socket, its HTTP/2 state, its requests, and bytes still to send."""

    def __init__(self, end: socket.socket, deadline_s: float) -> None:
        self.end = end
        self.deadline_s = deadline_s
        self.http = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self.http.initiate_connection()
        self.http.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: STREAMS_MAX})
        self.paths: dict[int, bytes] = {}
        self.bytes_read: dict[int, int] = {}
        self.unsent = b""


class NvrxHealth:
    """Serves the socket from ``start`` to ``stop``. Rejected requests are counted as ``nvrx_health_...``."""

    def __init__(
        self,
        path: Path,
        check: Callable[[Callable[[], str]], HostHealth],
        drops: Drops,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``check`` is called from one thread that lives until ``stop``, and may take VERDICT_S_MAX.

        Its argument returns why it must stop, "" while it may continue.
        """
        self._path = path
        self._check = check
        self._drops = drops
        self._monotonic_s = monotonic_s
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        self._waiting: list[tuple[_Connection, int]] = []
        self._health: HostHealth | None = None
        self._health_s = 0.0
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._asking = False
        self._reported: queue.SimpleQueue[HostHealth] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._stopping = False
        self._listener: socket.socket | None = None
        self._listen_due_s: float | None = None  # None: listening
        self._threads = [
            threading.Thread(target=self._run, name="nvrx-health", daemon=True),
            threading.Thread(target=self._check_all, name="nvrx-verdict", daemon=True),
        ]

    def start(self) -> None:
        """Start answering launchers. A socket that cannot be opened is logged once: launchers then skip the check."""
        try:
            self._listener = _listen(self._path)
        except OSError as error:
            self._drops.count("nvrx_health_no_socket")
            _log.warning("nvrx_health_socket: %s cannot be opened: %s", self._path, error.strerror or error)
            self._close_all()
            return
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop answering and remove the socket: a launcher that finds none skips the check."""
        if self._listener is None or self._stopping:
            return
        self._stopping = True
        self._asked.put(False)
        with contextlib.suppress(OSError):  # the thread has noticed by itself
            self._wake.send(b"x")
        for thread in self._threads:
            thread.join(timeout=2.0)
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _check_all(self) -> None:
        while self._asked.get():
            try:
                health = self._check(lambda: "the agent stops" if self._stopping else "")
            except Exception as error:  # noqa: BLE001 - whoever waits is to be answered
                _log.exception("the verdict on this host failed because of a bug in the agent")
                health = HostHealth("cannot_tell", (type(error).__name__,))
            self._reported.put(health)
            with contextlib.suppress(OSError):
                self._wake.send(b"v")

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._serve()
            except Exception:  # noqa: BLE001 - one client's oddity must not end it for all
                self._drops.count("nvrx_health_failed")
                _log.exception("answering NVRx failed because of a bug in the agent; going on")
                for connection in list(self._connections.values()):
                    self._close(connection)
        self._close_all()

    def _close_all(self) -> None:
        for connection in list(self._connections.values()):
            self._close(connection)
        for end in (self._listener, self._wake, self._woken):
            if end is not None:
                end.close()
        self._selector.close()

    def _serve(self) -> None:
        for key, mask in self._selector.select(1.0):
            if key.fileobj is self._listener:
                self._accept(self._listener)
            elif key.fileobj is self._woken:
                self._woken.recv(64)
            else:
                self._exchange(key.data, mask)
        while not self._reported.empty():
            self._health, self._health_s, self._asking = self._reported.get(), self._monotonic_s(), False
        self._answer_all()
        now_s = self._monotonic_s()
        if self._listen_due_s is not None and self._listener is not None and now_s >= self._listen_due_s:
            self._listen_due_s = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        for connection in [one for one in self._connections.values() if one.deadline_s <= now_s]:
            self._drops.count("nvrx_health_slow")
            self._close(connection)

    def _accept(self, listener: socket.socket) -> None:
        try:
            end, _ = listener.accept()
        except (BlockingIOError, ConnectionError):  # gone again
            return
        except OSError as error:  # out of descriptors: the socket would stay ready and keep this thread busy
            self._drops.count("nvrx_health_connections")
            _log.warning("NVRx is not answered for %g s: %s", LISTEN_EVERY_S, error.strerror or error)
            self._selector.unregister(listener)
            self._listen_due_s = self._monotonic_s() + LISTEN_EVERY_S
            return
        end.setblocking(False)
        if len(self._connections) >= CONNECTIONS_MAX:
            self._drops.count("nvrx_health_connections")
            end.close()
            return
        connection = _Connection(end, self._monotonic_s() + CONNECTION_S_MAX)
        self._connections[end.fileno()] = connection
        self._selector.register(end, selectors.EVENT_READ, connection)
        self._send(connection)

    def _exchange(self, connection: _Connection, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                data = connection.end.recv(_READ_BYTES)
                if not data:
                    self._close(connection)
                    return
                self._take(connection, data)
        except BlockingIOError:
            pass
        except OSError:
            self._close(connection)
            return
        except ProtocolError:
            self._drops.count("nvrx_health_malformed")
            self._close(connection)
            return
        self._send(connection)

    def _take(self, connection: _Connection, data: bytes) -> None:
        http = connection.http
        for event in http.receive_data(data):
            if isinstance(event, RequestReceived):
                connection.paths[event.stream_id] = dict(event.headers).get(b":path", b"")
            elif isinstance(event, DataReceived):
                read = connection.bytes_read.get(event.stream_id, 0) + len(event.data)
                connection.bytes_read[event.stream_id] = read
                if read > REQUEST_BYTES_MAX:
                    raise ProtocolError
                http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, StreamEnded):
                connection.bytes_read.pop(event.stream_id, None)
                if connection.paths.pop(event.stream_id, b"") == METHOD:
                    self._waiting.append((connection, event.stream_id))
                else:
                    self._drops.count("nvrx_health_unknown_method")
                    _refuse(http, event.stream_id, _UNIMPLEMENTED, "only RunHealthCheck is served here")
            elif isinstance(event, StreamReset):
                connection.paths.pop(event.stream_id, None)
                connection.bytes_read.pop(event.stream_id, None)
                self._waiting = [one for one in self._waiting if one != (connection, event.stream_id)]

    def _answer_all(self) -> None:
        if not self._waiting:
            return
        health = self._health
        if health is None or self._monotonic_s() - self._health_s > FRESH_S:
            if not self._asking:
                self._asking = True
                self._asked.put(True)
            return
        waiting, self._waiting = self._waiting, []
        for connection, stream in waiting:
            if connection.end.fileno() < 0:
                continue
            try:
                _answer(connection.http, stream, health)
            except ProtocolError:  # reset meanwhile
                continue
            self._send(connection)

    def _send(self, connection: _Connection) -> None:
        connection.unsent += connection.http.data_to_send()
        try:
            sent = connection.end.send(connection.unsent) if connection.unsent else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close(connection)
            return
        connection.unsent = connection.unsent[sent:]
        if len(connection.unsent) > UNSENT_BYTES_MAX:  # it keeps asking without reading the answers
            self._drops.count("nvrx_health_slow")
            self._close(connection)
            return
        writes = selectors.EVENT_WRITE if connection.unsent else 0
        self._selector.modify(connection.end, selectors.EVENT_READ | writes, connection)

    def _close(self, connection: _Connection) -> None:
        self._waiting = [one for one in self._waiting if one[0] is not connection]
        if self._connections.pop(connection.end.fileno(), None) is not None:
            self._selector.unregister(connection.end)
            connection.end.close()


def response(health: HostHealth) -> bytes:
    """Return the HealthCheckResponse, as protobuf, for a healthy or sick host."""
    sick = health.state == "sick"
    output = {
        "fail_count": max(1, len(health.reasons)) if sick else 0,
        "failed_checks": list(health.reasons),
        "verdict": health.state,
    }
    fields = b"" if sick else b"\x08\x01"  # success; false is not written
    fields += b"\x10" + bytes([EXIT_CODES[health.state]]) if sick else b""
    fields += _text(3, json.dumps(output))
    return fields + (_text(4, "sick: " + "; ".join(health.reasons)) if sick else b"")


def _answer(http: H2Connection, stream: int, health: HostHealth) -> None:
    if health.state == "cannot_tell":
        _refuse(http, stream, _UNAVAILABLE, "cannot tell: " + "; ".join(health.reasons))
        return
    message = response(health)
    http.send_headers(stream, [(b":status", b"200"), (b"content-type", b"application/grpc")])
    http.send_data(stream, b"\0" + len(message).to_bytes(4, "big") + message)
    http.send_headers(stream, [(b"grpc-status", b"0")], end_stream=True)


def _refuse(http: H2Connection, stream: int, status: int, why: str) -> None:
    headers: Sequence[tuple[bytes, bytes]] = [
        (b":status", b"200"),
        (b"content-type", b"application/grpc"),
        (b"grpc-status", b"%d" % status),
        (b"grpc-message", quote(why[:1_000], safe=" ").encode()),
    ]
    http.send_headers(stream, headers, end_stream=True)


def _text(field: int, text: str) -> bytes:
    content = text.encode()
    length, size = len(content), bytearray()
    while length > 0x7F:
        size.append(length & 0x7F | 0x80)
        length >>= 7
    size.append(length)
    return bytes([field << 3 | 2]) + bytes(size) + content


def _listen(path: Path) -> socket.socket:
    """Return a socket listening at the path, replacing one that is no longer served. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            if other.connect_ex(str(path)) == 0:
                raise FileExistsError("another process serves it")
        path.unlink()
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.bind(str(path))
        path.chmod(MODE)
        end.setblocking(False)
        end.listen(CONNECTIONS_MAX)
    except OSError:
        end.close()
        raise
    return end
