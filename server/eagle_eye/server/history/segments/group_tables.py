"""Converts a row group's frames to tables: rows with templates in bulk, other frames one by one (``columns``)."""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from eagle_eye.schema.frame import BadFrame, encode_frame
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.rows import ID_BYTES, ROW_HEAD, VERSION, decode_tail, decode_template, ranks_of, whole_frame
from eagle_eye.server.history.segments import constant_layout_rows as steady
from eagle_eye.server.history.segments.columns import Columns, JournaledFrame
from eagle_eye.server.history.segments.gathering import Gathered
from eagle_eye.server.history.segments.layout import FRAMES_SCHEMA, LINKS_SCHEMA, SAMPLES_SCHEMA
from eagle_eye.server.history.segments.row_tables import Integers, Odd, Rows, Tables, as_json, plain, rows_table, texts
from eagle_eye.server.model.batch import ColumnLayout, ResolvedTemplate

TEMPLATES_MAX = 32_768  # cached for later groups

# The columns of frames.parquet that are determined by the template.
_SAID = ("boot_id", "agent_version", "job", "ranks", "collectors", "dropped", "layout")
_HEAD = np.dtype([("version", "u1", 4), ("tail", "<u4"), ("id", "V16"), ("sequence", "<u8"), ("time_s", "<f8")])


class _Read:
    """A template and the columns common to its frames' rows."""

    __slots__ = ("layout", "resolved", "said")

    def __init__(self, raw: bytes) -> None:
        self.resolved = ResolvedTemplate(*decode_template(raw))
        self.layout: ColumnLayout | None = self.resolved.layout
        template = self.resolved.template
        scopes = {block.scope for block in template.blocks}
        if len(scopes) < len(template.blocks):
            self.layout = None  # two tables of one scope: columns cannot hold that
        self.said = (
            template.boot_id,
            template.agent_version,
            template.job,
            _json(template.ranks),
            _json(template.collectors),
            _json(template.dropped),
            _json([[block.scope.value, block.keys, block.metrics] for block in template.blocks]),
        )


class GroupTables:
    """Builds tables of groups; reads templates from the journal and caches them."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._columns = Columns()
        self._templates: dict[bytes, _Read | None] = {}

    def of(self, frames: Gathered, first: int) -> Tables:
        """Return the frames of a group as one row group; ``first`` is the first one's number."""
        heads = frames.parts(0, ROW_HEAD.size).view(_HEAD)[:, 0]
        ids, of = _templates_of(heads, frames.size)
        read = [self._template(id_) for id_ in ids]
        known = [one for one in read if one is not None and one.layout is not None]
        if len(known) == len(read):
            try:
                return self._of_rows(frames, heads, of, known, first)
            except (Odd, BadFrame):
                pass  # at least one of them cannot be held by columns
        whole = [self._whole(kept, read[place]) for kept, place in zip(frames.kept(), of.tolist(), strict=True)]
        return self._columns.tables(whole, first)

    def _of_rows(self, frames: Gathered, heads: Any, of: Integers, read: list[_Read], first: int) -> Tables:
        """Return frames that are all rows as tables; ``of`` maps each to its template. Raises Odd, BadFrame."""
        rows_bytes = np.array([ROW_HEAD.size + one.resolved.size for one in read])
        if (frames.size != rows_bytes[of] + heads["tail"]).any():
            raise Odd
        said = {name: texts(of, [one.said[number] for one in read]) for number, name in enumerate(_SAID)}
        said["interval"] = plain(np.array([one.resolved.template.interval_s for one in read])[of], pa.float64())
        events: list[str | None] = [None] * frames.frames
        self._read_tails(frames, heads["tail"], of, read, said, events)
        cells = {
            **said,
            "time": plain(frames.time_s, pa.float64()),
            "node": texts(frames.node, frames.names),
            "stream": texts(frames.stream, frames.streams),
            "sequence": plain(frames.sequence, pa.int64()),
            "received": plain(frames.received_s, pa.float64()),
            "node_time": plain(heads["time_s"].copy(), pa.float64()),
            "clock_offset": plain(frames.offset_s, pa.float64()),
            "events": pa.array(events, pa.string()),
        }
        samples, links = self._rows(frames, of, read, first)
        return Tables(rows_table(FRAMES_SCHEMA, cells, frames.frames), samples, links)

    @staticmethod
    def _rows(frames: Gathered, of: Integers, read: list[_Read], first: int) -> tuple[pa.Table | None, pa.Table | None]:
        numbers: dict[ColumnLayout, int] = {}
        for one in read:
            assert one.layout is not None  # noqa: S101 - checked by the caller
            numbers.setdefault(one.layout, len(numbers))
        layouts = list(numbers)
        own = np.array([numbers[one.layout] for one in read if one.layout is not None])[of]
        runs = steady.runs_of(frames.node, own)
        if runs is not None and not any(map(_has_twins, layouts)):
            return steady.tables(frames, runs, layouts, first)
        samples, links = Rows("device"), Rows("link")
        for number, layout in enumerate(layouts):
            chosen = np.flatnonzero(own == number)
            matrix = frames.of(chosen).parts(ROW_HEAD.size, layout.size)
            tables: dict[Scope, tuple[tuple[int | str, ...], dict[str, Any]]] = {}
            for part in layout.parts:
                _, columns = tables.setdefault(part.scope, (part.keys, {}))
                values = layout.values(part, matrix)
                columns.update((name, values[:, at, :]) for at, name in enumerate(part.metrics))
            for scope, (keys, columns) in tables.items():
                (links if scope is Scope.LINK else samples).add_all(chosen, keys, columns)
        return (
            samples.table(SAMPLES_SCHEMA, first, frames.time_s, frames.node, frames.names),
            links.table(LINKS_SCHEMA, first, frames.time_s, frames.node, frames.names),
        )

    @staticmethod
    def _read_tails(
        frames: Gathered, sizes: Any, of: Integers, read: list[_Read], said: dict[str, Any], events: list[str | None]
    ) -> None:
        """Put the contents of rows' tails into the columns."""
        with_tail = np.flatnonzero(sizes).tolist()
        if not with_tail:
            return
        ranks = said["ranks"].to_pylist()
        for place in with_tail:
            template = read[int(of[place])].resolved.template
            row = frames.bytes_of(place)
            tail = decode_tail(template, row[len(row) - int(sizes[place]) :])
            if tail.events:
                events[place] = _json(tail.events)
            if tail.silent_s:
                ranks[place] = _json(ranks_of(template, tail))
        said["ranks"] = pa.array(ranks, pa.string())

    def _template(self, id_: bytes) -> _Read | None:
        if id_ and id_ not in self._templates:
            row = self._connection.execute("SELECT raw FROM outlines WHERE id = ?", (id_,)).fetchone()
            if len(self._templates) >= TEMPLATES_MAX:
                self._templates.clear()
            try:
                self._templates[id_] = None if row is None else _Read(row[0])
            except (BadFrame, Odd):
                self._templates[id_] = None
        return self._templates[id_] if id_ else None

    @staticmethod
    def _whole(kept: JournaledFrame, read: _Read | None) -> JournaledFrame:
        """Return a row as the equivalent whole frame; one that cannot be decoded stays as it is."""
        if read is None:
            return kept
        try:
            return kept._replace(raw=encode_frame(whole_frame(read.resolved.template, bytes(kept.raw))))
        except BadFrame:
            return kept


def _templates_of(heads: Any, sizes: Integers) -> tuple[list[bytes], Integers]:
    """Return the template ids that the frames' heads name, and each frame's index among them; b"" if it is no row."""
    ids = heads["id"].copy()
    ids[(heads["version"][:, 0] != VERSION) | (sizes < ROW_HEAD.size)] = b""
    halves = ids.view("<u8").reshape(-1, 2)
    begins = np.flatnonzero(np.append(True, (halves[1:] != halves[:-1]).any(axis=1)))
    places: dict[bytes, int] = {}
    of = [places.setdefault(ids[begin].tobytes(), len(places)) for begin in begins.tolist()]
    nothing = bytes(ID_BYTES)
    return (
        [b"" if id_ == nothing else id_ for id_ in places],
        np.repeat(np.array(of, dtype=np.int64), np.diff(begins, append=len(ids))),
    )


def _has_twins(layout: ColumnLayout) -> bool:
    """Return whether two rows of a frame have the same key."""
    keys = {part.scope: part.keys for part in layout.parts}
    of_links = keys.pop(Scope.LINK, ())
    of_samples = [key for own in keys.values() for key in own]
    return len(set(of_links)) < len(of_links) or len(set(of_samples)) < len(of_samples)


def _json(value: Any) -> str:
    return as_json(msgspec.to_builtins(value))
