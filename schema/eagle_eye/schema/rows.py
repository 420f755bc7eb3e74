"""Compact frames: what frames share is sent once, as an outline; each frame is then a row of numbers.

A row names its outline by the hash of the outline's bytes, so rows can be read with a stored outline whatever
connection, request or process they come from. This saves half of the numbers' bytes and all names, and rows of one
layout can be read together, as one matrix. ``docs/reference/wire.md`` describes the bytes. All of it is untrusted:
decoding raises ``BadFrame``.
"""

from __future__ import annotations

import hashlib
import math
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import (
    FRAME_BYTES_MAX,
    FRAMES_PER_REQUEST_MAX,
    REQUEST_BYTES_MAX,
    TIME_S_MAX,
    WIRE_VERSION,
    BadFrame,
    Block,
    DecodedFrame,
    Frame,
    Rank,
    check_frame,
    encode_frame,
    read_frame,
    values_of,
)
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.names import usable_ranks

CONTENT_TYPE = "application/x-eagle-eye-rows"
VERSION = 2
MAGIC = b"EER2"
OUTLINES_PER_REQUEST_MAX = 64
ID_BYTES = 16  # of the SHA-256: collision-resistant, so that outlines cannot be forged

# Magic, number of outlines, number of rows, time of sending. Then each outline and each row, each after its size.
REQUEST_HEAD = struct.Struct("<4sHHd")
SIZE = struct.Struct("<I")
# Version, three zero bytes, size of the tail, id of the outline, sequence, time. Then the numbers, then the tail.
ROW_HEAD = struct.Struct("<B3xI16sQd")
_ID = slice(8, 8 + ID_BYTES)


class OutlineBlock(msgspec.Struct, frozen=True):
    """A table's rows and columns; the first ``exact`` metrics are sent as float64, the others as float32."""

    scope: Scope
    keys: list[int | str]
    metrics: list[str]
    exact: int

    @property
    def size(self) -> int:
        """Size in bytes of the table's numbers in a row."""
        return len(self.keys) * (8 * self.exact + 4 * (len(self.metrics) - self.exact))


class Outline(msgspec.Struct, frozen=True):
    """The shared part of frames: everything but the sequence, time, numbers and events.

    The ranks' ``silent_s`` is 0 here; a row's tail has it where it is not.
    """

    version: int
    node: str
    boot_id: str
    stream: str
    interval_s: float
    agent_version: str
    job: str | None = None
    ranks: list[Rank] = []
    blocks: list[OutlineBlock] = []
    collectors: dict[str, str] = {}
    dropped: dict[str, int] = {}
    clock_base_s: float | msgspec.UnsetType = msgspec.UNSET

    @property
    def size(self) -> int:
        """Size in bytes of the numbers of a row."""
        return sum(block.size for block in self.blocks)


class OutlineLess(Outline, frozen=True, kw_only=True):
    """A validated outline without invalid names and ranks.

    Of the ``ranks_sent``, which rows' tails refer to, it has those at ``places``.
    """

    ranks_sent: int
    places: list[int]


class Tail(msgspec.Struct, frozen=True, omit_defaults=True):
    """The optional part of a row: events, and each of the outline's ranks' silence in seconds ([]: all report)."""

    events: list[Event] = []
    silent_s: list[float] = []


class RowHead(NamedTuple):
    """The header of a row."""

    tail_bytes: int
    outline_id: bytes
    sequence: int
    time_s: float


class RowsRequest(NamedTuple):
    """The parts of a request, each still encoded."""

    sent_s: float
    outlines: list[bytes]
    rows: list[bytes]


_encoder = msgspec.msgpack.Encoder()
_outline_decoder = msgspec.msgpack.Decoder(Outline)
_tail_decoder = msgspec.msgpack.Decoder(Tail)
_NO_TAIL = Tail()
_USED = ("job", "ranks", "boot_id", "agent_version", "collectors", "dropped")  # by frames without invalid names


def table(
    scope: Scope, rows: Mapping[int, Mapping[str, float]] | Mapping[str, Mapping[str, float]]
) -> tuple[OutlineBlock, bytes]:
    """Return the rows as a table of an outline, and their numbers as in a row; metrics missing from a row are NaN.

    Raises KeyError for a metric that is not in the catalogue: add it there first.
    """
    keys: list[int | str] = list(rows)
    lines: list[Mapping[str, float]] = list(rows.values())
    exact: list[str] = []
    plain: list[str] = []
    for name in {name: None for line in lines for name in line}:
        spec = catalogue.BY_NAME[name]
        if spec.scope is not scope:
            raise KeyError(f"{name} is not a {scope.value} metric")
        (exact if spec.exact else plain).append(name)
    numbers = _column("d", [line.get(name, math.nan) for name in exact for line in lines])
    numbers += _column("f", [line.get(name, math.nan) for name in plain for line in lines])
    return OutlineBlock(scope, keys, [*exact, *plain], len(exact)), numbers


class RowWriter:
    """Encodes samples one by one, each as a row together with its outline, so that each can be read alone.

    The outline is encoded only when it changes.
    """

    def __init__(self) -> None:
        self._outline: Outline | None = None
        self._raw = self._id = b""

    def write(self, outline: Outline, sequence: int, time_s: float, numbers: bytes, tail: Tail) -> bytes:
        """Return the sample as the body of a request with this row alone; as a whole frame if it has no numbers.

        Also whole if a text is not valid Unicode: it becomes "?", see ``encode_frame``.
        """
        if not outline.blocks:
            return encode_frame(_frame(outline, sequence, time_s, [], tail))
        try:
            if outline != self._outline:
                self._raw = encode_outline(outline)
                self._outline, self._id = outline, outline_id(self._raw)
            row = _row(self._id, sequence, time_s, (numbers,), tail)
        except UnicodeEncodeError:
            return encode_frame(frame_of(outline, sequence, time_s, numbers, tail))
        return encode_rows_request((self._raw,), (row,), time_s)


def split_row(raw: bytes) -> tuple[bytes, bytes] | None:
    """Return the outline and the row of what ``RowWriter`` wrote; None for a whole frame."""
    if raw[: len(MAGIC)] != MAGIC:
        return None
    begin = REQUEST_HEAD.size + SIZE.size
    end = begin + int(SIZE.unpack_from(raw, REQUEST_HEAD.size)[0])
    return raw[begin:end], raw[end + SIZE.size :]


def read_written(raw: bytes) -> DecodedFrame:
    """Return the frame that ``RowWriter`` wrote, as a row or whole. Raises BadFrame, as ``read_frame``."""
    parts = split_row(raw)
    return read_frame(raw) if parts is None else read_row(decode_outline(parts[0])[0], parts[1])


def outline_of(frame: Frame) -> Outline:
    """Return the part of the frame that the next ones may share."""
    return Outline(
        version=VERSION,
        node=frame.node,
        boot_id=frame.boot_id,
        stream=frame.stream,
        interval_s=frame.interval_s,
        agent_version=frame.agent_version,
        job=frame.job,
        ranks=speaking(frame.ranks),
        blocks=[_outlined(block) for block in frame.blocks],
        collectors=frame.collectors,
        dropped=frame.dropped,
        clock_base_s=frame.clock_base_s,
    )


def encode_outline(outline: Outline) -> bytes:
    """Return the outline as MessagePack."""
    return _encoder.encode(outline)


def is_row(raw: bytes | memoryview) -> bool:
    """Return whether the bytes are a row; otherwise they are a whole frame."""
    return raw[0] == VERSION


def outline_of_row(row: bytes | memoryview) -> bytes:
    """Return the id of the outline that a row names."""
    return bytes(row[_ID])


def outline_id(raw: bytes) -> bytes:
    """Return the id by which rows name the outline with these bytes."""
    return hashlib.sha256(raw).digest()[:ID_BYTES]


def encode_row(frame: Frame, outline: Outline, id_: bytes) -> bytes:
    """Return the frame as a row of the outline, which must be ``outline_of`` the frame."""
    numbers = [_packed(block, place) for block, place in zip(frame.blocks, outline.blocks, strict=True)]
    return _row(id_, frame.sequence, frame.time_s, numbers, Tail(frame.events, silences(frame.ranks)))


def silences(ranks: Sequence[Rank]) -> list[float]:
    """Return each rank's silence in seconds, as in a tail: empty if all report."""
    silent_s = [rank.silent_s for rank in ranks]
    return silent_s if any(silent_s) else []


def speaking(ranks: Sequence[Rank]) -> list[Rank]:
    """Return the ranks as in an outline: without their silences."""
    return [msgspec.structs.replace(rank, silent_s=0.0) if rank.silent_s else rank for rank in ranks]


def encode_rows_request(outlines: Sequence[bytes], rows: Sequence[bytes], sent_s: float) -> bytes:
    """Return outlines and rows as the body of one request."""
    parts = [REQUEST_HEAD.pack(MAGIC, len(outlines), len(rows), sent_s)]
    for item in (*outlines, *rows):
        parts += (SIZE.pack(len(item)), item)
    return b"".join(parts)


def decode_rows_request(body: bytes) -> RowsRequest:
    """Return the parts of a request. Raises BadFrame: ``oversized``, ``truncated``, ``version``, ``time``."""
    if len(body) > REQUEST_BYTES_MAX:
        raise BadFrame("oversized", f"the request has {len(body)} bytes; at most {REQUEST_BYTES_MAX} are read")
    if len(body) < REQUEST_HEAD.size:
        raise BadFrame("truncated", f"the request has {len(body)} bytes; its head alone has {REQUEST_HEAD.size}")
    magic, outlines, rows, sent_s = REQUEST_HEAD.unpack_from(body)
    if magic != MAGIC:
        raise BadFrame("version", f"the request begins with {magic!r}; this server reads {MAGIC!r}: upgrade the older")
    if not 0.0 < sent_s < TIME_S_MAX:
        raise BadFrame("time", f"sent_s is {sent_s!r}; expected Unix seconds before the year 10000")
    if outlines > OUTLINES_PER_REQUEST_MAX or rows > FRAMES_PER_REQUEST_MAX:
        raise BadFrame(
            "oversized",
            f"{outlines} outlines and {rows} rows in a request; send at most"
            f" {OUTLINES_PER_REQUEST_MAX} and {FRAMES_PER_REQUEST_MAX}",
        )
    items: list[bytes] = []
    at = REQUEST_HEAD.size
    for _ in range(outlines + rows):
        begin = at + SIZE.size
        if begin > len(body):
            break
        at = begin + SIZE.unpack_from(body, at)[0]
        items.append(body[begin:at])
    if len(items) < outlines + rows or at != len(body):
        raise BadFrame(
            "truncated",
            f"the request has {len(body)} bytes; its {outlines} outlines and {rows} rows do not end there",
        )
    return RowsRequest(sent_s, items[:outlines], items[outlines:])


def decode_outline(raw: bytes) -> tuple[Outline, tuple[str, ...]]:
    """Return the validated outline, and what this version does not know in it, as ``DecodedFrame.unknown``.

    Raises BadFrame: as ``read_frame``.
    """
    if len(raw) > FRAME_BYTES_MAX:
        raise BadFrame("oversized", f"the outline has {len(raw)} bytes; at most {FRAME_BYTES_MAX} are read")
    try:
        outline = _outline_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # the latter from keys that are not text
        raise BadFrame("truncated", f"the outline is not a complete outline of version {VERSION}: {error}") from None
    if outline.version != VERSION:
        older = "server" if outline.version > VERSION else "agent"
        raise BadFrame(
            "version",
            f"the outline is of version {outline.version}; this server reads version {VERSION}: upgrade the {older}",
        )
    for place in outline.blocks:
        if not 0 <= place.exact <= len(place.metrics):
            raise BadFrame("shape", f"{place.exact} exact metrics of {len(place.metrics)}")
    if outline.size > FRAME_BYTES_MAX:
        raise BadFrame("oversized", f"the outline's rows have {outline.size} bytes; at most {FRAME_BYTES_MAX} are read")
    reading = check_frame(frame_of(outline, 1, 1.0, bytes(outline.size)))
    if not any(names_none(name) for name in reading.unknown):
        return outline, reading.unknown
    used = {field: getattr(reading.frame, field) for field in _USED}
    sent = {field: getattr(outline, field) for field in Outline.__struct_fields__ if field not in _USED}
    places = usable_ranks(outline.ranks)[1]
    return OutlineLess(**sent, **used, ranks_sent=len(outline.ranks), places=places), reading.unknown


def names_none(unknown: str) -> bool:
    """Return whether a dropped item is an invalid name or rank, not a table's row or column."""
    kind, _, rest = unknown.partition(" ")
    return kind in ("name", "number") and not rest.startswith(("metric ", "link "))


def row_head(row: bytes) -> RowHead:
    """Return the header of a row.

    Raises BadFrame: ``truncated``, ``oversized``, ``version``, ``time``, ``shape``.
    """
    if not ROW_HEAD.size <= len(row) <= FRAME_BYTES_MAX:
        reason = "truncated" if len(row) < ROW_HEAD.size else "oversized"
        raise BadFrame(reason, f"a row has {len(row)} bytes; expected {ROW_HEAD.size} to {FRAME_BYTES_MAX}")
    version, tail_bytes, id_, sequence, time_s = ROW_HEAD.unpack_from(row)
    if version != VERSION:
        raise BadFrame("version", f"a row is of version {version}; this server reads version {VERSION}")
    if not 0.0 < time_s < TIME_S_MAX:
        raise BadFrame("time", f"time_s is {time_s!r}; expected Unix seconds before the year 10000")
    if not 0 < sequence < 1 << 53:
        raise BadFrame("shape", f"sequence is {sequence}; expected 1 or more")
    return RowHead(tail_bytes, id_, sequence, time_s)


def read_row(outline: Outline, row: bytes) -> DecodedFrame:
    """Return the validated frame that the row of the outline encodes, and what was dropped from it.

    Raises BadFrame: as ``read_frame``.
    """
    return check_frame(whole_frame(outline, row))


def whole_frame(outline: Outline, row: bytes) -> Frame:
    """Return the frame that the row encodes with everything in it, known here or not. Raises BadFrame."""
    head = row_head(row)
    end = check_size(outline.size, row, head.tail_bytes)
    tail = decode_tail(outline, row[end:]) if head.tail_bytes else _NO_TAIL
    return frame_of(outline, head.sequence, head.time_s, row[ROW_HEAD.size : end], tail)


def decode_tail(outline: Outline, raw: bytes) -> Tail:
    """Return a row's tail. Raises BadFrame."""
    try:
        tail = _tail_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadFrame("truncated", f"a row's tail cannot be decoded: {error}") from None
    less = outline if isinstance(outline, OutlineLess) else None
    sent = len(outline.ranks) if less is None else less.ranks_sent
    if tail.silent_s and len(tail.silent_s) != sent:
        raise BadFrame("shape", f"{len(tail.silent_s)} silences of {sent} ranks")
    if less is not None and tail.silent_s:
        return Tail(tail.events, [tail.silent_s[place] for place in less.places])
    return tail


def ranks_of(outline: Outline, tail: Tail) -> list[Rank]:
    """Return the outline's ranks with the silences of a row."""
    if not tail.silent_s:
        return outline.ranks
    silences = zip(outline.ranks, tail.silent_s, strict=True)
    return [msgspec.structs.replace(rank, silent_s=silent_s) for rank, silent_s in silences]


def check_size(numbers_bytes: int, row: bytes, tail_bytes: int) -> int:
    """Return where the row's numbers end and its tail begins. Raises BadFrame ``shape``."""
    end = ROW_HEAD.size + numbers_bytes
    if len(row) != end + tail_bytes:
        raise BadFrame(
            "shape", f"a row has {len(row)} bytes; its outline's numbers take {numbers_bytes}, its tail {tail_bytes}"
        )
    return end


def frame_of(outline: Outline, sequence: int, time_s: float, numbers: bytes, tail: Tail = _NO_TAIL) -> Frame:
    """Return the frame that the parts of a row encode, unchecked; ``numbers`` has ``outline.size`` bytes."""
    at = 0
    blocks: list[Block] = []
    for place in outline.blocks:
        blocks.append(_unpacked(place, numbers[at : at + place.size]))
        at += place.size
    return _frame(outline, sequence, time_s, blocks, tail)


def _frame(outline: Outline, sequence: int, time_s: float, blocks: list[Block], tail: Tail) -> Frame:
    return Frame(
        version=WIRE_VERSION,
        node=outline.node,
        boot_id=outline.boot_id,
        stream=outline.stream,
        sequence=sequence,
        time_s=time_s,
        interval_s=outline.interval_s,
        agent_version=outline.agent_version,
        job=outline.job,
        ranks=ranks_of(outline, tail),
        blocks=blocks,
        events=tail.events,
        collectors=outline.collectors,
        dropped=outline.dropped,
        clock_base_s=outline.clock_base_s,
    )


def _row(id_: bytes, sequence: int, time_s: float, numbers: Iterable[bytes], tail: Tail) -> bytes:
    said = _encoder.encode(tail) if tail.events or tail.silent_s else b""
    return b"".join((ROW_HEAD.pack(VERSION, len(said), id_, sequence, time_s), *numbers, said))


def _column(type_: str, values: Iterable[float]) -> bytes:
    numbers = array(type_, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _outlined(block: Block) -> OutlineBlock:
    exact = [name for name in block.metrics if _is_exact(name)]
    plain = [name for name in block.metrics if not _is_exact(name)]
    return OutlineBlock(block.scope, block.keys, [*exact, *plain], len(exact))


def _is_exact(name: str) -> bool:
    spec = catalogue.BY_NAME.get(name)
    return spec is None or spec.exact  # keep full precision for unknown metrics


def _packed(block: Block, place: OutlineBlock) -> bytes:
    rows = len(block.keys)
    values = values_of(block)
    places = {name: at * rows for at, name in enumerate(block.metrics)}
    return b"".join(
        _column(type_, values[places[name] : places[name] + rows])
        for type_, names in (("d", place.metrics[: place.exact]), ("f", place.metrics[place.exact :]))
        for name in names
    )


def _unpacked(place: OutlineBlock, numbers: bytes) -> Block:
    """Return the table with all numbers as little-endian float64, the metrics in the outline's order."""
    split = 8 * place.exact * len(place.keys)
    plain = array("f")
    plain.frombytes(numbers[split:])
    if sys.byteorder == "big":
        plain.byteswap()
    wide = array("d", plain)
    if sys.byteorder == "big":
        wide.byteswap()
    return Block(place.scope, place.keys, place.metrics, numbers[:split] + wide.tobytes())
