"""What a stretch of the journal holds, as arrays: frames by node and time, and where the bytes of each are."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from eagle_eye.server.history import LATE_S
from eagle_eye.server.journal_chunks import DIRECTORY
from eagle_eye.server.segments.columns import Kept
from eagle_eye.server.segments.row_tables import Floats, Integers

GROUP_FRAMES = 2_048  # frames of a row group: what a query of one node reads at least


class Gathered(NamedTuple):
    """Frames by node and then by time, one in each place of the arrays; ``time_s`` is the corrected time."""

    raw: bytes
    at: Integers
    size: Integers
    node: Any
    stream: Any
    time_s: Floats
    sequence: Integers
    received_s: Floats
    offset_s: Floats

    @property
    def frames(self) -> int:
        """How many frames there are."""
        return len(self.at)

    def of(self, chosen: Any) -> Gathered:
        """Return some of the frames."""
        return Gathered(self.raw, *(array[chosen] for array in self[1:]))

    def bytes_of(self, place: int) -> bytes:
        """Return one frame's bytes."""
        at = int(self.at[place])
        return self.raw[at : at + int(self.size[place])]

    def kept(self) -> list[Kept]:
        """Return the frames one by one."""
        return [
            Kept(
                self.node[place],
                float(self.time_s[place]),
                self.stream[place],
                int(self.sequence[place]),
                float(self.received_s[place]),
                float(self.offset_s[place]),
                self.bytes_of(place),
            )
            for place in range(self.frames)
        ]

    def groups(self) -> Iterator[tuple[int, Gathered]]:
        """Yield the frames of whole nodes together, as many as a row group takes; only a node alone is divided."""
        begins = np.flatnonzero(np.r_[True, self.node[1:] != self.node[:-1]])
        first = 0
        while first < self.frames:
            end = min(first + GROUP_FRAMES, self.frames)
            if end < self.frames:
                begin = int(begins[np.searchsorted(begins, end, side="right") - 1])
                end = begin if begin > first else end
            yield first, self.of(slice(first, end))
            first = end


def gather(connection: sqlite3.Connection, shard: int, chunks: Sequence[int]) -> tuple[Gathered, Gathered]:
    """Return the chunks' frames, the late ones and the others.

    Late ones are an outage's; among the others they would make every segment look as long as the outage.
    """
    known = connection.execute(
        "SELECT s.id, n.node, s.stream FROM streams s JOIN nodes n ON n.id = s.node_id WHERE n.shard = ? ORDER BY s.id",
        (shard,),
    ).fetchall()
    ids = np.array([id_ for id_, _, _ in known], dtype=np.int64)
    nodes = np.array([node for _, node, _ in known], dtype=object)
    streams = np.array([stream for _, _, stream in known], dtype=object)
    directories, raws = [], []
    for chunk in chunks:
        row = connection.execute("SELECT directory, raw FROM chunks WHERE id = ?", (chunk,)).fetchone()
        if row is not None:  # else retention was faster
            directories.append(row[0])
            raws.append(row[1])
    lines = np.frombuffer(b"".join(directories), DIRECTORY)
    size = lines["size"].astype(np.int64)
    at = np.cumsum(size) - size
    begin_s = float(lines["received_s"][0]) if len(lines) else 0.0
    place = np.minimum(np.searchsorted(ids, lines["stream_id"]), max(len(ids) - 1, 0))
    # A stream that was not heard of for so long that it was forgotten has no name any more.
    named = np.flatnonzero(ids[place] == lines["stream_id"]) if len(ids) else np.empty(0, dtype=np.int64)
    place, lines, at, size = place[named], lines[named], at[named], size[named]
    time_s = lines["time_s"].copy()
    _, turn = np.unique(nodes.astype(str), return_inverse=True)
    order = np.lexsort((lines["sequence"], place, time_s, turn[place]))
    frames = Gathered(
        b"".join(raws),
        at[order],
        size[order],
        nodes[place[order]],
        streams[place[order]],
        time_s[order],
        lines["sequence"][order].astype(np.int64),
        lines["received_s"][order].copy(),
        lines["offset_s"][order].copy(),
    )
    late = frames.time_s < begin_s - LATE_S
    return frames.of(late), frames.of(~late)
