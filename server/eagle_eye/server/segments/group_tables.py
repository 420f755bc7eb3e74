"""A row group's frames as tables: rows of outlines all at once, other frames one by one (``columns``)."""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from eagle_eye.schema.frame import BadFrame, encode_frame
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.rows import ROW_HEAD, decode_outline, decode_tail, is_row, outline_of_row, ranks_of, whole_frame
from eagle_eye.server.engine.outlined import Layout, Outlined
from eagle_eye.server.segments.columns import Columns, Kept
from eagle_eye.server.segments.gathering import Gathered
from eagle_eye.server.segments.layout import FRAMES_SCHEMA, LINKS_SCHEMA, SAMPLES_SCHEMA
from eagle_eye.server.segments.row_tables import Odd, Rows, Tables, as_json, turns_of

OUTLINES_MAX = 32_768  # kept for the next groups

# The columns of frames.parquet that an outline alone says.
_SAID = ("interval", "boot_id", "agent_version", "job", "ranks", "collectors", "dropped", "layout")
_HEAD = np.dtype([("version", "u1", 4), ("tail", "<u4"), ("id", "V16"), ("sequence", "<u8"), ("time_s", "<f8")])


class _Read:
    """An outline and what its frames' rows have in common."""

    __slots__ = ("layout", "outlined", "said")

    def __init__(self, raw: bytes) -> None:
        self.outlined = Outlined(*decode_outline(raw))
        self.layout: Layout | None = self.outlined.layout
        outline = self.outlined.outline
        scopes = {block.scope for block in outline.blocks}
        if len(scopes) < len(outline.blocks):
            self.layout = None  # two tables of one scope: no columns hold that
        self.said = (
            outline.interval_s,
            outline.boot_id,
            outline.agent_version,
            outline.job,
            _json(outline.ranks),
            _json(outline.collectors),
            _json(outline.dropped),
            _json([[block.scope.value, block.keys, block.metrics] for block in outline.blocks]),
        )


class GroupTables:
    """Makes tables of groups; reads outlines from the journal and remembers them."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._columns = Columns()
        self._outlines: dict[bytes, _Read | None] = {}

    def of(self, frames: Gathered, first: int) -> Tables:
        """Return the frames, all of a group, as one row group; ``first`` is the first one's number."""
        ids = [outline_of_row(row) if is_row(row) else b"" for row in map(frames.bytes_of, range(frames.frames))]
        read = {id_: self._outline(id_) for id_ in set(ids)}
        if all(one is not None and one.layout is not None for one in read.values()):
            try:
                return self._of_rows(frames, ids, {id_: one for id_, one in read.items() if one is not None}, first)
            except (Odd, BadFrame):
                pass  # somewhere among them is one that columns cannot hold
        whole = [self._whole(kept, read[id_]) for kept, id_ in zip(frames.kept(), ids, strict=True)]
        return self._columns.tables(whole, first)

    def _of_rows(self, frames: Gathered, ids: list[bytes], read: dict[bytes, _Read], first: int) -> Tables:
        """Return frames that are all rows as tables. Raises Odd, BadFrame."""
        known = list(read)
        place_of = {id_: place for place, id_ in enumerate(known)}
        of = np.array([place_of[id_] for id_ in ids])
        heads = np.frombuffer(b"".join(frames.raw[at : at + ROW_HEAD.size] for at in frames.at.tolist()), _HEAD)
        said = {
            name: pa.array([read[id_].said[number] for id_ in known], FRAMES_SCHEMA.field(name).type).take(pa.array(of))
            for number, name in enumerate(_SAID)
        }
        events: list[str | None] = [None] * frames.frames
        self._read_tails(frames, heads["tail"], [read[id_].outlined for id_ in ids], said, events)
        cells = {
            "time": frames.time_s,
            "node": frames.node,
            "stream": frames.stream,
            "sequence": frames.sequence,
            "received": frames.received_s,
            "node_time": heads["time_s"],
            "clock_offset": frames.offset_s,
            "events": events,
        }
        table = pa.table(
            [
                said[field.name]
                if field.name in said
                else pa.array(cells[field.name], field.type)
                if field.name in cells
                else pa.nulls(frames.frames, field.type)
                for field in FRAMES_SCHEMA
            ],
            schema=FRAMES_SCHEMA,
        )
        turns = turns_of(frames.node)
        samples, links = self._rows(frames, of, [read[id_] for id_ in known])
        return Tables(
            table,
            samples.table(SAMPLES_SCHEMA, first, frames.time_s, frames.node, turns),
            links.table(LINKS_SCHEMA, first, frames.time_s, frames.node, turns),
        )

    @staticmethod
    def _rows(frames: Gathered, of: Any, read: list[_Read]) -> tuple[Rows, Rows]:
        samples, links = Rows("device"), Rows("link")
        layouts: dict[Layout, list[int]] = {}
        for place, one in enumerate(read):
            assert one.layout is not None  # noqa: S101 - the caller has looked
            layouts.setdefault(one.layout, []).append(place)
        for layout, places in layouts.items():
            chosen = np.flatnonzero(np.isin(of, places))
            numbers = [frames.raw[at : at + layout.size] for at in (frames.at[chosen] + ROW_HEAD.size).tolist()]
            matrix = layout.matrix(numbers)
            tables: dict[Scope, tuple[tuple[int | str, ...], dict[str, Any]]] = {}
            for part in layout.parts:
                _, columns = tables.setdefault(part.scope, (part.keys, {}))
                values = layout.values(part, matrix)
                columns.update((name, values[:, at, :]) for at, name in enumerate(part.metrics))
            for scope, (keys, columns) in tables.items():
                (links if scope is Scope.LINK else samples).add_all(chosen, keys, columns)
        return samples, links

    @staticmethod
    def _read_tails(
        frames: Gathered, sizes: Any, outlined: list[Outlined], said: dict[str, Any], events: list[str | None]
    ) -> None:
        """Put what rows' tails say where it belongs."""
        with_tail = np.flatnonzero(sizes).tolist()
        if not with_tail:
            return
        ranks = said["ranks"].to_pylist()
        for place in with_tail:
            outline = outlined[place].outline
            row = frames.bytes_of(place)
            tail = decode_tail(outline, row[len(row) - int(sizes[place]) :])
            if tail.events:
                events[place] = _json(tail.events)
            if tail.silent_s:
                ranks[place] = _json(ranks_of(outline, tail))
        said["ranks"] = pa.array(ranks, FRAMES_SCHEMA.field("ranks").type)

    def _outline(self, id_: bytes) -> _Read | None:
        if id_ and id_ not in self._outlines:
            row = self._connection.execute("SELECT raw FROM outlines WHERE id = ?", (id_,)).fetchone()
            if len(self._outlines) >= OUTLINES_MAX:
                self._outlines.clear()
            try:
                self._outlines[id_] = None if row is None else _Read(row[0])
            except (BadFrame, Odd):
                self._outlines[id_] = None
        return self._outlines[id_] if id_ else None

    @staticmethod
    def _whole(kept: Kept, read: _Read | None) -> Kept:
        """Return a row as the whole frame that it stands for; one that cannot be read stays as it is."""
        if read is None:
            return kept
        try:
            return kept._replace(raw=encode_frame(whole_frame(read.outlined.outline, bytes(kept.raw))))
        except BadFrame:
            return kept


def _json(value: Any) -> str:
    return as_json(msgspec.to_builtins(value))
