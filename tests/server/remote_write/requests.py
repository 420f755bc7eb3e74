"""Requests of remote write, encoded as its senders do; written apart from the reader, from the specifications."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pyarrow as pa

STALE = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000002))[0]
V1_HEADERS = {
    "content-type": "application/x-protobuf",
    "content-encoding": "snappy",
    "x-prometheus-remote-write-version": "0.1.0",
}
V2_HEADERS = {
    "content-type": "application/x-protobuf;proto=io.prometheus.write.v2.Request",
    "content-encoding": "snappy",
    "x-prometheus-remote-write-version": "2.0.0",
}


class Written(NamedTuple):
    """One series of a request: labels with ``__name__``, and (seconds, value) pairs."""

    labels: Mapping[str, str]
    samples: Iterable[tuple[float, float]]


def series(name: str, value: float, time_s: float, **labels: str) -> Written:
    return Written({"__name__": name, **labels}, [(time_s, value)])


def v1(*written: Written, beside: bytes = b"") -> bytes:
    """Return a prometheus.WriteRequest; ``beside`` is appended to each series."""
    content = b""
    for one in written:
        labels = b"".join(field(1, text(1, name) + text(2, value)) for name, value in sorted(one.labels.items()))
        content += field(1, labels + b"".join(field(2, sample(*pair)) for pair in one.samples) + beside)
    return content


def v2(*written: Written, beside: bytes = b"") -> bytes:
    """Return an io.prometheus.write.v2.Request."""
    symbols: dict[str, int] = {"": 0}
    content = b""
    for one in written:
        texts = [part for pair in sorted(one.labels.items()) for part in pair]
        references = b"".join(varint(symbols.setdefault(part, len(symbols))) for part in texts)
        content += field(5, field(1, references) + b"".join(field(2, sample(*pair)) for pair in one.samples) + beside)
    return b"".join(text(4, symbol) for symbol in symbols) + content


def snappy(content: bytes) -> bytes:
    return bytes(pa.compress(content, codec="snappy", asbytes=True))


def sample(time_s: float, value: float) -> bytes:
    """Return a sample; what is 0 is left out, as protobuf does."""
    double = b"" if value == 0.0 else b"\x09" + struct.pack("<d", value)
    time_ms = round(time_s * 1000)
    return double + (b"" if time_ms == 0 else b"\x10" + varint(time_ms % (1 << 64)))


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def text(number: int, content: str) -> bytes:
    return field(number, content.encode())


def varint(number: int) -> bytes:
    out = b""
    while number >= 0x80:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])
