"""Parses the server's answers to frames from a connection's bytes; caches heads, since a server repeats them."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

import msgspec

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


def cut(data: bytes) -> tuple[HttpAnswer, bytes] | None:
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
