"""Chunks: the frames of one group commit and one shard as one row of the journal, with a directory of its contents.

One row per frame would cost a page and an index entry each; a fleet sends more than ten thousand frames a second.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from eagle_eye.server.model.batch import Batch

# One directory entry: stream id, sequence, corrected time, time of receipt, clock offset, size of the frame.
_LINE = struct.Struct("<iqdddI")
# The same as a numpy dtype, to read a whole directory at once.
DIRECTORY = np.dtype(
    [
        ("stream_id", "<i4"),
        ("sequence", "<i8"),
        ("time_s", "<f8"),
        ("received_s", "<f8"),
        ("offset_s", "<f8"),
        ("size", "<u4"),
    ]
)


INSERT_ROWS_MAX = 1_000  # chunks per statement: SQLite allows 32,766 values
_INSERT = "INSERT INTO chunks (shard, frames, size, received_s, first_s, last_s, directory, raw) VALUES "
_ROW = "(?, ?, ?, ?, ?, ?, ?, ?)"


class Line(NamedTuple):
    """A frame's directory entry; ``time_s`` is the corrected time, ``at`` the offset of its ``size`` bytes."""

    stream_id: int
    sequence: int
    time_s: float
    received_s: float
    offset_s: float
    size: int
    at: int


def chunks_of(
    batch: Batch, stream_ids: Sequence[int], shards: Sequence[int], new: Sequence[bool], bytes_max: int
) -> Iterator[tuple[object, ...]]:
    """Yield a batch's new frames as chunks, with values in the order of the INSERT statement."""
    of_shard = np.fromiter(shards, np.int64, len(shards))
    order = np.argsort(of_shard, kind="stable")
    if False in new:
        order = order[np.array(new)[order]]
    if not len(order):
        return
    raw = batch.raw
    lines = np.empty(len(order), DIRECTORY)
    lines["stream_id"] = np.fromiter(stream_ids, np.int32, len(stream_ids))[order]
    lines["sequence"] = batch.sequence[order]
    lines["offset_s"] = batch.offset_s[order]
    lines["time_s"] = batch.time_s[order] + lines["offset_s"]
    lines["received_s"] = batch.received_s[order]
    if isinstance(raw, np.ndarray):
        lines["size"] = raw.shape[1]
        sorted_raw: Any = raw[order]
    else:
        sorted_raw = [raw[at] for at in order.tolist()]
        lines["size"] = [len(one) for one in sorted_raw]
    ends = np.cumsum(lines["size"], dtype=np.int64)
    sorted_shards = of_shard[order]
    begins = [0, *(np.flatnonzero(np.diff(sorted_shards)) + 1).tolist(), len(order)]
    for begin, end in pairwise(begins):
        first = begin
        while first < end:
            before = int(ends[first - 1]) if first else 0
            last = min(max(int(np.searchsorted(ends, before + bytes_max, "right")), first + 1), end)
            part = slice(first, last)
            times_s, inside = lines["time_s"][part], sorted_raw[part]
            yield (
                int(sorted_shards[first]),
                last - first,
                int(ends[last - 1]) - before,
                float(lines["received_s"][part].max()),
                float(times_s.min()),
                float(times_s.max()),
                lines[part].tobytes(),
                inside.tobytes() if isinstance(inside, np.ndarray) else b"".join(inside),
            )
            first = last


def insert(writer: sqlite3.Connection, rows: Sequence[tuple[object, ...]]) -> int | None:
    """Write chunks within a transaction; return the last one's id, None if there are none."""
    # As one statement: each statement releases the GIL and waits to get it back.
    last_id: int | None = None
    for first in range(0, len(rows), INSERT_ROWS_MAX):
        part = rows[first : first + INSERT_ROWS_MAX]
        statement = _INSERT + ", ".join([_ROW] * len(part))
        last_id = writer.execute(statement, list(chain.from_iterable(part))).lastrowid
    return last_id


class FoundEntries(NamedTuple):
    """Entries of several chunks' directories; ``at`` is the offset of each frame's bytes in its chunk."""

    chunk_ids: np.ndarray[Any, np.dtype[np.int64]]
    directory: np.ndarray[Any, Any]
    at: np.ndarray[Any, np.dtype[np.int64]]

    def lines(self) -> Iterator[tuple[int, Line]]:
        """Yield the chunk's id and the directory entry of each frame."""
        for id_, line, at in zip(self.chunk_ids.tolist(), self.directory.tolist(), self.at.tolist(), strict=True):
            yield id_, Line._make((*line, at))


NO_ENTRIES = FoundEntries(np.empty(0, np.int64), np.empty(0, DIRECTORY), np.empty(0, np.int64))


def found_in(
    directories: Sequence[tuple[int, bytes]], stream_ids: Sequence[int] | None, start_s: float, end_s: float
) -> FoundEntries:
    """Return the entries of these streams (None: of all) whose corrected time is in the range.

    ``directories`` are (chunk id, bytes).

    A fleet's chunks have hundreds of thousands of entries, of which a chart needs a few.
    """
    directory = np.frombuffer(b"".join(raw for _, raw in directories), DIRECTORY)
    counts = np.array([len(raw) // DIRECTORY.itemsize for _, raw in directories], np.int64)
    chunk_ids = np.repeat(np.array([id_ for id_, _ in directories], np.int64), counts)
    begins = np.concatenate([[0], np.cumsum(directory["size"], dtype=np.int64)])
    at = begins[:-1] - np.repeat(begins[np.cumsum(counts) - counts], counts)
    wanted = (directory["time_s"] >= start_s) & (directory["time_s"] <= end_s)
    if stream_ids is not None:
        wanted &= np.isin(directory["stream_id"], np.array(stream_ids, np.int32))
    return FoundEntries(chunk_ids[wanted], directory[wanted], at[wanted])


def lines(directory: bytes) -> Iterator[Line]:
    """Yield a directory's entries in the order in which the frames arrived."""
    at = 0
    for stream_id, sequence, time_s, received_s, offset_s, size in _LINE.iter_unpack(directory):
        yield Line(stream_id, sequence, time_s, received_s, offset_s, size, at)
        at += size
