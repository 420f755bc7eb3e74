"""Converts frames to the columns of a segment's tables.

Only precision is lost: gauges become float32, as in a trace. Fields of newer agents that this server does not know are
stored beside the columns; a frame that columns cannot represent is stored whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from eagle_eye.schema.metrics import Scope
from eagle_eye.server.history.segments.layout import FRAMES_SCHEMA, LINKS_SCHEMA, SAMPLES_SCHEMA
from eagle_eye.server.history.segments.row_tables import Odd, Rows, Tables, as_json

REMEMBERED_MAX = 10_000  # texts and layouts that recur between frames, of each kind


class JournaledFrame(NamedTuple):
    """A frame as the journal stores it; ``time_s`` is the corrected time."""

    node: str
    time_s: float
    stream: str
    sequence: int
    received_s: float
    offset_s: float
    raw: bytes | memoryview


class _Block(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    scope: Scope
    keys: msgspec.Raw
    metrics: msgspec.Raw
    values: bytes


class _Frame(msgspec.Struct, gc=False):
    """Like schema.frame's Frame, but what is the same in most frames stays encoded."""

    version: int
    node: str
    boot_id: str
    stream: str
    sequence: int
    time_s: float
    interval_s: float
    agent_version: str
    job: str | None = None
    ranks: msgspec.Raw = msgspec.Raw(b"\x90")
    blocks: list[_Block] = []
    events: msgspec.Raw = msgspec.Raw(b"\x90")
    collectors: msgspec.Raw = msgspec.Raw(b"\x80")
    dropped: msgspec.Raw = msgspec.Raw(b"\x80")
    clock_base_s: float | None = None  # only used to compute the offset; has no column


class _KnownFrame(_Frame, forbid_unknown_fields=True):
    pass


class _Placed(NamedTuple):
    scope: Scope
    keys: list[int | str]
    metrics: list[str]
    columns: list[str]  # the metrics that have a column
    known: list[int]  # and their indexes among the metrics
    unknown: list[int]


_NO_EVENTS = b"\x90"
_COLUMNS = {
    Scope.DEVICE: frozenset(SAMPLES_SCHEMA.names),
    Scope.NODE: frozenset(SAMPLES_SCHEMA.names),
    Scope.LINK: frozenset(LINKS_SCHEMA.names),
}
_known_frame_decoder = msgspec.msgpack.Decoder(_KnownFrame)
_frame_decoder = msgspec.msgpack.Decoder(_Frame)
_map_decoder = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_keys_decoder = msgspec.msgpack.Decoder(list[int | str])
_names_decoder = msgspec.msgpack.Decoder(list[str])


class Columns:
    """Builds tables of frames; caches what recurs in them."""

    def __init__(self) -> None:
        self._texts: dict[bytes, str] = {}
        self._layouts: dict[tuple[tuple[Scope, bytes, bytes], ...], tuple[str, list[_Placed]]] = {}

    def tables(self, frames: Sequence[JournaledFrame], first: int) -> Tables:
        """Return the frames, sorted by node and then time, as one row group; ``first`` is the first one's row."""
        samples, links = Rows("device"), Rows("link")
        columns = list(zip(*(self._row(kept, at, samples, links) for at, kept in enumerate(frames)), strict=True))
        times_s = np.array(columns[0], dtype=np.float64)
        names = list(dict.fromkeys(columns[1]))
        place_of = {name: place for place, name in enumerate(names)}
        node = np.array([place_of[name] for name in columns[1]], dtype=np.int64)
        cells = [pa.array(column, field.type) for column, field in zip(columns, FRAMES_SCHEMA, strict=True)]
        return Tables(
            pa.table(cells, schema=FRAMES_SCHEMA),
            samples.table(SAMPLES_SCHEMA, first, times_s, node, names),
            links.table(LINKS_SCHEMA, first, times_s, node, names),
        )

    def _row(self, kept: JournaledFrame, at: int, samples: Rows, links: Rows) -> tuple[Any, ...]:
        """Return the frame's row of frames.parquet, and add its blocks to the other tables."""
        of_journal = (kept.time_s, kept.node, kept.stream, kept.sequence, kept.received_s)
        try:
            frame, other = _decode(kept.raw)
            layout, blocks = self._layout(frame)
            row = (
                *of_journal,
                frame.time_s,
                kept.offset_s,
                frame.interval_s,
                frame.boot_id,
                frame.agent_version,
                frame.job,
                self._text(frame.ranks),
                self._text(frame.collectors),
                self._text(frame.dropped),
                None if bytes(frame.events) == _NO_EVENTS else self._text(frame.events),
                other,
                layout,
                _unknown(frame.blocks, blocks),
                None,
            )
        except (msgspec.MsgspecError, UnicodeError, ValueError, RecursionError, Odd):
            return (*of_journal, None, kept.offset_s, *[None] * 11, bytes(kept.raw))
        for block, placed in zip(frame.blocks, blocks, strict=True):
            (links if placed.scope is Scope.LINK else samples).add(
                at, (layout, placed.scope), placed.keys, len(placed.metrics), placed.columns, placed.known, block.values
            )
        return row

    def _text(self, raw: msgspec.Raw) -> str:
        """Return encoded values as equivalent JSON. Raises Odd."""
        encoded = bytes(raw)
        text = self._texts.get(encoded)
        if text is None:
            text = as_json(msgspec.msgpack.decode(encoded))
            if len(self._texts) >= REMEMBERED_MAX:
                self._texts.clear()
            self._texts[encoded] = text
        return text

    def _layout(self, frame: _Frame) -> tuple[str, list[_Placed]]:
        """Return the layout of the frame's blocks, as text and with its columns located. Raises Odd."""
        key = tuple((block.scope, bytes(block.keys), bytes(block.metrics)) for block in frame.blocks)
        found = self._layouts.get(key)
        if found is None:
            placed = [_placed(*parts) for parts in key]
            if len({block.scope for block in placed}) < len(placed):
                raise Odd
            text = as_json([[block.scope.value, block.keys, block.metrics] for block in placed])
            if len(self._layouts) >= REMEMBERED_MAX:
                self._layouts.clear()
            found = self._layouts[key] = (text, placed)
        for block, place in zip(frame.blocks, found[1], strict=True):
            if len(block.values) != 8 * len(place.keys) * len(place.metrics):
                raise Odd
        return found


def _placed(scope: Scope, keys: bytes, metrics: bytes) -> _Placed:
    rows, names = _keys_decoder.decode(keys), _names_decoder.decode(metrics)
    numbers = scope is Scope.LINK or all(isinstance(key, int) and -1 <= key < 1 << 15 for key in rows)
    if not numbers or len({str(key) for key in rows}) < len(rows) or len(set(names)) < len(names):
        raise Odd
    columns = _COLUMNS[scope] - {"time", "node", "device", "link", "frame"}
    known = [at for at, name in enumerate(names) if name in columns]
    unknown = [at for at, name in enumerate(names) if name not in columns]
    return _Placed(scope, rows, names, [names[at] for at in known], known, unknown)


def _decode(raw: bytes | memoryview) -> tuple[_Frame, str | None]:
    """Return the frame, and its unknown keys as JSON. Raises Odd, MsgspecError."""
    try:
        return _known_frame_decoder.decode(raw), None
    except msgspec.ValidationError:
        frame = _frame_decoder.decode(raw)
    parts = _map_decoder.decode(raw)
    other = {key: msgspec.msgpack.decode(parts[key]) for key in parts.keys() - set(_Frame.__struct_fields__)}
    return frame, as_json(other)


def _unknown(blocks: list[_Block], placed: list[_Placed]) -> bytes | None:
    """Return the values of the metrics without a column: by block, then metric, then row."""
    if not any(place.unknown for place in placed):
        return None
    return b"".join(
        block.values[8 * at * len(place.keys) : 8 * (at + 1) * len(place.keys)]
        for block, place in zip(blocks, placed, strict=True)
        for at in place.unknown
    )
