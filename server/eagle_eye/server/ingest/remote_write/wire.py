"""Reads the two remote write messages without trusting them: wanted series, and counts of everything else. Pure.

A dedicated reader instead of generated classes: limits apply while reading (an empty label costs its sender two bytes
and a receiver an object), unwanted series cost only a search, and a known series is found by the bytes of its labels,
which generated classes do not expose. Unknown fields are skipped, as protobuf requires.

Specifications: https://prometheus.io/docs/specs/prw/remote_write_spec/ (prometheus.WriteRequest) and
https://prometheus.io/docs/specs/prw/remote_write_spec_2_0/ (io.prometheus.write.v2.Request).
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from eagle_eye.server.history import remote_series

# Snappy's block format (https://github.com/google/snappy/blob/main/format_description.txt): a block begins with its
# uncompressed length, so that decompression bombs are refused in advance.

SNAPPY_LENGTH_BYTES_MAX = 5  # of the announced length: a 32-bit varint


class BadSnappy(ValueError):
    """Not a complete block. The message says what is wrong."""


def announced_bytes(block: bytes) -> int:
    """Return the uncompressed size that the block announces. Raises BadSnappy."""
    length = 0
    for at, byte in enumerate(block[:SNAPPY_LENGTH_BYTES_MAX]):
        length |= (byte & 0x7F) << 7 * at
        if byte < 0x80:
            if length >= 1 << 32:
                break
            return length
    raise BadSnappy("the body does not begin with a length of at most 32 bits, as a Snappy block does")


def uncompressed(block: bytes, announced: int) -> bytes:
    """Return the uncompressed block. Raises BadSnappy unless it has exactly the announced size."""
    if announced == 0:
        if len(block) == 1:
            return b""
        raise BadSnappy("the Snappy block announces nothing and holds something")
    # Imported at the first request: it takes half a second and 40 MB, needed only by servers with remote write.
    import pyarrow as pa

    try:
        content: bytes = pa.Codec("snappy").decompress(block, announced, asbytes=True)
    except (OSError, ValueError, pa.ArrowException):
        raise BadSnappy(f"the Snappy block is damaged: {len(block)} bytes that announce {announced}") from None
    if len(content) != announced:
        raise BadSnappy(f"the Snappy block announces {announced} bytes and holds {len(content)}")
    return content


# The messages.

SAMPLES_MAX = 200_000  # per request; Prometheus sends 2,000
SYMBOLS_MAX = 500_000  # per request; 2,000 series have some thousands
LABELS_MAX = 512  # per series of version 2; Kubernetes adds them by the dozen
UNWANTED_NAMES_MAX = 16  # per request
LABEL_BYTES_MAX = 16_384  # of all labels of one wanted series
STALE_NAN = bytes.fromhex("020000000000f07f")  # stale marker "this series has ended", little-endian

_VARINT, _FIXED64, _LEN, _FIXED32 = 0, 1, 2, 5
_NAME = b"\x0a\x08__name__\x12"  # how the name label begins in a message of version 1
_SYMBOLS_KEY = 0xFF  # begins a key of version 2 and separates its texts: the byte does not occur in UTF-8
# Fields of a series that are counted but not read.
_BESIDE_V1: Mapping[int, str] = MappingProxyType({3: "exemplar", 4: "histogram"})
_BESIDE_V2: Mapping[int, str] = MappingProxyType({3: "histogram", 4: "exemplar", 5: "metadata"})
_double = struct.Struct("<d").unpack_from


class Malformed(ValueError):
    """Not a valid message; ``reason`` is one stable word."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Sample(NamedTuple):
    """One sample of a series; ``value`` None: the series has ended (a stale marker)."""

    time_ms: int
    value: float | None


class WireSeries(NamedTuple):
    """A wanted series; ``key`` encodes its labels (see ``labels``) and is equal in every request of a version."""

    key: bytes
    name: str
    samples: list[Sample]


@dataclass(slots=True)
class WriteRequest:
    """The contents of a request.

    ``samples`` counts all of them, ``unwanted`` those of series with unwanted names (the first of which are in
    ``unwanted_names``), ``oversized`` those of wanted ones with labels beyond the limit. ``beside`` counts the rest:
    histogram, exemplar, metadata.
    """

    series: list[WireSeries] = field(default_factory=list)
    series_count: int = 0
    samples: int = 0
    unwanted: int = 0
    unwanted_names: dict[bytes, None] = field(default_factory=dict)
    oversized: int = 0
    beside: Counter[str] = field(default_factory=Counter)


def read_v1(body: bytes, wanted: Container[bytes], series_max: int) -> WriteRequest:
    """Read a prometheus.WriteRequest. Raises Malformed."""
    written = WriteRequest()
    at, end = 0, len(body)
    while at < end:
        number, kind, start, at = _field(body, at, end)
        if number == 1 and kind == _LEN:
            _count_series(written, series_max)
            _series_v1(body, start, at, wanted, written)
        elif number == 3 and kind == _LEN:
            written.beside["metadata"] += 1
    return written


def read_v2(body: bytes, wanted: Container[bytes], series_max: int) -> WriteRequest:
    """Read an io.prometheus.write.v2.Request. Raises Malformed."""
    written = WriteRequest()
    symbols: list[bytes] = []
    places: list[tuple[int, int]] = []
    at, end = 0, len(body)
    while at < end:
        number, kind, start, at = _field(body, at, end)
        if number == 5 and kind == _LEN:
            _count_series(written, series_max)
            places.append((start, at))
        elif number == 4 and kind == _LEN:
            symbols.append(body[start:at])
            if len(symbols) > SYMBOLS_MAX:
                raise Malformed("symbols", f"the request has more than {SYMBOLS_MAX} symbols; send less at a time")
    for start, stop in places:
        _series_v2(body, start, stop, symbols, wanted, written)
    return written


def labels(key: bytes) -> dict[str, str]:
    """Return the labels encoded in a series' key. Raises Malformed with reason "labels"."""
    parts = key[1:].split(b"\xff") if key[0] == _SYMBOLS_KEY else _texts(key)
    try:
        texts = [part.decode() for part in parts]
    except UnicodeDecodeError:
        raise Malformed("labels", "a label is not valid UTF-8") from None
    found = dict(zip(texts[::2], texts[1::2], strict=True))
    if 2 * len(found) != len(texts) or "" in found:
        raise Malformed("labels", "a label has no name, or two have the same")
    return found


def request_v1(series: Iterable[WireSeries]) -> bytes:
    """Return a prometheus.WriteRequest of the series, which ``read_v1`` reads as they are."""
    return b"".join(
        remote_series.field(1, _head_v1(one.key) + b"".join(map(_sample_v1, one.samples))) for one in series
    )


def _count_series(written: WriteRequest, series_max: int) -> None:
    written.series_count += 1
    if written.series_count > series_max:
        raise Malformed(
            "series_limit", f"the request has more than {series_max} series (remote_write.request_series_max)"
        )


def _series_v1(body: bytes, start: int, end: int, wanted: Container[bytes], written: WriteRequest) -> None:
    at = _labels_end(body, start, end)
    key = body[start : min(at, start + LABEL_BYTES_MAX + 1)]
    samples: list[Sample] = []
    while at < end:
        number, kind, inner, at = _field(body, at, end)
        if kind == _LEN and number == 1:
            raise Malformed("labels", "a series has labels after its samples; they come first")
        if kind == _LEN and number == 2:
            samples.append(_sample(body, inner, at))
            _count_sample(written)
        elif kind == _LEN and number in _BESIDE_V1:
            written.beside[_BESIDE_V1[number]] += 1
    name = _name_v1(key)
    if name not in wanted:
        _leave_out(written, name, len(samples))
    elif len(key) > LABEL_BYTES_MAX:
        written.oversized += len(samples)
    else:
        written.series.append(WireSeries(key, name.decode(), samples))


def _labels_end(body: bytes, at: int, end: int) -> int:
    """Return where the labels at the start of a series end."""
    while at < end and body[at] == 0x0A:
        at += 2 + body[at + 1] if at + 1 < end and body[at + 1] < 0x80 else _field(body, at, end)[3] - at
    if at > end:
        raise _cut()
    return at


def _name_v1(key: bytes) -> bytes:
    """Return the metric's name as a quick search finds it; for wanted names, ``labels`` checks again."""
    place = key.find(_NAME) + len(_NAME)
    return key[place + 1 : place + 1 + key[place]] if len(_NAME) <= place < len(key) else b""


def _series_v2(
    body: bytes, at: int, end: int, symbols: list[bytes], wanted: Container[bytes], written: WriteRequest
) -> None:
    samples: list[Sample] = []
    references: list[int] = []
    while at < end:
        number, kind, start, at = _field(body, at, end)
        if kind == _LEN and number == 1:
            _add_references(references, body, start, at)
        elif kind == _LEN and number == 2:
            samples.append(_sample(body, start, at))
            _count_sample(written)
        elif kind == _LEN and number in _BESIDE_V2:
            written.beside[_BESIDE_V2[number]] += 1
    texts = _resolved(references, symbols)
    name = next((value for name, value in zip(texts[::2], texts[1::2], strict=True) if name == b"__name__"), b"")
    if name not in wanted:
        _leave_out(written, name, len(samples))
    elif sum(map(len, texts)) > LABEL_BYTES_MAX:  # checked first: all could be the same, longest symbol
        written.oversized += len(samples)
    elif any(_SYMBOLS_KEY in text for text in texts):
        raise Malformed("labels", "a label is not valid UTF-8")
    else:
        written.series.append(WireSeries(b"\xff" + b"\xff".join(texts), name.decode(), samples))


def _leave_out(written: WriteRequest, name: bytes, samples: int) -> None:
    written.unwanted += samples
    if len(written.unwanted_names) < UNWANTED_NAMES_MAX:
        written.unwanted_names[name] = None


def _resolved(references: list[int], symbols: list[bytes]) -> list[bytes]:
    if len(references) % 2:
        raise Malformed("labels", f"a series refers to {len(references)} symbols; names and values come in pairs")
    try:
        return [symbols[reference] for reference in references]
    except IndexError:
        raise Malformed(
            "symbols", f"a series refers to symbol {max(references)}; the request has {len(symbols)}"
        ) from None


def _count_sample(written: WriteRequest) -> None:
    written.samples += 1
    if written.samples > SAMPLES_MAX:
        raise Malformed("samples_limit", f"the request has more than {SAMPLES_MAX} samples; send fewer at a time")


def _sample(body: bytes, at: int, end: int) -> Sample:
    """Return a sample; writers omit fields that are 0."""
    value: float | None = 0.0
    time_ms = 0
    while at < end:
        tag = body[at]
        if tag == 0x09 and at + 9 <= end:
            value = _double(body, at + 1)[0]
            if value != value and body[at + 1 : at + 9] == STALE_NAN:
                value = None
            at += 9
        elif tag == 0x10:
            time_ms, at = _varint(body, at + 1, end)
        else:
            at = _field(body, at, end)[3]
    return Sample(time_ms if time_ms < 1 << 63 else time_ms - (1 << 64), value)


def _texts(key: bytes) -> list[bytes]:
    """Return the alternating names and values of version 1's labels."""
    parts: list[bytes] = []
    at, end = 0, len(key)
    while at < end:
        pair = _short_pair(key, at, end)
        if pair is not None:
            name, value, at = pair
            parts += (name, value)
            continue
        _, _, start, at = _field(key, at, end)
        name = value = b""
        while start < at:
            number, kind, inner, start = _field(key, start, at)
            if kind == _LEN and number == 1:
                name = key[inner:start]
            elif kind == _LEN and number == 2:
                value = key[inner:start]
        parts += (name, value)
    return parts


def _short_pair(key: bytes, at: int, end: int) -> tuple[bytes, bytes, int] | None:
    """Return a label's name, value and end, in the usual encoding of senders; None for any other encoding."""
    name = at + 4
    if name >= end or key[at] != 0x0A or key[at + 2] != 0x0A or key[at + 1] >= 0x80 or key[at + 3] >= 0x80:
        return None
    stop, value = at + 2 + key[at + 1], name + key[at + 3] + 2
    if stop > end or value > stop or key[value - 2] != 0x12 or key[value - 1] >= 0x80 or value + key[value - 1] != stop:
        return None
    return key[name : value - 2], key[value:stop], stop


def _add_references(references: list[int], body: bytes, at: int, end: int) -> None:
    while at < end:
        number, at = _varint(body, at, end)
        references.append(number)
        if len(references) > 2 * LABELS_MAX:
            raise Malformed("labels", f"a series has more than {LABELS_MAX} labels")


def _head_v1(key: bytes) -> bytes:
    """Return the labels as version 1 has them."""
    if key[0] != _SYMBOLS_KEY:
        return key
    texts = key[1:].split(b"\xff")
    return b"".join(
        remote_series.field(1, remote_series.field(1, name) + remote_series.field(2, value))
        for name, value in zip(texts[::2], texts[1::2], strict=True)
    )


def _sample_v1(sample: Sample) -> bytes:
    value = STALE_NAN if sample.value is None else struct.pack("<d", sample.value)
    return remote_series.field(2, b"\x09" + value + b"\x10" + remote_series.varint(sample.time_ms & 0xFFFFFFFFFFFFFFFF))


def _field(body: bytes, at: int, end: int) -> tuple[int, int, int, int]:
    """Return a field's number, its wire type, where its content begins (a varint: its value) and where it ends."""
    tag, at = _varint(body, at, end)
    number, kind = tag >> 3, tag & 7
    if number == 0:
        raise Malformed("protobuf", "a field has number 0")
    if kind == _LEN:
        size, at = _varint(body, at, end)
        if size > end - at:
            raise _cut()
        return number, kind, at, at + size
    if kind == _VARINT:
        value, at = _varint(body, at, end)
        return number, kind, value, at
    if kind in (_FIXED64, _FIXED32):
        size = 8 if kind == _FIXED64 else 4
        if size > end - at:
            raise _cut()
        return number, kind, at, at + size
    raise Malformed("protobuf", f"wire type {kind} is in no message of remote write")


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    if at < end and body[at] < 0x80:
        return body[at], at + 1
    value = shift = 0
    while at < end:
        byte = body[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
        if shift > 63:
            raise Malformed("protobuf", "a number has more than ten bytes")
    raise _cut()


def _cut() -> Malformed:
    return Malformed("truncated", "the message ends within a field")
