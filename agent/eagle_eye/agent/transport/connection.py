"""One connection that carries frames: a request's body in, the server's answer out. Touches: the network.

The standard library's client would work but costs too much: an agent spends most of its time here. It supports all
HTTP/1.1 response framings: a length, chunks, or everything until the connection closes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from io import BufferedReader
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

from eagle_eye.agent.loop.clock import ClockBase
from eagle_eye.schema.frame import CONTENT_TYPE as WHOLE_CONTENT_TYPE
from eagle_eye.schema.frame import BadFrame, encode_frame, encode_request, read_frame, unknown_keys
from eagle_eye.schema.problem import LEADER_HEADER
from eagle_eye.schema.rows import CONTENT_TYPE as ROWS_CONTENT_TYPE
from eagle_eye.schema.rows import (
    TEMPLATES_PER_REQUEST_MAX,
    RowTemplate,
    decode_template,
    encode_row,
    encode_rows_request,
    encode_template,
    split_row,
    template_id,
    template_of,
    unknown_template_keys,
    whole_frame,
)

# Builds request bodies from spooled frames: rows, and the templates that the server does not know.
#
# The loop encodes each sample once, as a row with its template; this only concatenates the parts. Frames are re-
# encoded only to re-date them after the clock was set, and to send them whole to a server that does not read rows.
OLD_SERVER_S = 600.0  # how long whole frames are sent to a server that does not read rows
DEFLATE_BYTES_MIN = 16_384  # worth compressing: many frames at once, after an outage
DEFLATE_LEVEL = 1

_NO_ROWS_STATUS = 415
_NO_TEMPLATE = (409, "outline")


class Written(NamedTuple):
    """A request's body; ``encoding`` is its Content-Encoding, "" for none."""

    body: bytes
    content_type: str
    encoding: str = ""


class RequestWriter:
    """Writes one lane's requests, and tracks from the answers what the server knows.

    ``base`` re-dates frames by the clock at sending; None: they are sent unchanged.
    """

    def __init__(self, monotonic_s: Callable[[], float], base: ClockBase | None = None) -> None:
        self._monotonic_s = monotonic_s
        self._base = base
        self._whole_until_s = float("-inf")
        self._raw = b""  # the newest template...
        self._template: RowTemplate | None = None  # ...None: only an agent of another version can read it
        self._is_ours = False  # whether it has only fields known to this agent
        self._id = b""
        self._known: set[bytes] = set()  # those that the server has acknowledged
        self._sent: list[bytes] = []  # the templates that the last request's rows need

    def write(self, kept: Sequence[bytes], now_s: float) -> Written:
        """Return a request with all of ``kept``, which is from one stream."""
        base_s = None if self._base is None else self._base.read()
        if self._monotonic_s() < self._whole_until_s:
            return Written(encode_request([self._whole(raw, base_s) for raw in kept], now_s), WHOLE_CONTENT_TYPE)
        templates: dict[bytes, bytes] = {}
        items: list[bytes] = []
        for raw in kept:
            parts = split_row(raw)
            if parts is None:
                items.append(self._whole(raw, base_s))
                continue
            row = self._row(*parts, base_s)
            if self._id in templates or len(templates) < TEMPLATES_PER_REQUEST_MAX or self._template is None:
                templates[self._id] = self._raw
                items.append(row)
            else:
                items.append(encode_frame(whole_frame(self._template, row)))
        self._sent = list(templates)
        unknown = [raw for id_, raw in templates.items() if id_ not in self._known]
        body = encode_rows_request(unknown, items, now_s)
        if len(body) < DEFLATE_BYTES_MIN:
            return Written(body, ROWS_CONTENT_TYPE)
        return Written(zlib.compress(body, DEFLATE_LEVEL), ROWS_CONTENT_TYPE, "deflate")

    def answered(self, status: int, reason: str) -> bool:
        """Process the answer; return whether the same frames must be sent again at once, rewritten."""
        if status == 200:
            self._known = set(self._sent)
        elif (status, reason) == _NO_TEMPLATE and self._known:
            self._known.clear()
            return True
        elif status == _NO_ROWS_STATUS and self._monotonic_s() >= self._whole_until_s:
            self._whole_until_s = self._monotonic_s() + OLD_SERVER_S
            return True
        return False

    def _row(self, raw: bytes, row: bytes, base_s: float | None) -> bytes:
        """Return a row as it is sent; its template becomes the newest."""
        self._meet(raw)
        template = self._template
        if self._base is None or template is None or not self._is_ours or template.clock_base_s == base_s:
            return row
        frame = self._base.dated(whole_frame(template, row))
        template = template_of(frame)
        self._meet(encode_template(template))
        return encode_row(frame, template, self._id)

    def _meet(self, raw: bytes) -> None:
        if raw == self._raw:
            return
        self._raw, self._id = raw, template_id(raw)
        try:
            self._template, unknown = decode_template(raw)
        except BadFrame:
            self._template, unknown = None, ()
        self._is_ours = not unknown and not unknown_template_keys(raw)

    def _whole(self, raw: bytes, base_s: float | None) -> bytes:
        """Return a spooled frame as a whole frame."""
        parts = split_row(raw)
        if parts is not None:
            row = self._row(*parts, base_s)
            return row if self._template is None else encode_frame(whole_frame(self._template, row))
        if self._base is None:
            return raw
        try:
            frame, unknown = read_frame(raw)
        except BadFrame:
            return raw  # from another version, left in the spool; the server will reject it
        if frame.base_s == base_s or unknown or unknown_keys(raw):
            return raw  # left by a newer agent: its server may know fields that this one would drop
        return encode_frame(self._base.dated(frame))


ANSWER_BYTES_MAX = 1 << 16
LINE_BYTES_MAX = 1 << 13  # per line of the response head, and of a chunk's
LINES_MAX = 128
LENGTH_DIGITS_MAX = 18  # of a length: Python rejects numbers with several thousand

_STATUS = re.compile(rb"HTTP/1\.\d ([1-9]\d\d)[ \r\n]")


class BadAnswer(ValueError):
    """The answer is not HTTP, or exceeds the limits."""


class ServerAnswer(NamedTuple):
    """The server's answer; ``reason`` is the problem's stable word, ``retry_after_s`` None when absent.

    ``fields`` is the whole JSON object, empty where the body is not one. ``leader`` is the URL of the server that
    leads, where one that stands by says it.
    """

    status: int
    watermark: int | None
    reason: str
    detail: str
    retry_after_s: float | None
    fields: Mapping[str, object]
    leader: str


class FrameConnection:
    """Keeps one connection open as long as the server does."""

    def __init__(self, connect: Callable[[], http.client.HTTPConnection], server: str, path: str) -> None:
        """``connect`` returns an open connection to ``server``, a URL; ``path`` is where frames are posted."""
        self._connect = connect
        self._head = (
            f"POST {path} HTTP/1.1\r\nHost: {urlsplit(server).netloc.rpartition('@')[2]}\r\n"
            "Accept: application/json\r\n"
        )
        self._http: http.client.HTTPConnection | None = None
        self._reader: BufferedReader | None = None

    def post(
        self, body: bytes, token: str, content_type: str, more: Mapping[str, str] = MappingProxyType({})
    ) -> ServerAnswer:
        """Return the server's answer; ``token`` empty: none; ``more`` are further headers. Raises OSError, BadAnswer.

        After an error the connection is closed; the next request opens another.
        """
        others = "".join([f"{name}: {value}\r\n" for name, value in more.items()])
        authorization = f"Authorization: Bearer {token}\r\n" if token else ""
        kind = f"Content-Type: {content_type}\r\n"
        head = f"{self._head}{authorization}{kind}{others}Content-Length: {len(body)}\r\n\r\n".encode("ascii")
        request = head + body
        while True:
            reused = self._http is not None
            try:
                if self._http is None or self._reader is None:
                    self._http = self._connect()
                    self._reader = self._http.sock.makefile("rb")
                self._http.sock.sendall(request)
                status, headers = _read_head(self._reader)
                content, whole = _read_body(self._reader, headers)
                break
            except (ConnectionResetError, BrokenPipeError):
                self.close()
                if not reused:
                    raise
                # The server closed it while it was idle: once more on a new one. A frame may be sent twice.
            except BaseException:
                self.close()
                raise
        if not whole or headers.get("connection", "").lower() == "close":
            self.close()
        return _answer(status, headers.get("retry-after"), headers.get(LEADER_HEADER.lower(), ""), content)

    def close(self) -> None:
        """Close; the next request opens another."""
        connection, self._http = self._http, None
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        if connection is not None:
            connection.close()


def _read_head(reader: BufferedReader) -> tuple[int, dict[str, str]]:
    """Return status and headers, names in lower case. Raises OSError, BadAnswer."""
    while True:
        line = _line(reader)
        if not line:
            raise ConnectionResetError("the server closed the connection without an answer")
        match = _STATUS.match(line)
        if match is None:
            raise BadAnswer(f"the answer begins with {line[:40]!r}, which is no HTTP/1.1")
        headers: dict[str, str] = {}
        for _ in range(LINES_MAX):
            line = _line(reader)
            if line in (b"\r\n", b"\n"):
                break
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        else:
            raise BadAnswer(f"the answer's head has more than {LINES_MAX} lines")
        status = int(match[1])
        if status >= 200:  # earlier ones are interim responses
            return status, headers


def _read_body(reader: BufferedReader, headers: Mapping[str, str]) -> tuple[bytes, bool]:
    """Return the body, as far as read, and whether the connection can be reused."""
    if headers.get("transfer-encoding", "identity").lower() != "identity":
        return _read_chunks(reader)
    length = headers.get("content-length", "")
    if not (length.isascii() and length.isdecimal() and len(length) <= LENGTH_DIGITS_MAX):
        return reader.read(ANSWER_BYTES_MAX), False
    content = reader.read(min(int(length), ANSWER_BYTES_MAX))
    return content, len(content) == int(length)


def _read_chunks(reader: BufferedReader) -> tuple[bytes, bool]:
    content = b""
    while len(content) <= ANSWER_BYTES_MAX:
        line = _line(reader).partition(b";")[0].strip()
        try:
            length = int(line, 16)
        except ValueError:
            raise BadAnswer(f"a chunk of the answer has the length {line[:40]!r}") from None
        if length == 0:
            for _ in range(LINES_MAX):
                if _line(reader) in (b"\r\n", b"\n", b""):
                    return content, True
            break
        content += reader.read(min(max(length, 0), ANSWER_BYTES_MAX))
        if length < 0 or _line(reader) not in (b"\r\n", b"\n"):
            break
    return content[:ANSWER_BYTES_MAX], False


def _line(reader: BufferedReader) -> bytes:
    """Return a line with its end; empty at EOF. Raises OSError, BadAnswer."""
    line = reader.readline(LINE_BYTES_MAX)
    if len(line) == LINE_BYTES_MAX:
        raise BadAnswer(f"a line of the answer has more than {LINE_BYTES_MAX} bytes")
    return line


def _answer(status: int, retry_after: str | None, leader: str, content: bytes) -> ServerAnswer:
    fields: dict[str, object] = {}
    with contextlib.suppress(ValueError, RecursionError):  # not JSON: the status alone says enough
        parsed = json.loads(content)
        if isinstance(parsed, dict):
            fields = parsed
    watermark = fields.get("watermark")
    reason, detail = fields.get("reason"), fields.get("detail")
    return ServerAnswer(
        status,
        watermark if type(watermark) is int else None,
        _word(reason) if isinstance(reason, str) else "",
        detail[:300] if isinstance(detail, str) else "",
        float(retry_after) if retry_after and retry_after.isascii() and retry_after.isdecimal() else None,
        fields,
        leader,
    )


def _word(text: str) -> str:
    """Return the reason as one word that may become part of a counter's name."""
    return "".join(char if char.isalnum() or char == "_" else "_" for char in text[:40])
