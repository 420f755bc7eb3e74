"""Rows of many streams into chunks, as columns: no object a row, as nearly all of a large fleet's frames come so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from eagle_eye.server.history.history import AppendedRows, RowsOfMany
from eagle_eye.server.history.journal_chunks import DIRECTORY
from eagle_eye.server.history.journal_streams import Stream


class _Change(NamedTuple):
    """What one group of rows changed: streams whose next sequence came, others, and what they were before."""

    streams: list[Stream]
    heard_s: list[float]
    others: list[tuple[Stream, tuple[tuple[int, int], ...], float]]


class Extended:
    """Streams to which rows' sequences were added in a transaction, and what they were before it."""

    def __init__(self) -> None:
        self._changes: list[_Change] = []

    def add(self, rows: RowsOfMany, streams: Sequence[Stream]) -> AppendedRows:
        """Have the rows' sequences in their streams, one in each."""
        sequences, received_s = rows.sequence.tolist(), rows.received_s.tolist()
        change = _Change([], [], [])
        new = [True] * len(sequences)
        for at, (stream, sequence) in enumerate(zip(streams, sequences, strict=True)):
            of_stream = stream.sequences
            if sequence == of_stream.highest + 1:
                change.streams.append(stream)
                change.heard_s.append(stream.heard_s)
                of_stream.highest = sequence
            else:
                change.others.append((stream, of_stream.snapshot(), stream.heard_s))
                new[at] = of_stream.add(sequence)
            if new[at] and received_s[at] > stream.heard_s:
                stream.heard_s = received_s[at]
        self._changes.append(change)
        return AppendedRows(new, [stream.sequences.highest for stream in streams] if change.others else sequences)

    def undo(self) -> None:
        """Take all streams back: a watermark that was rolled back must not be answered."""
        for change in reversed(self._changes):
            for stream, before_s in zip(change.streams, change.heard_s, strict=True):
                stream.sequences.highest -= 1
                stream.heard_s = before_s
            for stream, sequences, before_s in change.others:
                stream.sequences.restore(sequences)
                stream.heard_s = before_s


def chunks_of(
    rows: RowsOfMany, streams: Sequence[Stream], new: Sequence[bool], bytes_max: int
) -> Iterator[tuple[object, ...]]:
    """Yield the journal's rows of what is new, in the order of its INSERT."""
    shards = np.fromiter([stream.shard for stream in streams], np.int64, len(streams))
    order = np.argsort(shards, kind="stable")
    if False in new:
        order = order[np.array(new)[order]]
    if not len(order):
        return
    width = rows.raw.shape[1]
    lines = np.empty(len(order), DIRECTORY)
    lines["stream_id"] = np.fromiter([stream.id for stream in streams], np.int32, len(streams))[order]
    lines["sequence"] = rows.sequence[order]
    lines["offset_s"] = rows.offset_s[order]
    lines["time_s"] = rows.time_s[order] + lines["offset_s"]
    lines["received_s"] = rows.received_s[order]
    lines["size"] = width
    raw = rows.raw[order]
    sorted_shards = shards[order]
    begins = [0, *(np.flatnonzero(np.diff(sorted_shards)) + 1).tolist(), len(order)]
    most = max(bytes_max // width, 1)
    for begin, end in pairwise(begins):
        for first in range(begin, end, most):
            part = slice(first, min(first + most, end))
            times_s = lines["time_s"][part]
            yield (
                int(sorted_shards[first]),
                len(times_s),
                len(times_s) * width,
                float(lines["received_s"][part].max()),
                float(times_s.min()),
                float(times_s.max()),
                lines[part].tobytes(),
                raw[part].tobytes(),
            )
