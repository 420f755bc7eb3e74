"""Reads a stretch of the journal into arrays: frames sorted by node and time, and where each one's bytes are."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from eagle_eye.schema.rows import ROW_HEAD
from eagle_eye.server.history.history import LATE_S
from eagle_eye.server.history.journal_chunks import DIRECTORY
from eagle_eye.server.history.segments.columns import JournaledFrame
from eagle_eye.server.history.segments.row_tables import Floats, Integers

GROUP_FRAMES = 2_048  # frames per row group: the least that a query of one node reads
SAMPLES, SAMPLE_FRAMES = 8, 128

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Gathered(NamedTuple):
    """Frames sorted by node and then time, one per element of the arrays; ``time_s`` is the corrected time.

    ``node`` and ``stream`` are indexes into ``names`` and ``streams``; node indexes sort as the names do. ``raw`` has
    room for one more row head after the last frame.
    """

    raw: Bytes
    names: list[str]
    streams: list[str]
    at: Integers
    size: Integers
    node: Integers
    stream: Integers
    time_s: Floats
    sequence: Integers
    received_s: Floats
    offset_s: Floats

    @property
    def frames(self) -> int:
        """Number of frames."""
        return len(self.at)

    def of(self, chosen: Any) -> Gathered:
        """Return a subset of the frames."""
        return Gathered(*self[:3], *(array[chosen] for array in self[3:]))

    def bytes_of(self, place: int) -> bytes:
        """Return one frame's bytes."""
        at = int(self.at[place])
        return self.raw[at : at + int(self.size[place])].tobytes()

    def parts(self, skipped: int, size: int) -> Bytes:
        """Return ``size`` bytes of each frame after skipping ``skipped``: (frames, size)."""
        if size == 0:
            return np.empty((len(self.at), 0), dtype=np.uint8)
        # A view with an item beginning at each byte of the buffer: indexing it copies all parts in one operation.
        items = np.ndarray((len(self.raw) - size + 1,), f"V{size}", self.raw, strides=(1,))
        return items[self.at + skipped].view(np.uint8).reshape(len(self.at), size)

    def sample(self) -> Gathered:
        """Return a sample: a few minutes of frames of some nodes."""
        begins = np.linspace(0, max(self.frames - SAMPLE_FRAMES, 0), SAMPLES, dtype=np.int64)
        places = np.unique(begins[:, None] + np.arange(SAMPLE_FRAMES))
        return self.of(places[places < self.frames])

    def kept(self) -> list[JournaledFrame]:
        """Return the frames one by one."""
        return [
            JournaledFrame(
                self.names[int(self.node[place])],
                float(self.time_s[place]),
                self.streams[int(self.stream[place])],
                int(self.sequence[place]),
                float(self.received_s[place]),
                float(self.offset_s[place]),
                self.bytes_of(place),
            )
            for place in range(self.frames)
        ]

    def groups(self) -> Iterator[tuple[int, Gathered]]:
        """Yield frames in row groups of whole nodes; only a node larger than a row group is split."""
        begins = np.flatnonzero(np.r_[True, self.node[1:] != self.node[:-1]])
        first = 0
        while first < self.frames:
            end = min(first + GROUP_FRAMES, self.frames)
            if end < self.frames:
                begin = int(begins[np.searchsorted(begins, end, side="right") - 1])
                end = begin if begin > first else end
            yield first, self.of(slice(first, end))
            first = end


class Gatherer:
    """Reads stretches of the journal, one after the other, into the same memory."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._room = np.empty(0, dtype=np.uint8)

    def gather(self, shard: int, chunks: Sequence[int], size: int) -> tuple[Gathered, Gathered]:
        """Return the chunks' late frames and the others; both are valid until the next call.

        All frames together have ``size`` bytes, or less if retention deleted some meanwhile.

        Late frames come from outages; among the others they would make every segment appear as long as the outage.
        """
        known: list[tuple[int, str, str]] = self._connection.execute(
            "SELECT s.id, n.node, s.stream FROM streams s JOIN nodes n ON n.id = s.node_id"
            " WHERE n.shard = ? ORDER BY s.id",
            (shard,),
        ).fetchall()
        ids = np.array([id_ for id_, _, _ in known], dtype=np.int64)
        names = sorted({node for _, node, _ in known})
        place_of = {node: place for place, node in enumerate(names)}
        nodes = np.array([place_of[node] for _, node, _ in known], dtype=np.int64)
        lines, raw = self._read(chunks, size)
        sizes = lines["size"].astype(np.int64)
        at = np.cumsum(sizes) - sizes
        begin_s = float(lines["received_s"][0]) if len(lines) else 0.0
        stream = np.minimum(np.searchsorted(ids, lines["stream_id"]), max(len(ids) - 1, 0))
        # A stream unheard for so long that it was forgotten no longer has a name.
        named = np.flatnonzero(ids[stream] == lines["stream_id"]) if len(ids) else np.empty(0, dtype=np.int64)
        stream, lines = stream[named], lines[named]
        order = _order(nodes[stream], lines["time_s"], stream, lines["sequence"])
        stream, lines = stream[order], lines[order]
        frames = Gathered(
            raw,
            names,
            [name for _, _, name in known],
            at[named][order],
            sizes[named][order],
            nodes[stream],
            stream,
            lines["time_s"].copy(),
            lines["sequence"].astype(np.int64),
            lines["received_s"].copy(),
            lines["offset_s"].copy(),
        )
        late = frames.time_s < begin_s - LATE_S
        return (frames.of(late), frames.of(~late)) if late.any() else (frames.of(slice(0)), frames)

    def _read(self, chunks: Sequence[int], size: int) -> tuple[Any, Bytes]:
        """Return the chunks' directories as one, and the concatenated bytes of their frames."""
        if size + ROW_HEAD.size > len(self._room):
            self._room = np.empty(size + ROW_HEAD.size, dtype=np.uint8)
        directories: list[bytes] = []
        end = 0
        for chunk in chunks:
            row = self._connection.execute("SELECT directory, raw FROM chunks WHERE id = ?", (chunk,)).fetchone()
            if row is None:
                continue  # deleted by retention meanwhile
            directory, raw = row
            self._room[end : end + len(raw)] = np.frombuffer(raw, np.uint8)
            directories.append(directory)
            end += len(raw)
        return np.frombuffer(b"".join(directories), DIRECTORY), self._room[: end + ROW_HEAD.size]


def _order(node: Integers, time_s: Floats, stream: Integers, sequence: Integers) -> Integers:
    """Return the order of frames by node, time, stream and sequence."""
    if len(node) == 0:
        return np.empty(0, dtype=np.int64)
    # A node's frames mostly arrive in order of time; sorting 16-bit keys is several times faster than wider ones.
    order: Integers = np.argsort(node.astype(np.uint16) if node.max() < 1 << 16 else node, kind="stable")
    times_s, nodes = time_s[order], node[order]
    if ((nodes[1:] == nodes[:-1]) & (times_s[1:] <= times_s[:-1])).any():
        order = np.lexsort((sequence, stream, time_s, node))
    return order
