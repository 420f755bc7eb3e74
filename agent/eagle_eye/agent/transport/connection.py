"""One connection that carries frames: a request's body in, the server's answer out. Touches: the network.

The standard library's client would work but costs too much: an agent spends most of its time here. It supports all
HTTP/1.1 response framings: a length, chunks, or everything until the connection closes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from collections.abc import Callable, Mapping
from io import BufferedReader
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

from eagle_eye.schema.problem import LEADER_HEADER

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
