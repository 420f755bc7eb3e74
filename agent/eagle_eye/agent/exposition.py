"""Prometheus' text format: the agent's own /metrics with its HTTP/1.1 server, and a parser of other exporters' pages.

One event-loop thread serves all connections, so that a slow or hostile client affects only itself: the number of
connections, request size and duration are bounded, and all share one page. Touches: one listening socket, one thread.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from eagle_eye.agent.collector import Drops, TickFrame
from eagle_eye.agent.foreign_files import content
from eagle_eye.schema.frame import Rank
from eagle_eye.schema.metrics import METRICS, PROMETHEUS_PREFIX, MetricKind, MetricSpec, Scope
from eagle_eye.schema.service import why_not_listening

# Parses other exporters' pages: samples of the wanted metrics. Pure.
#
# Specification: https://prometheus.io/docs/instrumenting/exposition_formats/, version 0.0.4.
LINE_CHARS_MAX = 16_384  # exporters on Kubernetes add labels by the dozen, not by the thousand
LABELS_MAX = 64
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(,?)')
_ESCAPE = re.compile(r"\\(.)")
_MEANS = {"n": "\n", "\\": "\\", '"': '"'}


class ParsedSample(NamedTuple):
    """One line: a metric, its labels and its value, which may be NaN or infinite."""

    name: str
    labels: dict[str, str]
    value: float


def samples(text: str, wanted: Collection[str]) -> Iterator[ParsedSample | None]:
    """Yield the wanted metrics' samples, None for one of their lines that cannot be parsed. Others are skipped."""
    for line in io.StringIO(text):  # line by line: a page of short lines would be a list many times its size
        found = _NAME.match(line)
        if found is not None and found[0] in wanted:
            yield _sample(found[0], line[found.end() :]) if len(line) <= LINE_CHARS_MAX else None


def _sample(name: str, rest: str) -> ParsedSample | None:
    labels: dict[str, str] = {}
    at = 0
    if rest.startswith("{"):
        at, more = 1, True
        while found := _LABEL.match(rest, at):
            if not more or len(labels) >= LABELS_MAX:
                return None
            labels[found[1]] = _ESCAPE.sub(lambda escape: _MEANS.get(escape[1], escape[0]), found[2])
            at, more = found.end(), bool(found[3])
        if not rest.startswith("}", at):
            return None
        at += 1
    elif not rest[:1].isspace():
        return None
    words = rest[at:].split()  # the value, and perhaps a timestamp
    if not 1 <= len(words) <= 2:
        return None
    try:
        return ParsedSample(name, labels, float(words[0]))
    except ValueError:
        return None


# The text of /metrics, and the HTTP/1.1 server that shows it. Touches: one listening socket, one thread.
#
# One event-loop thread serves all connections, so that a slow or hostile client affects only itself: the number of
# connections, request size and duration are bounded, and all share one page.

# The agent's /metrics: the newest frame's rows and the agent's own state, in Prometheus' text format 0.0.4.
#
# Hand-written: it is a few lines, and the client library would add 10 MiB to an agent of 25 MiB. Touches: /proc/self
# for its own memory.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STALE_INTERVALS = 3.0  # rows are left out after this many intervals without a tick,
STALE_S_MIN = 5.0  # but not before this
RENDER_EVERY_S = 0.5  # one page serves all scrapes within it: frequent scrapes cost the agent no more than this

Labels = tuple[tuple[str, str], ...]


class FrameDelivery(NamedTuple):
    """State of frame delivery: waiting in the spool, acknowledged since the start, whether the server accepts them.

    ``in_memory``: new frames are only in memory, because the spool's disk fails. None: unknown, as ``server_ok`` before
    the first attempt. ``server_changes``: how often another server than before took them. ``kept``: acknowledged
    frames that are kept, ``resent``: those of them that another server was sent.
    """

    frames_waiting: int
    bytes_waiting: int | None
    in_memory: bool | None
    frames_sent: int
    server_ok: bool | None
    server_changes: int
    kept: int = 0
    resent: int = 0


class OwnMetric(NamedTuple):
    """A metric about the agent itself: its name without the prefix, and its meaning."""

    name: str
    kind: str
    help: str


OWN = {
    spec.name: spec
    for spec in (
        OwnMetric("agent_info", "gauge", "1; the labels say which agent."),
        OwnMetric("agent_cpu_seconds_total", "counter", "CPU time of the agent and of the programs it ran."),
        OwnMetric("agent_resident_memory_bytes", "gauge", "Memory of the agent."),
        OwnMetric("agent_start_time_seconds", "gauge", "When the agent started, Unix time."),
        OwnMetric("agent_frames_total", "counter", "Frames made."),
        OwnMetric("agent_last_frame_timestamp_seconds", "gauge", "When the newest frame at a tick ended, Unix time."),
        OwnMetric("agent_frames_sent_total", "counter", "Frames that the server has acknowledged."),
        OwnMetric("agent_spool_frames", "gauge", "Frames that wait for the server."),
        OwnMetric("agent_spool_bytes", "gauge", "Bytes of frames that wait for the server."),
        OwnMetric(
            "agent_spool_kept_frames", "gauge", "Acknowledged frames that are kept for a server that lacks them."
        ),
        OwnMetric("agent_frames_resent_total", "counter", "Kept frames that another server was sent."),
        OwnMetric("agent_spool_in_memory", "gauge", "1 while new frames wait in memory alone: the disk fails."),
        OwnMetric("agent_server_ok", "gauge", "1 while the server takes frames, 0 while it does not."),
        OwnMetric("agent_server_changes_total", "counter", "How often another server than before took frames."),
        OwnMetric("agent_dropped_total", "counter", "What the agent had to drop, by reason."),
        OwnMetric("agent_collector_ok", "gauge", "1 when a collector saw all that it looks at."),
        OwnMetric("agent_collector_supported", "gauge", "0 for a collector whose source this host does not have."),
        OwnMetric("agent_collector_duration_seconds", "gauge", "How long a collector's last answer took."),
        OwnMetric("agent_collector_failures_total", "counter", "Intervals in which a collector saw less than all."),
        OwnMetric("gpu_info", "gauge", "1; which GPU a device is."),
        OwnMetric("rank_info", "gauge", "1; which rank of which job uses a device."),
    )
}


class Exposition:
    """Keeps the newest tick and renders the page; the loop calls ``show``, any thread ``page``."""

    def __init__(
        self,
        node: str,
        version: str,
        drops: Drops,
        delivery: Callable[[], FrameDelivery | None] = lambda: None,
        devices_by_uuid: Mapping[str, int] | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
        started_s: float | None = None,
    ) -> None:
        """``delivery`` returns None where frames go to no server; ``started_s`` is Unix time."""
        self._node = node
        self._version = version
        self._drops = drops
        self._delivery = delivery
        self._devices_by_uuid = {} if devices_by_uuid is None else devices_by_uuid
        self._monotonic_s = monotonic_s
        self._started_s = time.time() if started_s is None else started_s
        self._shown: tuple[TickFrame, float] | None = None
        self._page = b""
        self._page_s = -math.inf
        self._lock = threading.Lock()

    def show(self, tick: TickFrame) -> None:
        """Take the newest tick."""
        self._shown = (tick, self._monotonic_s())  # one assignment: a page sees either the old or the new one

    def page(self) -> bytes:
        """Return the page, at most RENDER_EVERY_S old."""
        with self._lock:
            now_s = self._monotonic_s()
            if now_s - self._page_s >= RENDER_EVERY_S:
                self._page = self._render(now_s).encode("utf-8", "replace")
                self._page_s = now_s
            return self._page

    def _render(self, now_s: float) -> str:
        families: list[str] = []
        shown = self._shown
        if shown is not None:
            tick, shown_s = shown
            if now_s - shown_s <= max(STALE_S_MIN, STALE_INTERVALS * tick.interval_s):
                families += rows(self._node, tick, dict(self._devices_by_uuid))
            families += collectors(self._node, tick)
        families += self._own()
        return "".join(families)

    def _own(self) -> Iterator[str]:
        node = (("node", self._node),)
        yield own("agent_info", [((*node, ("version", self._version)), 1.0)])
        yield own("agent_start_time_seconds", [(node, self._started_s)])
        times = os.times()
        yield own("agent_cpu_seconds_total", [(node, sum(times[:4]))])
        resident_bytes = _resident_bytes()
        if resident_bytes is not None:
            yield own("agent_resident_memory_bytes", [(node, resident_bytes)])
        drops = sorted(self._drops.snapshot().items())
        yield own("agent_dropped_total", [((*node, ("reason", reason)), count) for reason, count in drops])
        delivery = self._delivery()
        if delivery is not None:
            yield own("agent_frames_sent_total", [(node, delivery.frames_sent)])
            yield own("agent_spool_frames", [(node, delivery.frames_waiting)])
            if delivery.bytes_waiting is not None:
                yield own("agent_spool_bytes", [(node, delivery.bytes_waiting)])
            if delivery.in_memory is not None:
                yield own("agent_spool_in_memory", [(node, delivery.in_memory)])
            if delivery.server_ok is not None:
                yield own("agent_server_ok", [(node, delivery.server_ok)])
            yield own("agent_server_changes_total", [(node, delivery.server_changes)])
            yield own("agent_spool_kept_frames", [(node, delivery.kept)])
            yield own("agent_frames_resent_total", [(node, delivery.resent)])


def rows(node: str, tick: TickFrame, devices_by_uuid: Mapping[str, int]) -> Iterator[str]:
    """Yield the families of a tick's rows.

    A GPU's series have the labels node and device, unchanged while jobs come and go; a rank's also have its job and
    rank, and ``rank_info`` joins the two.
    """
    ranks = _rank_by_device(tick.seen.ranks)
    job = {device: (("eagle_eye_job", rank.job), ("rank", str(rank.rank))) for device, rank in ranks.items()}
    place = {device: (("node", node), ("device", str(device))) for device in {*tick.seen.devices, *ranks}}
    link = {name: (("node", node), ("link", name)) for name in tick.seen.links}
    for spec in METRICS:
        series: list[tuple[Labels, float]] = []
        if spec.scope is Scope.NODE:
            if spec.name in tick.seen.node:
                series.append(((("node", node),), tick.seen.node[spec.name]))
        elif spec.scope is Scope.LINK:
            series += [(link[name], row[spec.name]) for name, row in tick.seen.links.items() if spec.name in row]
        else:
            more = job if spec.name.startswith(("train_", "nccl_")) else {}
            for device, row in tick.seen.devices.items():
                if spec.name in row:
                    series.append(((*place[device], *more.get(device, ())), row[spec.name]))
        yield _family(spec.name, _kind(spec), spec.help, series)
    gpus = sorted((device, uuid) for uuid, device in devices_by_uuid.items())
    yield own("gpu_info", [((("node", node), ("device", str(gpu)), ("uuid", uuid)), 1.0) for gpu, uuid in gpus])
    yield own("rank_info", [((*place[device], *labels), 1.0) for device, labels in job.items()])


def collectors(node: str, tick: TickFrame) -> Iterator[str]:
    """Yield the families of collector states: a collector this host cannot support is not a failing one."""
    labels = {each.name: (("node", node), ("collector", each.name)) for each in tick.collectors}
    asked = [each for each in tick.collectors if each.supported]
    yield own("agent_frames_total", [((("node", node),), tick.frames)])
    yield own("agent_last_frame_timestamp_seconds", [((("node", node),), tick.time_s)])
    yield own("agent_collector_supported", [(labels[each.name], each.supported) for each in tick.collectors])
    yield own("agent_collector_ok", [(labels[each.name], each.ok) for each in asked])
    yield own("agent_collector_duration_seconds", [(labels[each.name], each.duration_s) for each in asked])
    yield own("agent_collector_failures_total", [(labels[each.name], each.failures) for each in asked])


def own(name: str, series: Iterable[tuple[Labels, float]]) -> str:
    """Return a family about the agent itself."""
    spec = OWN[name]
    return _family(spec.name, spec.kind, spec.help, series)


def _family(name: str, kind: str, text: str, series: Iterable[tuple[Labels, float]]) -> str:
    """Return a family with its help and type, empty without series; NaN means not observed."""
    full = PROMETHEUS_PREFIX + name
    lines = [f"{full}{_labels(labels)} {_number(value)}\n" for labels, value in series if not math.isnan(value)]
    return f"# HELP {full} {_escaped(text)}\n# TYPE {full} {kind}\n{''.join(lines)}" if lines else ""


def _kind(spec: MetricSpec) -> str:
    return "counter" if spec.kind is MetricKind.COUNTER else "gauge"  # a sequence may restart, a mask is not a number


def _labels(labels: Labels) -> str:
    inside = ",".join(f'{name}="{_escaped(value, quotes=True)}"' for name, value in labels)
    return f"{{{inside}}}"


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))


def _rank_by_device(ranks: Iterable[Rank]) -> dict[int, Rank]:
    """Return the rank that each device's row belongs to: the newest attempt's where two claim it."""
    return {rank.device: rank for rank in sorted(ranks, key=lambda rank: rank.attempt)}


def _resident_bytes() -> float | None:
    try:
        words = content("/proc/self/statm", 256).split()
        return float(int(words[1]) * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, IndexError, ValueError):
        return None


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
                _log.warning("metrics_listen: %s; trying again", why_not_listening(error, host, port))
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
