"""Compact frames: what frames share is sent once, as a template; each frame is then a row of numbers.

A row names its template by the hash of the template's bytes, so rows can be read with a stored template whatever
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
    NO_NAME,
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
from eagle_eye.schema.names import is_name, usable_ranks

CONTENT_TYPE = "application/x-eagle-eye-rows"
VERSION = 2
MAGIC = b"EER2"
TEMPLATES_PER_REQUEST_MAX = 64
ID_BYTES = 16  # of the SHA-256: collision-resistant, so that templates cannot be forged

# Magic, number of templates, number of rows, time of sending. Then each template and each row, each after its size.
REQUEST_HEAD = struct.Struct("<4sHHd")
SIZE = struct.Struct("<I")
# Version, three zero bytes, size of the tail, id of the template, sequence, time. Then the numbers, then the tail.
ROW_HEAD = struct.Struct("<B3xI16sQd")
_ID = slice(8, 8 + ID_BYTES)


class TemplateBlock(msgspec.Struct, frozen=True):
    """A table's rows and columns; the first ``exact`` metrics are sent as float64, the others as float32."""

    scope: Scope
    keys: list[int | str]
    metrics: list[str]
    exact: int

    @property
    def size(self) -> int:
        """Size in bytes of the table's numbers in a row."""
        return len(self.keys) * (8 * self.exact + 4 * (len(self.metrics) - self.exact))


class RowTemplate(msgspec.Struct, frozen=True):
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
    blocks: list[TemplateBlock] = []
    collectors: dict[str, str] = {}
    dropped: dict[str, int] = {}
    clock_base_s: float | msgspec.UnsetType = msgspec.UNSET

    @property
    def size(self) -> int:
        """Size in bytes of the numbers of a row."""
        return sum(block.size for block in self.blocks)


class PrunedTemplate(RowTemplate, frozen=True, kw_only=True):
    """A validated template without invalid names and ranks.

    Of the ``ranks_sent``, which rows' tails refer to, it has those at ``places``.
    """

    ranks_sent: int
    places: list[int]


class Tail(msgspec.Struct, frozen=True, omit_defaults=True):
    """The optional part of a row: events, and each of the template's ranks' silence in seconds ([]: all report)."""

    events: list[Event] = []
    silent_s: list[float] = []


class _Keys(msgspec.Struct):
    """The keys of a template's parts; their values stay encoded."""

    ranks: list[dict[str, msgspec.Raw]] = []
    blocks: list[dict[str, msgspec.Raw]] = []


class RowHead(NamedTuple):
    """The header of a row."""

    tail_bytes: int
    template_id: bytes
    sequence: int
    time_s: float


class RowsRequest(NamedTuple):
    """The parts of a request, each still encoded."""

    sent_s: float
    templates: list[bytes]
    rows: list[bytes]


_encoder = msgspec.msgpack.Encoder()
_template_decoder = msgspec.msgpack.Decoder(RowTemplate)
_tail_decoder = msgspec.msgpack.Decoder(Tail)
_keys_decoder = msgspec.msgpack.Decoder(_Keys)
_map_decoder = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_NO_TAIL = Tail()
_USED = ("job", "ranks", "boot_id", "agent_version", "collectors", "dropped")  # by frames without invalid names


def table(
    scope: Scope, rows: Mapping[int, Mapping[str, float]] | Mapping[str, Mapping[str, float]]
) -> tuple[TemplateBlock, bytes]:
    """Return the rows as a table of a template, and their numbers as in a row; metrics missing from a row are NaN.

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
    return TemplateBlock(scope, keys, [*exact, *plain], len(exact)), numbers


class RowWriter:
    """Encodes samples one by one, each as a row together with its template, so that each can be read alone.

    The template is encoded only when it changes.
    """

    def __init__(self) -> None:
        self._template: RowTemplate | None = None
        self._raw = self._id = b""

    def write(self, template: RowTemplate, sequence: int, time_s: float, numbers: bytes, tail: Tail) -> bytes:
        """Return the sample as the body of a request with this row alone; as a whole frame if it has no numbers.

        Also whole if a text is not valid Unicode: it becomes "?", see ``encode_frame``.
        """
        if not template.blocks:
            return encode_frame(_frame(template, sequence, time_s, [], tail))
        try:
            if template != self._template:
                self._raw = encode_template(template)
                self._template, self._id = template, template_id(self._raw)
            row = _row(self._id, sequence, time_s, (numbers,), tail)
        except UnicodeEncodeError:
            return encode_frame(frame_of(template, sequence, time_s, numbers, tail))
        return encode_rows_request((self._raw,), (row,), time_s)


def split_row(raw: bytes) -> tuple[bytes, bytes] | None:
    """Return the template and the row of what ``RowWriter`` wrote; None for a whole frame."""
    if raw[: len(MAGIC)] != MAGIC:
        return None
    begin = REQUEST_HEAD.size + SIZE.size
    end = begin + int(SIZE.unpack_from(raw, REQUEST_HEAD.size)[0])
    return raw[begin:end], raw[end + SIZE.size :]


def read_written(raw: bytes) -> DecodedFrame:
    """Return the frame that ``RowWriter`` wrote, as a row or whole. Raises BadFrame, as ``read_frame``."""
    parts = split_row(raw)
    return read_frame(raw) if parts is None else read_row(decode_template(parts[0])[0], parts[1])


def template_of(frame: Frame) -> RowTemplate:
    """Return the part of the frame that the next ones may share."""
    return RowTemplate(
        version=VERSION,
        node=frame.node,
        boot_id=frame.boot_id,
        stream=frame.stream,
        interval_s=frame.interval_s,
        agent_version=frame.agent_version,
        job=frame.job,
        ranks=speaking(frame.ranks),
        blocks=[_template_block(block) for block in frame.blocks],
        collectors=frame.collectors,
        dropped=frame.dropped,
        clock_base_s=frame.clock_base_s,
    )


def encode_template(template: RowTemplate) -> bytes:
    """Return the template as MessagePack."""
    return _encoder.encode(template)


def is_row(raw: bytes | memoryview) -> bool:
    """Return whether the bytes are a row; otherwise they are a whole frame."""
    return raw[0] == VERSION


def template_of_row(row: bytes | memoryview) -> bytes:
    """Return the id of the template that a row names."""
    return bytes(row[_ID])


def template_id(raw: bytes) -> bytes:
    """Return the id by which rows name the template with these bytes."""
    return hashlib.sha256(raw).digest()[:ID_BYTES]


def encode_row(frame: Frame, template: RowTemplate, id_: bytes) -> bytes:
    """Return the frame as a row of the template, which must be ``template_of`` the frame."""
    numbers = [_packed(block, place) for block, place in zip(frame.blocks, template.blocks, strict=True)]
    return _row(id_, frame.sequence, frame.time_s, numbers, Tail(frame.events, silences(frame.ranks)))


def silences(ranks: Sequence[Rank]) -> list[float]:
    """Return each rank's silence in seconds, as in a tail: empty if all report."""
    silent_s = [rank.silent_s for rank in ranks]
    return silent_s if any(silent_s) else []


def speaking(ranks: Sequence[Rank]) -> list[Rank]:
    """Return the ranks as in a template: without their silences."""
    return [msgspec.structs.replace(rank, silent_s=0.0) if rank.silent_s else rank for rank in ranks]


def encode_rows_request(templates: Sequence[bytes], rows: Sequence[bytes], sent_s: float) -> bytes:
    """Return templates and rows as the body of one request."""
    parts = [REQUEST_HEAD.pack(MAGIC, len(templates), len(rows), sent_s)]
    for item in (*templates, *rows):
        parts += (SIZE.pack(len(item)), item)
    return b"".join(parts)


def decode_rows_request(body: bytes) -> RowsRequest:
    """Return the parts of a request. Raises BadFrame: ``oversized``, ``truncated``, ``version``, ``time``."""
    if len(body) > REQUEST_BYTES_MAX:
        raise BadFrame("oversized", f"the request has {len(body)} bytes; at most {REQUEST_BYTES_MAX} are read")
    if len(body) < REQUEST_HEAD.size:
        raise BadFrame("truncated", f"the request has {len(body)} bytes; its head alone has {REQUEST_HEAD.size}")
    magic, templates, rows, sent_s = REQUEST_HEAD.unpack_from(body)
    if magic != MAGIC:
        raise BadFrame("version", f"the request begins with {magic!r}; this server reads {MAGIC!r}: upgrade the older")
    if not 0.0 < sent_s < TIME_S_MAX:
        raise BadFrame("time", f"sent_s is {sent_s!r}; expected Unix seconds before the year 10000")
    if templates > TEMPLATES_PER_REQUEST_MAX or rows > FRAMES_PER_REQUEST_MAX:
        raise BadFrame(
            "oversized",
            f"{templates} templates and {rows} rows in a request; send at most"
            f" {TEMPLATES_PER_REQUEST_MAX} and {FRAMES_PER_REQUEST_MAX}",
        )
    items: list[bytes] = []
    at = REQUEST_HEAD.size
    for _ in range(templates + rows):
        begin = at + SIZE.size
        if begin > len(body):
            break
        at = begin + SIZE.unpack_from(body, at)[0]
        items.append(body[begin:at])
    if len(items) < templates + rows or at != len(body):
        raise BadFrame(
            "truncated",
            f"the request has {len(body)} bytes; its {templates} templates and {rows} rows do not end there",
        )
    return RowsRequest(sent_s, items[:templates], items[templates:])


def decode_template(raw: bytes) -> tuple[RowTemplate, tuple[str, ...]]:
    """Return the validated template, and what this version does not know in it, as ``DecodedFrame.unknown``.

    Raises BadFrame: as ``read_frame``.
    """
    if len(raw) > FRAME_BYTES_MAX:
        raise BadFrame("oversized", f"the template has {len(raw)} bytes; at most {FRAME_BYTES_MAX} are read")
    try:
        template = _template_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # the latter from keys that are not text
        raise BadFrame("truncated", f"the template is not a complete template of version {VERSION}: {error}") from None
    if template.version != VERSION:
        older = "server" if template.version > VERSION else "agent"
        raise BadFrame(
            "version",
            f"the template is of version {template.version}; this server reads version {VERSION}: upgrade the {older}",
        )
    for place in template.blocks:
        if not 0 <= place.exact <= len(place.metrics):
            raise BadFrame("shape", f"{place.exact} exact metrics of {len(place.metrics)}")
    if template.size > FRAME_BYTES_MAX:
        raise BadFrame(
            "oversized", f"the template's rows have {template.size} bytes; at most {FRAME_BYTES_MAX} are read"
        )
    reading = check_frame(frame_of(template, 1, 1.0, bytes(template.size)))
    if not any(names_none(name) for name in reading.unknown):
        return template, reading.unknown
    used = {field: getattr(reading.frame, field) for field in _USED}
    sent = {field: getattr(template, field) for field in RowTemplate.__struct_fields__ if field not in _USED}
    places = usable_ranks(template.ranks)[1]
    return PrunedTemplate(**sent, **used, ranks_sent=len(template.ranks), places=places), reading.unknown


def unknown_template_keys(raw: bytes) -> tuple[str, ...]:
    """Return the keys of an accepted template that this version does not know, each once, as ``frame.unknown_keys``."""
    try:
        parts = _keys_decoder.decode(raw)
        whole = _map_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return (NO_NAME,)
    shapes: tuple[tuple[str, type[msgspec.Struct], list[dict[str, msgspec.Raw]]], ...] = (
        ("frame", RowTemplate, [whole]),
        ("rank", Rank, parts.ranks),
        ("block", TemplateBlock, parts.blocks),
    )
    found = {
        f"key {name}.{key}" if is_name(key) else NO_NAME
        for name, shape, items in shapes
        for item in items
        for key in item.keys() - set(shape.__struct_fields__)
    }
    return tuple(sorted(found))


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


def read_row(template: RowTemplate, row: bytes) -> DecodedFrame:
    """Return the validated frame that the row of the template encodes, and what was dropped from it.

    Raises BadFrame: as ``read_frame``.
    """
    return check_frame(whole_frame(template, row))


def whole_frame(template: RowTemplate, row: bytes) -> Frame:
    """Return the frame that the row encodes with everything in it, known here or not. Raises BadFrame."""
    head = row_head(row)
    end = check_size(template.size, row, head.tail_bytes)
    tail = decode_tail(template, row[end:]) if head.tail_bytes else _NO_TAIL
    return frame_of(template, head.sequence, head.time_s, row[ROW_HEAD.size : end], tail)


def decode_tail(template: RowTemplate, raw: bytes) -> Tail:
    """Return a row's tail. Raises BadFrame."""
    try:
        tail = _tail_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadFrame("truncated", f"a row's tail cannot be decoded: {error}") from None
    less = template if isinstance(template, PrunedTemplate) else None
    sent = len(template.ranks) if less is None else less.ranks_sent
    if tail.silent_s and len(tail.silent_s) != sent:
        raise BadFrame("shape", f"{len(tail.silent_s)} silences of {sent} ranks")
    if less is not None and tail.silent_s:
        return Tail(tail.events, [tail.silent_s[place] for place in less.places])
    return tail


def ranks_of(template: RowTemplate, tail: Tail) -> list[Rank]:
    """Return the template's ranks with the silences of a row."""
    if not tail.silent_s:
        return template.ranks
    silences = zip(template.ranks, tail.silent_s, strict=True)
    return [msgspec.structs.replace(rank, silent_s=silent_s) for rank, silent_s in silences]


def check_size(numbers_bytes: int, row: bytes, tail_bytes: int) -> int:
    """Return where the row's numbers end and its tail begins. Raises BadFrame ``shape``."""
    end = ROW_HEAD.size + numbers_bytes
    if len(row) != end + tail_bytes:
        raise BadFrame(
            "shape", f"a row has {len(row)} bytes; its template's numbers take {numbers_bytes}, its tail {tail_bytes}"
        )
    return end


def frame_of(template: RowTemplate, sequence: int, time_s: float, numbers: bytes, tail: Tail = _NO_TAIL) -> Frame:
    """Return the frame that the parts of a row encode, unchecked; ``numbers`` has ``template.size`` bytes."""
    at = 0
    blocks: list[Block] = []
    for place in template.blocks:
        blocks.append(_unpacked(place, numbers[at : at + place.size]))
        at += place.size
    return _frame(template, sequence, time_s, blocks, tail)


def _frame(template: RowTemplate, sequence: int, time_s: float, blocks: list[Block], tail: Tail) -> Frame:
    return Frame(
        version=WIRE_VERSION,
        node=template.node,
        boot_id=template.boot_id,
        stream=template.stream,
        sequence=sequence,
        time_s=time_s,
        interval_s=template.interval_s,
        agent_version=template.agent_version,
        job=template.job,
        ranks=ranks_of(template, tail),
        blocks=blocks,
        events=tail.events,
        collectors=template.collectors,
        dropped=template.dropped,
        clock_base_s=template.clock_base_s,
    )


def _row(id_: bytes, sequence: int, time_s: float, numbers: Iterable[bytes], tail: Tail) -> bytes:
    said = _encoder.encode(tail) if tail.events or tail.silent_s else b""
    return b"".join((ROW_HEAD.pack(VERSION, len(said), id_, sequence, time_s), *numbers, said))


def _column(type_: str, values: Iterable[float]) -> bytes:
    numbers = array(type_, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _template_block(block: Block) -> TemplateBlock:
    exact = [name for name in block.metrics if _is_exact(name)]
    plain = [name for name in block.metrics if not _is_exact(name)]
    return TemplateBlock(block.scope, block.keys, [*exact, *plain], len(exact))


def _is_exact(name: str) -> bool:
    spec = catalogue.BY_NAME.get(name)
    return spec is None or spec.exact  # keep full precision for unknown metrics


def _packed(block: Block, place: TemplateBlock) -> bytes:
    rows = len(block.keys)
    values = values_of(block)
    places = {name: at * rows for at, name in enumerate(block.metrics)}
    return b"".join(
        _column(type_, values[places[name] : places[name] + rows])
        for type_, names in (("d", place.metrics[: place.exact]), ("f", place.metrics[place.exact :]))
        for name in names
    )


def _unpacked(place: TemplateBlock, numbers: bytes) -> Block:
    """Return the table with all numbers as little-endian float64, the metrics in the template's order."""
    split = 8 * place.exact * len(place.keys)
    plain = array("f")
    plain.frombytes(numbers[split:])
    if sys.byteorder == "big":
        plain.byteswap()
    wide = array("d", plain)
    if sys.byteorder == "big":
        wide.byteswap()
    return Block(place.scope, place.keys, place.metrics, numbers[:split] + wide.tobytes())
