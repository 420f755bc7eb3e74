"""Small raw segments into one: every frame as it was, by node and then by time.

No more than the row groups that the next one is made of are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eagle_eye.server.history.segments.downsampling import Integers
from eagle_eye.server.history.segments.facts import FACTS_FILE, Facts, Step, no_step
from eagle_eye.server.history.segments.layout import (
    FRAMES_FILE,
    FRAMES_SCHEMA,
    LINKS_FILE,
    LINKS_SCHEMA,
    SAMPLES_FILE,
    SAMPLES_SCHEMA,
)
from eagle_eye.server.history.segments.reader import Segment, reading
from eagle_eye.server.history.segments.row_tables import Tables
from eagle_eye.server.history.segments.writer import SegmentWriter

GROUP_FRAMES = 2_048  # frames of a row group, as the compactor writes them


class Unlike(Exception):
    """A segment of another version's columns, by name: it stays as it is."""


class _Group(NamedTuple):
    """A row group of a source: its place there, and its first frame's."""

    source: int
    number: int
    first: int


def facts_of(folder: Path) -> Facts:
    """Return what ``segment.json`` says. Raises BrokenSegment."""
    with reading(folder.name):
        return msgspec.json.decode((folder / FACTS_FILE).read_bytes(), type=Facts)


def merge(folder: Path, name: str, sources: Sequence[str], step: Step = no_step) -> Facts:
    """Write the segment ``name`` that holds all frames of the sources. Raises BrokenSegment, Unlike."""
    of = [facts_of(folder / source) for source in sources]
    facts = Facts(
        name=name,
        journal=of[0].journal,
        shard=of[0].shard,
        first_chunk=min(one.first_chunk for one in of),
        last_chunk=max(one.last_chunk for one in of),
        late=any(one.late for one in of),
        first_node=min(one.first_node for one in of),
        last_node=max(one.last_node for one in of),
        first_s=min(one.first_s for one in of),
        last_s=max(one.last_s for one in of),
        received_s=max(one.received_s for one in of),
        frames=sum(one.frames for one in of),
        bytes=0,
        sources=tuple(dict.fromkeys((*sources, *(name for one in of for name in one.sources)))),
    )
    merger = _Merger([folder / source for source in sources])
    writer = SegmentWriter(folder, name, step)
    try:
        written = 0
        for tables in merger.tables():
            writer.write(tables)
            written += len(tables.frames)
        assert written == facts.frames, f"{written} frames of {facts.frames}"  # noqa: S101 - or the sources would go
        return writer.finish(facts)
    except BaseException:
        writer.discard()
        raise


class _Merger:
    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._groups: list[_Group] = []
        self._loaded: dict[int, Tables] = {}
        nodes, times_s, groups, rows = [], [], [], []
        for source, folder in enumerate(folders):
            with reading(folder.name):
                _check_like(folder)
                with pq.ParquetFile(folder / FRAMES_FILE, page_checksum_verification=True) as file:
                    first = 0
                    for number in range(file.metadata.num_row_groups):
                        table = file.read_row_group(number, columns=["node", "time"], use_threads=False)
                        nodes += table["node"].to_pylist()
                        times_s.append(table["time"].to_numpy())
                        groups.append(np.full(len(table), len(self._groups)))
                        rows.append(np.arange(len(table)))
                        self._groups.append(_Group(source, number, first))
                        first += len(table)
        _, self._turns = np.unique(np.array(nodes, dtype=object), return_inverse=True)
        self._group, self._row = np.concatenate(groups), np.concatenate(rows)
        # Stable: of frames of one time the segments' order decides.
        self._order = np.lexsort((np.concatenate(times_s), self._turns))

    def tables(self) -> Iterator[Tables]:
        """Yield the row groups of the whole."""
        bounds = list(self._bounds())
        last_use = {}
        for at, (low, high) in enumerate(bounds):
            last_use.update(dict.fromkeys(np.unique(self._group[self._order[low:high]]).tolist(), at))
        for at, (low, high) in enumerate(bounds):
            yield self._assemble(self._order[low:high], low)
            for group in [one for one in self._loaded if last_use[one] <= at]:
                del self._loaded[group]

    def _bounds(self) -> Iterator[tuple[int, int]]:
        """Yield where row groups begin and end: nodes stay whole, but for one that alone is more than a group."""
        turns = self._turns[self._order]
        ends = np.flatnonzero(np.append(turns[1:] != turns[:-1], True)) + 1
        low, length = 0, len(turns)
        while low < length:
            fitting = ends[(ends > low) & (ends <= low + GROUP_FRAMES)]
            high = int(fitting[-1]) if len(fitting) else min(low + GROUP_FRAMES, length)
            yield low, high
            low = high

    def _assemble(self, frames: Integers, first: int) -> Tables:
        """Return the row group of these frames, in this order; ``first`` is the first one's row of the whole."""
        of = self._group[frames]
        parts: dict[str, list[pa.Table]] = {"frames": [], "samples": [], "links": []}
        at: list[Integers] = []
        for group in np.unique(of).tolist():
            tables = self._load(group)
            mine = np.flatnonzero(of == group)
            parts["frames"].append(tables.frames.take(pa.array(self._row[frames[mine]])))
            at.append(mine)
            place = np.full(len(tables.frames), -1, dtype=np.int64)
            place[self._row[frames[mine]]] = mine
            for name, table in (("samples", tables.samples), ("links", tables.links)):
                if table is not None:
                    own = place[table["frame"].to_numpy() - self._groups[group].first]
                    rows = np.flatnonzero(own >= 0)
                    moved = pa.array(own[rows].astype(np.int32))
                    parts[name].append(table.take(pa.array(rows)).set_column(3, table.schema.field("frame"), moved))
        turns = self._turns[frames]
        whole = pa.concat_tables(parts["frames"]).take(pa.array(np.argsort(np.concatenate(at))))
        return Tables(
            whole, _sorted(parts["samples"], "device", turns, first), _sorted(parts["links"], "link", turns, first)
        )

    def _load(self, group: int) -> Tables:
        if group not in self._loaded:
            source, number, first = self._groups[group]
            folder = self._folders[source]
            with reading(folder.name):
                with pq.ParquetFile(folder / FRAMES_FILE, page_checksum_verification=True) as file:
                    frames = file.read_row_group(number, use_threads=False)
                segment = Segment(folder)
                samples, links = (
                    _within(segment.rows(name, None, first, first + len(frames)), first, len(frames))
                    for name in (SAMPLES_FILE, LINKS_FILE)
                )
            self._loaded[group] = Tables(frames, samples, links)
        return self._loaded[group]


def _check_like(folder: Path) -> None:
    """Return if the tables have the columns that this version writes. Raises Unlike."""
    for name, schema in ((FRAMES_FILE, FRAMES_SCHEMA), (SAMPLES_FILE, SAMPLES_SCHEMA), (LINKS_FILE, LINKS_SCHEMA)):
        path = folder / name
        if (name == FRAMES_FILE or path.exists()) and not pq.read_schema(path).equals(schema):
            raise Unlike(folder.name)


def _within(table: pa.Table | None, first: int, length: int) -> pa.Table | None:
    """Return the rows of the frames from ``first`` on; a row group of rows may hold some of others."""
    if table is None:
        return None
    frames = table["frame"].to_numpy()
    inside = (frames >= first) & (frames < first + length)
    return table if inside.all() else table.take(pa.array(np.flatnonzero(inside)))


def _sorted(parts: list[pa.Table], key: str, turns: Integers, first: int) -> pa.Table | None:
    """Return the rows by node, key and time; their ``frame`` is a place among the group's frames until here."""
    if not any(len(part) for part in parts):
        return None
    table = pa.concat_tables(parts)
    frames = table["frame"].to_numpy()
    keys: Any = table[key].to_numpy()
    if key == "link":
        _, keys = np.unique(keys.astype(object), return_inverse=True)
    order = np.lexsort((frames, keys, turns[frames]))
    moved = pa.array((frames[order] + first).astype(np.int32))
    return table.take(pa.array(order)).set_column(3, table.schema.field("frame"), moved)
