"""The streams that agents have sent, as the journal's writer knows them: their ids, shards, and what is here of them.

A stream's row is written when the stream is new and then only now and then: what has come since the last time is in
the directories of the chunks.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import Any

from eagle_eye.server.history import Batch, StreamInfo
from eagle_eye.server.journal_chunks import lines
from eagle_eye.server.sequences import Sequences

STREAMS_CACHED_MAX = 50_000  # kept in memory: a large fleet's; an outage leaves each node some for each minute
NODES_PER_SHARD = 256  # whose frames share chunks and segments: few enough to be sorted in memory, 5 min at a time

_Name = tuple[str, str]


class Stream:
    """One stream; ``heard_s`` is when something new of it was last received."""

    __slots__ = ("heard_s", "id", "sequences", "shard")

    def __init__(self, id_: int, shard: int, sequences: Sequences, heard_s: float) -> None:
        self.id = id_
        self.shard = shard
        self.sequences = sequences
        self.heard_s = heard_s

    def copy(self) -> Stream:
        """Return the same stream, to be changed on its own."""
        return Stream(self.id, self.shard, self.sequences.copy(), self.heard_s)


class Streams:
    """All streams of a journal; used by the one thread that writes it, but for ``known``."""

    def __init__(self, writer: sqlite3.Connection) -> None:
        self._writer = writer
        self._cache: dict[_Name, Stream] = {}  # least lately heard of first
        self._dirty: dict[_Name, Stream] = {}  # of which more is here than their rows say

    def __len__(self) -> int:
        return len(self._cache)

    def recover(self) -> None:
        """Learn from the directories what came after the rows were last written."""
        found: dict[int, tuple[_Name, Stream]] = {}
        statement = "SELECT directory FROM chunks WHERE id > (SELECT noted_id FROM journal) ORDER BY id"
        for (directory,) in self._writer.execute(statement):
            for line in lines(directory):
                if line.stream_id not in found:
                    found[line.stream_id] = self._by_id(line.stream_id)
                _, stream = found[line.stream_id]
                stream.sequences.add(line.sequence)
                stream.heard_s = max(stream.heard_s, line.received_s)
        self.keep(dict(found.values()))

    def draft(self, batch: Batch, touched: dict[_Name, Stream]) -> Stream:
        """Return the batch's stream to be changed in a transaction; it is in ``touched``, to be kept after that."""
        name = (batch.node, batch.stream)
        stream = touched.get(name)
        if stream is None:
            known = self._cache.get(name) or self._look_up(name)
            stream = touched[name] = known.copy() if known else self._new(name, batch.received_s)
        return stream

    def keep(self, touched: dict[_Name, Stream]) -> bool:
        """Take over what a transaction changed, once it is durable; return whether ``note`` is due for want of room."""
        for name, stream in touched.items():
            self._cache.pop(name, None)
            self._cache[name] = self._dirty[name] = stream
        return len(self._cache) > STREAMS_CACHED_MAX

    def note(self) -> None:
        """Write the rows of what has changed, within a transaction."""
        self._writer.executemany(
            "UPDATE streams SET sequences = ?, heard_s = ? WHERE id = ?",
            [(stream.sequences.encode(), stream.heard_s, stream.id) for stream in self._dirty.values()],
        )
        self._writer.execute(
            "UPDATE journal SET noted_id = coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'chunks'), 0)"
        )

    def noted(self) -> None:
        """Know that what ``note`` wrote is durable."""
        self._dirty = {}
        while len(self._cache) > STREAMS_CACHED_MAX:
            del self._cache[next(iter(self._cache))]

    def forget(self, oldest_s: float) -> None:
        """Delete, within a transaction, what was not heard of since; call it after ``note``."""
        gone = self._writer.execute("DELETE FROM streams WHERE heard_s < ? RETURNING id", (oldest_s,)).fetchall()
        if gone:
            self._writer.execute("DELETE FROM nodes WHERE id NOT IN (SELECT node_id FROM streams)")
            ids = {id_ for (id_,) in gone}
            self._cache = {name: stream for name, stream in self._cache.items() if stream.id not in ids}

    def known(self, rows: Iterable[tuple[Any, ...]]) -> list[StreamInfo]:
        """Return the streams of rows (node, stream, sequences, heard_s), as they are now; from any thread."""
        dirty = self._dirty.copy()
        found = []
        for node, stream, encoded, heard_s in rows:
            newer = dirty.get((node, stream))
            highest = newer.sequences.highest if newer else Sequences.decode(encoded).highest
            found.append(StreamInfo(node, stream, highest, newer.heard_s if newer else heard_s))
        return found

    def _by_id(self, id_: int) -> tuple[_Name, Stream]:
        node, name, shard, sequences, heard_s = self._writer.execute(
            "SELECT n.node, s.stream, n.shard, s.sequences, s.heard_s"
            " FROM streams s JOIN nodes n ON n.id = s.node_id WHERE s.id = ?",
            (id_,),
        ).fetchone()
        return (node, name), Stream(id_, shard, Sequences.decode(sequences), heard_s)

    def _look_up(self, name: _Name) -> Stream | None:
        row = self._writer.execute(
            "SELECT s.id, n.shard, s.sequences, s.heard_s FROM nodes n JOIN streams s ON s.node_id = n.id"
            " WHERE n.node = ? AND s.stream = ?",
            name,
        ).fetchone()
        return Stream(row[0], row[1], Sequences.decode(row[2]), row[3]) if row else None

    def _new(self, name: _Name, heard_s: float) -> Stream:
        node, stream = name
        row = self._writer.execute("SELECT id, shard FROM nodes WHERE node = ?", (node,)).fetchone()
        if row is None:
            (node_id,) = self._writer.execute("SELECT coalesce(max(id), 0) + 1 FROM nodes").fetchone()
            row = (node_id, (node_id - 1) // NODES_PER_SHARD)
            self._writer.execute("INSERT INTO nodes (id, node, shard) VALUES (?, ?, ?)", (row[0], node, row[1]))
        cursor = self._writer.execute(
            "INSERT INTO streams (node_id, stream, sequences, heard_s) VALUES (?, ?, ?, ?)",
            (row[0], stream, Sequences().encode(), heard_s),
        )
        return Stream(cursor.lastrowid or 0, row[1], Sequences(), heard_s)
