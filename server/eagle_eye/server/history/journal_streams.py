"""The journal writer's view of the agents' streams: their ids, shards, and which sequences are stored.

A stream's row is written when the stream is new and only occasionally after that; what arrived since the last update is
in the directories of the chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from eagle_eye.server.history.history import Appended, StreamInfo
from eagle_eye.server.history.journal_chunks import lines
from eagle_eye.server.history.sequences import Sequences
from eagle_eye.server.model.batch import StreamRef, Times
from eagle_eye.server.store import database

STREAMS_CACHED_MAX = 50_000  # enough for a large fleet; an outage leaves each node some for each minute
NOTED_AT_ONCE = 1_000  # rows written per transaction, so that new frames do not wait for long
NODES_PER_SHARD = 256  # nodes that share chunks and segments: few enough to sort in memory, 5 min at a time

_Name = tuple[str, str]
_Ranges = tuple[tuple[int, int], ...]  # of a stream's sequences


class JournalStream:
    """One stream; ``heard_s`` is when something new of it was last received.

    ``noted``: its row is up to date. ``forgotten``: this object is no longer used, another one will replace it.
    """

    __slots__ = ("forgotten", "heard_s", "id", "noted", "sequences", "shard")

    def __init__(self, id_: int, shard: int, sequences: Sequences, heard_s: float) -> None:
        self.id = id_
        self.shard = shard
        self.sequences = sequences
        self.heard_s = heard_s
        self.noted = True
        self.forgotten = False


class Touched(dict[_Name, JournalStream]):
    """The streams that a transaction had to look up or create, and its changes to these and to cached ones.

    ``fresh`` are those that were not cached before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fresh: list[JournalStream] = []
        # Per batch: its rows' streams, earlier sequences where a row was not the next one, and earlier ``heard_s``.
        self._before: list[tuple[Sequence[JournalStream], list[_Ranges | None], list[float]]] = []

    def add(self, streams: Sequence[JournalStream], sequences: list[int], received_s: Sequence[float]) -> Appended:
        """Add each sequence to its stream."""
        new = [True] * len(sequences)
        before: list[_Ranges | None] = [None] * len(sequences)
        heard_s = [stream.heard_s for stream in streams]
        usual = True
        for at, (stream, sequence, at_s) in enumerate(zip(streams, sequences, received_s, strict=True)):
            of_stream = stream.sequences
            if sequence == of_stream.highest + 1:
                of_stream.highest = sequence
            else:
                before[at] = of_stream.snapshot()
                new[at] = of_stream.add(sequence)
                usual = False
            if new[at] and at_s > stream.heard_s:
                stream.heard_s = at_s
        self._before.append((streams, before, heard_s))
        return Appended(new, sequences if usual else [stream.sequences.highest for stream in streams])

    def undo(self) -> None:
        """Restore all streams: a watermark that was rolled back must not be acknowledged."""
        for streams, before, heard_s in reversed(self._before):
            for stream, sequences, at_s in zip(reversed(streams), reversed(before), reversed(heard_s), strict=True):
                if sequences is None:
                    stream.sequences.highest -= 1
                else:
                    stream.sequences.restore(sequences)
                stream.heard_s = at_s
        for stream in self.fresh:
            stream.forgotten = True


class Streams:
    """All streams of a journal; used by the writer thread only, except ``known``.

    Chunks up to ``noted_id`` may be deleted: their sequences are in the streams' rows.
    """

    def __init__(self, writer: database.DurableConnection) -> None:
        self.noted_id = 0
        self._writer = writer
        self._cache: dict[_Name, JournalStream] = {}
        self._dirty: dict[_Name, JournalStream] = {}  # streams with more sequences than their rows say

    def __len__(self) -> int:
        return len(self._cache)

    def recover(self) -> None:
        """Recover from the directories what arrived after the rows were last written."""
        found: dict[int, tuple[_Name, JournalStream]] = {}
        (self.noted_id,) = self._writer.execute("SELECT noted_id FROM journal").fetchone()
        statement = "SELECT directory FROM chunks WHERE id > ? ORDER BY id"
        for (directory,) in self._writer.execute(statement, (self.noted_id,)):
            for line in lines(directory):
                if line.stream_id not in found:
                    found[line.stream_id] = self._by_id(line.stream_id)
                _, stream = found[line.stream_id]
                stream.sequences.add(line.sequence)
                stream.heard_s = max(stream.heard_s, line.received_s)
        self.keep(dict(found.values()))

    def keep(self, touched: dict[_Name, JournalStream]) -> bool:
        """Keep a transaction's changes once it is durable; return whether ``noting`` is due to free memory."""
        for name, stream in touched.items():
            self._cache[name] = self._dirty[name] = stream
            stream.noted = False
        return len(self._cache) > STREAMS_CACHED_MAX

    def referred(self, refs: Sequence[StreamRef], received_s: Times, touched: Touched) -> list[JournalStream]:
        """Return the streams of a batch's rows, to be changed in a transaction; add uncached ones to ``touched``."""
        streams = [ref.held for ref in refs]
        if any(stream is None or stream.forgotten for stream in streams):
            self._prepare(refs, received_s.tolist(), touched)
            for ref in refs:
                ref.held = touched[ref.name]
            streams = [ref.held for ref in refs]
        return streams

    def _prepare(self, refs: Sequence[StreamRef], received_s: Sequence[float], touched: Touched) -> None:
        missing: dict[_Name, float] = {}
        for ref, at_s in zip(refs, received_s, strict=True):
            if ref.name not in touched:
                known = self._cache.get(ref.name)
                if known is not None:
                    touched[ref.name] = known
                else:
                    missing.setdefault(ref.name, at_s)
        if missing:
            found = self._look_up(list(missing))
            new = {name: heard_s for name, heard_s in missing.items() if name not in found}
            if new:
                found |= self._make(new)
            touched.update(found)
            touched.fresh += found.values()

    def keep_referred(self, refs: Sequence[StreamRef], streams: Sequence[JournalStream]) -> None:
        """Keep a transaction's changes to cached streams."""
        for ref, stream in zip(refs, streams, strict=True):
            if stream.noted:
                stream.noted = False
                self._dirty[ref.name] = stream

    def noting(self) -> Iterator[None]:
        """Write the rows of changed streams, one short transaction before each yield.

        After the last one, chunks that existed at the start may be deleted, and surplus streams unheard for longest
        leave the cache.
        """
        newest = "SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'chunks'), 0)"
        (newest_id,) = self._writer.execute(newest).fetchone()
        names = list(self._dirty)
        for first in range(0, len(names), NOTED_AT_ONCE):
            part = {name: self._dirty[name] for name in names[first : first + NOTED_AT_ONCE] if name in self._dirty}
            with database.transaction(self._writer):
                self._note(part.values())
            for name, stream in part.items():
                stream.noted = True
                del self._dirty[name]
            yield
        with database.transaction(self._writer):
            self._writer.execute("UPDATE journal SET noted_id = ?", (newest_id,))
        self.noted_id = newest_id
        surplus = len(self._cache) - STREAMS_CACHED_MAX
        if surplus > 0:
            clean = [(name, stream) for name, stream in self._cache.items() if stream.noted]
            for name, stream in sorted(clean, key=lambda item: item[1].heard_s)[:surplus]:
                stream.forgotten = True
                del self._cache[name]
        yield

    def _note(self, streams: Iterable[JournalStream]) -> None:
        rows = [(stream.id, stream.sequences.encode().decode(), stream.heard_s) for stream in streams]
        self._writer.execute(
            "UPDATE streams SET sequences = CAST(json_extract(t.value, '$[1]') AS BLOB),"
            " heard_s = json_extract(t.value, '$[2]')"
            " FROM json_each(?) t WHERE streams.id = json_extract(t.value, '$[0]')",
            (_json(rows),),
        )

    def forget(self, oldest_s: float) -> None:
        """Delete, within a transaction, streams not heard of since ``oldest_s``; call it after ``noting``.

        Their nodes stay as long as minutes or hours refer to them.
        """
        heard_since = {stream.id for stream in self._dirty.values()}  # their rows do not say it yet
        rows = self._writer.execute("SELECT id FROM streams WHERE heard_s < ?", (oldest_s,)).fetchall()
        gone = {id_ for (id_,) in rows} - heard_since
        if gone:
            self._writer.execute(
                "DELETE FROM streams WHERE id IN (SELECT value FROM json_each(?))", (_json(list(gone)),)
            )
            for name in [name for name, stream in self._cache.items() if stream.id in gone]:
                self._cache.pop(name).forgotten = True

    def known(self, rows: Iterable[tuple[Any, ...]]) -> list[StreamInfo]:
        """Return the current state of streams given as rows (node, stream, sequences, heard_s); from any thread."""
        dirty = self._dirty.copy()
        found = []
        for node, stream, encoded, heard_s in rows:
            newer = dirty.get((node, stream))
            highest = newer.sequences.highest if newer else Sequences.decode(encoded).highest
            found.append(StreamInfo(node, stream, highest, newer.heard_s if newer else heard_s))
        return found

    def _by_id(self, id_: int) -> tuple[_Name, JournalStream]:
        node, name, shard, sequences, heard_s = self._writer.execute(
            "SELECT n.node, s.stream, n.shard, s.sequences, s.heard_s"
            " FROM streams s JOIN nodes n ON n.id = s.node_id WHERE s.id = ?",
            (id_,),
        ).fetchone()
        return (node, name), JournalStream(id_, shard, Sequences.decode(sequences), heard_s)

    def _look_up(self, names: Sequence[_Name]) -> dict[_Name, JournalStream]:
        """Return those of the streams that have rows."""
        rows = self._rows(
            "n.node, s.stream, s.id, n.shard, CAST(s.sequences AS TEXT), s.heard_s",
            "json_each(?) t JOIN nodes n ON n.node = json_extract(t.value, '$[0]')"
            " JOIN streams s ON s.node_id = n.id AND s.stream = json_extract(t.value, '$[1]')",
            names,
        )
        return {
            (node, stream): JournalStream(id_, shard, Sequences.decode(sequences.encode()), heard_s)
            for node, stream, id_, shard, sequences, heard_s in rows
        }

    def _make(self, new: dict[_Name, float]) -> dict[_Name, JournalStream]:
        """Create streams that have no rows yet: insert their rows, and their nodes' where new."""
        names = list(dict.fromkeys(node for node, _ in new))
        nodes = {
            node: (id_, shard)
            for node, id_, shard in self._rows(
                "n.node, n.id, n.shard", "json_each(?) t JOIN nodes n ON n.node = t.value", names
            )
        }
        (last_node,), (last_stream,) = (
            self._writer.execute(f"SELECT coalesce(max(id), 0) FROM {table}").fetchone()  # noqa: S608 - constants
            for table in ("nodes", "streams")
        )
        new_nodes = [node for node in names if node not in nodes]
        nodes |= {node: (id_, (id_ - 1) // NODES_PER_SHARD) for id_, node in enumerate(new_nodes, last_node + 1)}
        self._writer.execute(
            "INSERT INTO nodes (id, node, shard) SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'),"
            " json_extract(value, '$[2]') FROM json_each(?)",
            (_json([(nodes[node][0], node, nodes[node][1]) for node in new_nodes]),),
        )
        made = {
            (node, stream): JournalStream(id_, nodes[node][1], Sequences(), heard_s)
            for id_, ((node, stream), heard_s) in enumerate(new.items(), last_stream + 1)
        }
        self._writer.execute(
            "INSERT INTO streams (id, node_id, stream, sequences, heard_s) SELECT json_extract(value, '$[0]'),"
            " json_extract(value, '$[1]'), json_extract(value, '$[2]'), CAST('[]' AS BLOB),"
            " json_extract(value, '$[3]') FROM json_each(?)",
            (_json([(one.id, nodes[node][0], stream, one.heard_s) for (node, stream), one in made.items()]),),
        )
        return made

    def _rows(self, columns: str, source: str, asked: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return a statement's rows as one JSON value: each separate row would wait for the GIL."""
        statement = f"SELECT json_group_array(json_array({columns})) FROM {source}"  # noqa: S608 - the callers' constants
        (found,) = self._writer.execute(statement, (_json(asked),)).fetchone()
        rows: list[tuple[Any, ...]] = msgspec.json.decode(found)
        return rows


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
