"""What was acknowledged against what the history has: each frame once, none missing.

Segments are read from outside as they appear, so that retention may take them away again; what is still in the journal
at the end is compacted first. Touches: the server's folder, reading.
"""

from __future__ import annotations

import contextlib
import sqlite3
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from eagle_eye.server.history.embedded_history import HISTORY_FILE, HISTORY_FOLDER
from eagle_eye.server.history.segment_tables import FRAMES_FILE, RAW_FOLDER


class Ranges:
    """A set of whole numbers, kept as the ranges that they make up."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def add(self, first: int, last: int) -> int:
        """Add all numbers of a range; return how many of them were there already."""
        begin, end = bisect_left(self._lasts, first - 1), bisect_right(self._firsts, last + 1)
        known = sum(max(min(last, self._lasts[at]) - max(first, self._firsts[at]) + 1, 0) for at in range(begin, end))
        if begin < end:
            first, last = min(first, self._firsts[begin]), max(last, self._lasts[end - 1])
        self._firsts[begin:end], self._lasts[begin:end] = [first], [last]
        return known

    def missing(self, last: int) -> int:
        """Return how many of the numbers from 1 to ``last`` are not there."""
        there = sum(
            max(min(last, high) - max(1, low) + 1, 0) for low, high in zip(self._firsts, self._lasts, strict=True)
        )
        return last - there


class Stored:
    """Which frames the segments of a data folder have had so far, by stream."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._streams: defaultdict[str, Ranges] = defaultdict(Ranges)
        self._names: set[str] = set()
        self._last_id = 0
        self.frames = 0
        self.twice = 0

    def look(self) -> None:
        """Take in the segments that are new since the last time. Raises sqlite3.Error."""
        file = self._data / HISTORY_FILE
        with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as manifest:
            rows = manifest.execute("SELECT id, name FROM segments ORDER BY id").fetchall()
        for id_, name in rows:
            if name in self._names:
                continue
            try:
                table = pq.read_table(
                    self._data / HISTORY_FOLDER / RAW_FOLDER / name / FRAMES_FILE, columns=["stream", "sequence"]
                )
            except FileNotFoundError:
                continue  # it was merged or retired meanwhile; what it was merged into is read next time
            self._take(table, merged=id_ <= self._last_id)
            self._names.add(name)
        self._names &= {name for _, name in rows}
        self._last_id = max([self._last_id, *(id_ for id_, _ in rows)])

    def missing(self, watermarks: Mapping[str, int]) -> int:
        """Return how many acknowledged frames have been in no segment."""
        return sum(self._streams[stream].missing(last) for stream, last in watermarks.items())

    def _take(self, table: pa.Table, *, merged: bool) -> None:
        """Add a segment's frames. One that was ``merged`` of others has theirs."""
        streams = table["stream"].combine_chunks().dictionary_encode()
        codes, sequences = streams.indices.to_numpy(), table["sequence"].to_numpy()
        order = np.lexsort((sequences, codes))
        names = streams.dictionary.to_pylist()
        for code, first, last, repeats in _runs(codes[order], sequences[order]):
            known = self._streams[names[code]].add(first, last)
            if not merged:
                self.frames += last - first + 1
                self.twice += known
            self.twice += repeats


def _runs(codes: NDArray[np.integer], sequences: NDArray[np.int64]) -> list[tuple[int, int, int, int]]:
    """Return the stretches without a gap of sorted frames: stream, first, last, frames that are in it twice."""
    if len(codes) == 0:
        return []
    new = np.flatnonzero((np.diff(codes) != 0) | (np.diff(sequences) > 1)) + 1
    begins, ends = np.concatenate([[0], new]), np.concatenate([new, [len(codes)]])
    found = []
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        first, last = int(sequences[begin]), int(sequences[end - 1])
        found.append((int(codes[begin]), first, last, (end - begin) - (last - first + 1)))
    return found
