"""Connections of synthetic agents to the target: requests, parsed answers, enrolment. Touches: the network."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import random
import re
import resource
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import msgspec

from eagle_eye.schema.configuration import ConfigurationError

FRAMES_PATH = "/api/v1/frames"
ENROL_PATH = "/api/v1/enrol"
PORTS_PER_ADDRESS = 500  # connections from one source address: a server bounds those of one
_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain"})


class LoadTarget(NamedTuple):
    """A server by its URL; ``ssl`` None: plain HTTP."""

    url: str
    host: str
    port: int
    prefix: str
    ssl: ssl.SSLContext | None

    @property
    def is_loopback(self) -> bool:
        """Whether the server is on this machine and can be reached from it alone."""
        return _is_loopback(self.host)

    def head(self, path: str, content_type: str, token: str) -> bytes:
        """Return a request's head up to the value of Content-Length; ``token`` "": none is sent."""
        netloc = urlsplit(self.url).netloc.rpartition("@")[2]
        lines = [
            f"POST {self.prefix}{path} HTTP/1.1",
            f"Host: {netloc}",
            f"Content-Type: {content_type}",
            "Accept: application/json",
            *([f"Authorization: Bearer {token}"] if token else []),
            "Content-Length: ",
        ]
        return "\r\n".join(lines).encode("ascii")

    def source(self, connection: int) -> tuple[str, int] | None:
        """Return the address that a connection comes from; None: the system chooses.

        Agents have an address each, and a server bounds what one may do.
        """
        try:
            loopback = ipaddress.IPv4Address(self.host).is_loopback
        except ValueError:
            return None
        return (f"127.0.0.{2 + connection // PORTS_PER_ADDRESS % 250}", 0) if loopback else None


def load_target(url: str, ca_file: Path | None = None) -> LoadTarget:
    """Return the server of a URL. Raises ConfigurationError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigurationError(f"--server: {url!r} is no URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"--server: expected a URL such as http://127.0.0.1:8470, got {url!r}")
    context = None
    if parts.scheme == "https":
        try:
            context = ssl.create_default_context(cafile=ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(f"--ca-file: {ca_file} cannot be used: {error}") from None
    return LoadTarget(url, parts.hostname, port or (443 if context else 80), parts.path.rstrip("/"), context)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in _LOOPBACK_NAMES


HEAD_BYTES_MAX = 1 << 14
BODY_BYTES_MAX = 1 << 18

_STATUS = re.compile(rb"HTTP/1\.[01] ([1-9]\d\d)[ \r]")


class BadHttpAnswer(ValueError):
    """The bytes are not an HTTP/1.1 answer with a length."""


class HttpAnswer(NamedTuple):
    """One answer. ``retry_after_s`` None: absent. ``last``: the server closes the connection after it."""

    status: int
    body: bytes
    retry_after_s: float | None
    last: bool


class _Head(NamedTuple):
    status: int
    length: int
    retry_after_s: float | None
    last: bool


class Acknowledgement(msgspec.Struct, frozen=True):
    """The body of a 200: every frame up to ``watermark`` is durable."""

    accepted: int
    duplicates: int
    watermark: int


class _Problem(msgspec.Struct, frozen=True):
    reason: str = ""
    detail: str = ""


_acknowledgements = msgspec.json.Decoder(Acknowledgement)
_problems = msgspec.json.Decoder(_Problem)


def cut_answer(data: bytes) -> tuple[HttpAnswer, bytes] | None:
    """Return the first whole answer and what follows it; None while it is not whole. Raises BadAnswer."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        if len(data) > HEAD_BYTES_MAX:
            raise BadHttpAnswer(f"the answer's head has more than {HEAD_BYTES_MAX} bytes")
        return None
    head = _head(data[:end])
    begin = end + 4
    if len(data) < begin + head.length:
        return None
    answer = HttpAnswer(head.status, data[begin : begin + head.length], head.retry_after_s, head.last)
    return answer, data[begin + head.length :]


def acknowledgement(body: bytes) -> Acknowledgement:
    """Return the content of a 200. Raises BadAnswer."""
    try:
        return _acknowledgements.decode(body)
    except msgspec.MsgspecError as error:
        raise BadHttpAnswer(f"a 200 that acknowledges nothing: {error}") from None


def problem(body: bytes) -> tuple[str, str]:
    """Return the reason and detail of a problem document; empty where it is none."""
    try:
        said = _problems.decode(body)
    except msgspec.MsgspecError:
        return "", ""
    return said.reason[:40], said.detail[:300]


@functools.lru_cache(maxsize=1_024)
def _head(text: bytes) -> _Head:
    match = _STATUS.match(text)
    if match is None:
        raise BadHttpAnswer(f"the answer begins with {text[:40]!r}, which is no HTTP/1.1")
    fields: dict[bytes, bytes] = {}
    for line in text.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        fields[name.strip().lower()] = value.strip()
    status = int(match[1])
    length = fields.get(b"content-length", b"0" if status == 204 else b"")
    if not (length.isdigit() and int(length[:9]) <= BODY_BYTES_MAX and len(length) < 9):
        raise BadHttpAnswer(f"the answer's length is {length[:20]!r}; expected at most {BODY_BYTES_MAX} bytes")
    said = fields.get(b"retry-after", b"")
    retry_after_s = float(said) if said.isdigit() and len(said) < 9 else None
    return _Head(status, int(length), retry_after_s, fields.get(b"connection", b"").lower() == b"close")


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
            found = cut_answer(data)
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


ENROL_AT_ONCE = 16
ENROL_TIMEOUT_S = 10.0
ENROL_ATTEMPTS_MAX = 100  # each waits as long as the server says


class NotEnrolled(Exception):
    """The server gave no token; the message is for people."""


class _Enrolled(msgspec.Struct, frozen=True):
    token: str


class _Asking:
    """One connection with one request at a time."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[HttpAnswer] | None = None

    async def request(self, connection: LoadConnection, request: bytes) -> HttpAnswer:
        """Return the answer. Raises ConnectionError, TimeoutError."""
        self._answer = asyncio.get_running_loop().create_future()
        connection.send(request)
        return await asyncio.wait_for(self._answer, ENROL_TIMEOUT_S)

    def answered(self, answer: HttpAnswer) -> None:
        """See connection.ConnectionOwner."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)

    def lost(self, why: str) -> None:
        """See connection.ConnectionOwner."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(why))


async def enrol(target: LoadTarget, join: str, nodes: Sequence[str]) -> list[str]:
    """Return a token for each node. Raises NotEnrolled, OSError."""
    head = target.head(ENROL_PATH, "application/json", join)
    tokens = [""] * len(nodes)
    left = iter(range(len(nodes)))

    async def some(lane: int) -> None:
        asking = _Asking()
        connection = await connect(target, asking, lane, ENROL_TIMEOUT_S)
        try:
            for at in left:
                body = msgspec.json.encode({"node": nodes[at]})
                for _ in range(ENROL_ATTEMPTS_MAX):
                    if not connection.is_open:
                        connection = await connect(target, asking, lane, ENROL_TIMEOUT_S)
                    answer = await asking.request(connection, b"%b%d\r\n\r\n%b" % (head, len(body), body))
                    if answer.status not in (429, 503):
                        break
                    await asyncio.sleep((answer.retry_after_s or 1.0) * random.uniform(1.0, 1.5))  # noqa: S311 - no secret
                tokens[at] = _token(nodes[at], answer)
        finally:
            connection.close("end")

    lanes = [asyncio.create_task(some(lane)) for lane in range(min(ENROL_AT_ONCE, len(nodes)))]
    try:
        await asyncio.gather(*lanes)
    finally:
        for lane in lanes:
            lane.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
    return tokens


def _token(node: str, answer: HttpAnswer) -> str:
    if answer.status != 201:
        reason, detail = problem(answer.body)
        raise NotEnrolled(f"node {node!r} cannot be enrolled: HTTP {answer.status} {reason}: {detail}")
    try:
        return msgspec.json.decode(answer.body, type=_Enrolled).token
    except msgspec.MsgspecError as error:
        raise NotEnrolled(f"node {node!r} cannot be enrolled: the answer has no token ({error})") from None
