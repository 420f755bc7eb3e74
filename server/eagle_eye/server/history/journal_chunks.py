"""Chunks: the frames of one group commit and one shard as one row of the journal, with a directory of what is in it.

A row a frame would cost a page and an index entry each; a fleet sends more than ten thousand a second.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from eagle_eye.server.history.history import Batch, Entry

# One line of a directory: stream id, sequence, corrected time, time of receipt, clock offset, size of the frame.
_LINE = struct.Struct("<iqdddI")
# The same for numpy, which reads a directory at once.
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


INSERT_ROWS_MAX = 1_000  # chunks in one statement: SQLite takes 32,766 values
_INSERT = "INSERT INTO chunks (shard, frames, size, received_s, first_s, last_s, directory, raw) VALUES "
_ROW = "(?, ?, ?, ?, ?, ?, ?, ?)"


class Line(NamedTuple):
    """One frame's line in a directory; ``time_s`` is the corrected time, ``at`` where its ``size`` bytes begin."""

    stream_id: int
    sequence: int
    time_s: float
    received_s: float
    offset_s: float
    size: int
    at: int


class Draft:
    """A chunk while frames are added to it."""

    __slots__ = ("_lines", "_raws", "first_s", "frames", "last_s", "received_s", "size")

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._raws: list[bytes] = []
        self.frames = self.size = 0
        self.first_s, self.last_s, self.received_s = float("inf"), float("-inf"), float("-inf")

    def add(self, stream_id: int, batch: Batch, entry: Entry) -> None:
        """Add one frame of the batch."""
        offset_s = batch.offset_s + entry.moved_s
        time_s = entry.time_s + offset_s
        self._lines.append(_LINE.pack(stream_id, entry.sequence, time_s, batch.received_s, offset_s, len(entry.raw)))
        self._raws.append(entry.raw)
        self.frames += 1
        self.size += len(entry.raw)
        # Comparisons and no min() and max(): this is done ten thousand times a second.
        if time_s < self.first_s:
            self.first_s = time_s
        if time_s > self.last_s:
            self.last_s = time_s
        if batch.received_s > self.received_s:
            self.received_s = batch.received_s

    def row(self, shard: int) -> tuple[object, ...]:
        """Return the columns of the journal's row, in the order of its INSERT."""
        return (
            shard,
            self.frames,
            self.size,
            self.received_s,
            self.first_s,
            self.last_s,
            b"".join(self._lines),
            b"".join(self._raws),
        )


def insert(writer: sqlite3.Connection, rows: Sequence[tuple[object, ...]]) -> int | None:
    """Write chunks, within a transaction; return the last one's id, None where there is none."""
    # In one statement: the lock of the interpreter is let go and waited for with each.
    last_id: int | None = None
    for first in range(0, len(rows), INSERT_ROWS_MAX):
        part = rows[first : first + INSERT_ROWS_MAX]
        statement = _INSERT + ", ".join([_ROW] * len(part))
        last_id = writer.execute(statement, list(chain.from_iterable(part))).lastrowid
    return last_id


class Found(NamedTuple):
    """Lines of several chunks' directories; ``at`` is where in its chunk each frame's bytes begin."""

    chunk_ids: np.ndarray[Any, np.dtype[np.int64]]
    directory: np.ndarray[Any, Any]
    at: np.ndarray[Any, np.dtype[np.int64]]

    def lines(self) -> Iterator[tuple[int, Line]]:
        """Yield the chunk's id and the line of each frame."""
        for id_, line, at in zip(self.chunk_ids.tolist(), self.directory.tolist(), self.at.tolist(), strict=True):
            yield id_, Line._make((*line, at))


def found_in(
    directories: Sequence[tuple[int, bytes]], stream_ids: Sequence[int], start_s: float, end_s: float
) -> Found:
    """Return the lines of these streams whose corrected time is in the range; ``directories`` come with chunks' ids.

    A fleet's chunks have hundreds of thousands of lines, of which a picture wants a few.
    """
    directory = np.frombuffer(b"".join(raw for _, raw in directories), DIRECTORY)
    counts = np.array([len(raw) // DIRECTORY.itemsize for _, raw in directories], np.int64)
    chunk_ids = np.repeat(np.array([id_ for id_, _ in directories], np.int64), counts)
    begins = np.concatenate([[0], np.cumsum(directory["size"], dtype=np.int64)])
    at = begins[:-1] - np.repeat(begins[np.cumsum(counts) - counts], counts)
    wanted = np.isin(directory["stream_id"], np.array(stream_ids, np.int32))
    wanted &= (directory["time_s"] >= start_s) & (directory["time_s"] <= end_s)
    return Found(chunk_ids[wanted], directory[wanted], at[wanted])


def lines(directory: bytes) -> Iterator[Line]:
    """Yield a directory's lines in the order in which the frames came."""
    at = 0
    for stream_id, sequence, time_s, received_s, offset_s, size in _LINE.iter_unpack(directory):
        yield Line(stream_id, sequence, time_s, received_s, offset_s, size, at)
        at += size
