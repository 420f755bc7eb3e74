"""The journal: durable storage of recent frames in SQLite, written by one thread in group commits.

Frames are deleted from it once they are in segments (see embedded_history.py) and a restart would not replay them.
Before the Journal itself: what its writer thread keeps of refusals, templates and streams, and its rounds of retention.
"""

from __future__ import annotations

import logging
import sqlite3
import struct
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from eagle_eye.server.history.history import Appended, StreamInfo
from eagle_eye.server.history.journal_reader import (
    MIGRATIONS,
    JournalReader,
    chunks_of,
    directory_lines,
    insert_chunks,
    live_bytes,
)
from eagle_eye.server.history.settings import HistorySettings
from eagle_eye.server.model.batch import Batch, StreamRef, Times
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import HistoryBusy, HistoryUnavailable, StoreUnavailable
from eagle_eye.server.store import database

REFUSALS_OVER_S = 10.0  # without a failure; otherwise a disk with room for small frames only would fill the log

_log = logging.getLogger(__name__)


class Refusals:
    """For the writer thread; ``reason`` may be read by any thread and is None while frames are accepted."""

    def __init__(self, clock: Clock) -> None:
        self.reason: str | None = None
        self._clock = clock
        self._began_s: float | None = None
        self._failed_s = 0.0
        self._frames = 0

    def failed(self, reason: str, frames: int) -> None:
        """Record that so many frames were refused."""
        self.reason = reason
        self._failed_s = self._clock.monotonic_s()
        self._frames += frames
        if self._began_s is None:
            self._began_s = self._failed_s
            _log.error("frames are refused, and agents keep them: %s", reason)

    def worked(self) -> None:
        """Record that frames were written."""
        self.reason = None

    def log_end(self) -> None:
        """Log that the refusals ended, once they have."""
        if self._began_s is None or self.reason is not None:
            return
        if self._clock.monotonic_s() - self._failed_s < REFUSALS_OVER_S:
            return
        lasted_s = round(self._failed_s - self._began_s, 1)
        _log.warning(
            "frames are taken again: %d were refused within %.1f s, and agents send them again", self._frames, lasted_s
        )
        self._began_s = None
        self._frames = 0


# Templates are written with the first row that needs them, and deleted some time after the last. All but ``listen`` is
# for the writer thread.

TEMPLATES_AT_ONCE = 5_000
KEPT_AT_ONCE = 500  # rows per transaction: each update rewrites the whole template, and new frames wait meanwhile
TEMPLATES_BEHIND_S = 240.0  # how stale ``used_s`` may be before it is written again
TEMPLATES_KEPT_S = 600.0  # beyond the oldest chunk: far more than ``used_s`` can be stale


class JournalTemplates:
    """The writer's view of the table of templates, which an earlier version named ``outlines``."""

    def __init__(self, writer: database.DurableConnection) -> None:
        self._writer = writer
        self._used: set[bytes] = set()  # bounded by the number of templates, however long the disk is full
        self._kept_s: dict[bytes, float] = {}  # when ``used_s`` was last written
        self._take_used: Callable[[], list[bytes]] = list
        self._lost: Callable[[Iterable[bytes]], None] = lambda _: None

    def listen(self, used: Callable[[], list[bytes]], lost: Callable[[Iterable[bytes]], None]) -> None:
        """Register callbacks: ``used`` returns ids used since its last call, ``lost`` receives the ids deleted.

        Both are called in the writer thread.
        """
        self._take_used, self._lost = used, lost

    def write(self, templates: Mapping[bytes, tuple[bytes, float]]) -> None:
        """Insert templates (id: bytes, time of use) that the table lacks, within a transaction."""
        for part in _parts(list(templates), TEMPLATES_AT_ONCE):
            rows = [value for id_ in part for value in (id_, *templates[id_])]
            places = ", ".join(["(?, ?, ?)"] * len(part))
            self._writer.execute(f"INSERT OR IGNORE INTO outlines (id, raw, used_s) VALUES {places}", rows)  # noqa: S608

    def keeping(self, now_s: float) -> Iterator[None]:
        """Record which templates were used, and delete those that no chunk can need any more.

        Runs a short transaction before each yield.
        """
        self._used.update(self._take_used())  # may still hold ids from a failed transaction
        due = [id_ for id_ in self._used if abs(now_s - self._kept_s.get(id_, float("-inf"))) >= TEMPLATES_BEHIND_S]
        for part in _parts(due, KEPT_AT_ONCE):
            places = ", ".join("?" * len(part))
            statement = f"UPDATE outlines SET used_s = max(used_s, ?) WHERE id IN ({places})"  # noqa: S608
            with database.transaction(self._writer):
                self._writer.execute(statement, [now_s, *part])
            self._kept_s.update(dict.fromkeys(part, now_s))
            yield
        self._used = set()
        with database.transaction(self._writer):
            oldest = self._writer.execute("SELECT received_s FROM chunks ORDER BY id LIMIT 1").fetchone() or (now_s,)
            gone = self._writer.execute(
                "DELETE FROM outlines WHERE used_s < ? RETURNING id", (min(oldest[0], now_s) - TEMPLATES_KEPT_S,)
            ).fetchall()
        if gone:
            for (id_,) in gone:
                self._kept_s.pop(id_, None)
            self._lost([id_ for (id_,) in gone])
        yield


def _parts(ids: Sequence[bytes], most: int) -> Iterator[Sequence[bytes]]:
    """Yield parts small enough for one statement; each statement waits for the GIL, so parts are large."""
    for first in range(0, len(ids), most):
        yield ids[first : first + most]


# A stream has one range, and one more for each gap that the agent's bounded queue left. Beyond this many the two lowest
# are merged: sequences between them then count as stored, but streams are sent in order, so they no longer arrive.
RANGES_MAX = 256

_Ranges = tuple[tuple[int, int], ...]
_ranges_decoder = msgspec.json.Decoder(list[tuple[int, int]])


class Sequences:
    """A set of sequences starting at 1. Adding in ascending order, the common case, needs no search.

    ``highest`` is 0 for an empty set. Setting it to ``highest + 1`` is the same as adding that.
    """

    __slots__ = ("_earlier", "_first", "highest")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._earlier: list[tuple[int, int]] = []
        self._first, self.highest = 1, 0  # in an empty set 1 comes next
        self._take(list(ranges))

    @classmethod
    def decode(cls, text: bytes) -> Sequences:
        """Return the set that ``encode`` returned."""
        return cls(_ranges_decoder.decode(text))

    def encode(self) -> bytes:
        """Return the ranges (first and last of each) as JSON."""
        return msgspec.json.encode(self._ranges())

    def snapshot(self) -> _Ranges:
        """Return a snapshot for ``restore``."""
        return tuple(self._ranges())

    def restore(self, snapshot: _Ranges) -> None:
        """Restore the set to the snapshot."""
        self._take(list(snapshot))

    def add(self, sequence: int) -> bool:
        """Add the sequence to the set; return whether it is new."""
        if sequence > self.highest:
            if sequence > self.highest + 1:
                if self.highest:
                    self._earlier.append((self._first, self.highest))
                    self._bound()
                self._first = sequence
            self.highest = sequence
            return True
        if sequence >= self._first:
            return False
        ranges = self._ranges()
        after = bisect_right(ranges, (sequence, 1 << 62))  # the first range that begins later
        if after and sequence <= ranges[after - 1][1]:
            return False
        low = high = sequence
        begin = end = after
        if after and ranges[after - 1][1] == sequence - 1:
            begin, low = after - 1, ranges[after - 1][0]
        if after < len(ranges) and ranges[after][0] == sequence + 1:
            end, high = after + 1, ranges[after][1]
        ranges[begin:end] = [(low, high)]
        self._take(ranges)
        self._bound()
        return True

    def _ranges(self) -> list[tuple[int, int]]:
        return [*self._earlier, (self._first, self.highest)] if self.highest else []

    def _take(self, ranges: list[tuple[int, int]]) -> None:
        self._first, self.highest = ranges.pop() if ranges else (1, 0)
        self._earlier = ranges

    def _bound(self) -> None:
        if len(self._earlier) >= RANGES_MAX:
            self._earlier[:2] = [(self._earlier[0][0], self._earlier[1][1])]


# Of the agents' streams the writer knows their ids, their shards, and which sequences are stored. A stream's row is
# written when the stream is new and only occasionally after that; what arrived since the last update is in the
# directories of the chunks.

STREAMS_CACHED_MAX = 50_000  # enough for a large fleet; an outage leaves each node some for each minute
NOTED_AT_ONCE = 1_000  # rows written per transaction, so that new frames do not wait for long
NODES_PER_SHARD = 256  # nodes that share chunks and segments: few enough to sort in memory, 5 min at a time

_StreamName = tuple[str, str]


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


class Touched(dict[_StreamName, JournalStream]):
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
        self._cache: dict[_StreamName, JournalStream] = {}
        self._dirty: dict[_StreamName, JournalStream] = {}  # streams with more sequences than their rows say

    def __len__(self) -> int:
        return len(self._cache)

    def recover(self) -> None:
        """Recover from the directories what arrived after the rows were last written."""
        found: dict[int, tuple[_StreamName, JournalStream]] = {}
        (self.noted_id,) = self._writer.execute("SELECT noted_id FROM journal").fetchone()
        statement = "SELECT directory FROM chunks WHERE id > ? ORDER BY id"
        for (directory,) in self._writer.execute(statement, (self.noted_id,)):
            for line in directory_lines(directory):
                if line.stream_id not in found:
                    found[line.stream_id] = self._by_id(line.stream_id)
                _, stream = found[line.stream_id]
                stream.sequences.add(line.sequence)
                stream.heard_s = max(stream.heard_s, line.received_s)
        self.keep(dict(found.values()))

    def keep(self, touched: dict[_StreamName, JournalStream]) -> bool:
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
        missing: dict[_StreamName, float] = {}
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

    def _by_id(self, id_: int) -> tuple[_StreamName, JournalStream]:
        node, name, shard, sequences, heard_s = self._writer.execute(
            "SELECT n.node, s.stream, n.shard, s.sequences, s.heard_s"
            " FROM streams s JOIN nodes n ON n.id = s.node_id WHERE s.id = ?",
            (id_,),
        ).fetchone()
        return (node, name), JournalStream(id_, shard, Sequences.decode(sequences), heard_s)

    def _look_up(self, names: Sequence[_StreamName]) -> dict[_StreamName, JournalStream]:
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

    def _make(self, new: dict[_StreamName, float]) -> dict[_StreamName, JournalStream]:
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


# Retention keeps the journal small: it deletes chunks that are in segments, and saves what is known of streams and
# templates. A round is many short transactions, between which new frames are written: none waits for the whole round.

RETENTION_S = 30.0  # from one round to the next
DELETE_BATCH = 200  # chunks deleted in one transaction


class Retention:
    """Retention rounds, run by the journal's writer thread; ``dropped`` counts deleted frames that no segment had."""

    def __init__(
        self,
        writer: database.DurableConnection,
        reader: JournalReader,
        streams: Streams,
        templates: JournalTemplates,
        settings: HistorySettings,
        window_s: float,
    ) -> None:
        self.dropped = 0
        self._writer = writer
        self._reader = reader
        self._streams = streams
        self._templates = templates
        self._settings = settings
        self._window_s = window_s

    def round(self, now_s: float, replay_id: int) -> Iterator[None]:
        """Do all that is due at ``now_s``, one short transaction before each yield.

        A restart would not replay chunks up to ``replay_id``. Raises sqlite3.Error.
        """
        oldest_s = now_s - self._settings.retention_s
        yield from self._streams.noting()  # saves what is known from chunks before they are deleted
        while self._delete_some(now_s, oldest_s, replay_id) == DELETE_BATCH:
            yield
        yield
        with database.transaction(self._writer):
            self._streams.forget(oldest_s)
        yield
        yield from self._templates.keeping(now_s)

    def _delete_some(self, now_s: float, oldest_s: float, replay_id: int) -> int:
        """Delete one batch of chunks that are in segments, too old or too many; return how many were deleted."""
        with database.transaction(self._writer):
            doomed: list[tuple[int, int]] = self._writer.execute(
                "SELECT c.id, 0 FROM shards s JOIN chunks c ON c.shard = s.shard AND c.id <= min(s.sealed_id, ?)"
                " WHERE NOT ? AND (c.id <= ? OR c.received_s < ?) LIMIT ?",
                (self._streams.noted_id, self._reader.in_use(), replay_id, now_s - self._window_s, DELETE_BATCH),
            ).fetchall()
            if not doomed:  # no sealed chunk is free to go, so unsealed ones beyond the limits may have to
                doomed = self._too_much(oldest_s)
            ids = [id_ for id_, _ in doomed]
            self._writer.execute(f"DELETE FROM chunks WHERE id IN ({', '.join('?' * len(ids))})", ids)  # noqa: S608
        self.dropped += sum(frames for _, frames in doomed)
        return len(doomed)

    def _too_much(self, oldest_s: float) -> list[tuple[int, int]]:
        """Return the oldest chunks beyond the age or size limit, each with how many of its frames no segment has."""
        surplus = live_bytes(self._writer) - self._settings.retention_bytes
        doomed = []
        for id_, size, received_s, lost in self._writer.execute(
            "SELECT c.id, c.size, c.received_s, iif(c.id <= coalesce(s.sealed_id, 0), 0, c.frames)"
            " FROM (SELECT id, shard, size, received_s, frames FROM chunks WHERE id <= ? ORDER BY id LIMIT ?) c"
            " LEFT JOIN shards s ON s.shard = c.shard ORDER BY c.id",
            (self._streams.noted_id, DELETE_BATCH),
        ):
            if surplus <= 0 and received_s >= oldest_s:
                break
            surplus -= size
            doomed.append((id_, lost))
        return doomed


COMMIT_ENTRIES_MAX = 20_000  # frames per transaction: bounds how long the first of them waits
CHUNK_BYTES_MAX = 4 << 20  # per chunk; SQLite allows 1,000,000,000
PAGE_BYTES = 16_384  # a page holds several frames: half the CPU time of 4 KiB pages, and small fleets write little more
RETENTION_SHARE = 0.25  # duration of a retention step relative to the pause after it
IDLE_S = 1.0  # how often an idle writer checks whether a failed disk works again
ADOPT_FRAMES = 500  # of the first version's file, moved in one transaction
WINDOW_S = 900.0
BATCH_BYTES = 512  # approximate memory overhead of a request beside its frames
COMMITS_MAX = 1_000  # number of commits remembered of those that a restart would replay

T = TypeVar("T")


_Work = Callable[[sqlite3.Connection], Any]


class Journal:
    """The newest part of a History, in ``path``. Sealed chunks stay for ``window_s``: a restart replays them."""

    def __init__(
        self, path: Path, settings: HistorySettings, pending_bytes_max: int, clock: Clock, window_s: float = WINDOW_S
    ) -> None:
        self.path = path
        self._settings = settings
        self._pending_bytes_max = pending_bytes_max
        self._clock = clock
        self._writer = database.connect(path, PAGE_BYTES)
        # Some builds of SQLite overwrite deleted data with zeros, which would double the bytes written.
        self._writer.execute("PRAGMA secure_delete = OFF")
        database.migrate(self._writer, MIGRATIONS, path)
        condition = database.DatabaseCondition(path)
        self.reader = JournalReader(path, clock, condition)
        self._waiting: deque[tuple[Batch | _Work, int, Future[Any]]] = deque()  # each with its size in bytes
        self._waiting_bytes = 0
        self._wake = threading.Condition()
        self._closing = False
        self._condition = condition
        self._refusals = Refusals(clock)
        self._streams = Streams(self._writer)
        self.templates = JournalTemplates(self._writer)
        self._commits: deque[tuple[int, int]] = deque()  # last chunk and frames of those that a restart would replay
        self._commits_frames = 0
        self._replay_id = 0  # a restart would not replay chunks up to this id
        self._retention = Retention(self._writer, self.reader, self._streams, self.templates, settings, window_s)
        self._retaining: Iterator[None] | None = None
        self._next_step_s = 0.0  # of retention, by the process's monotonic clock
        self._retained_at_s = clock.monotonic_s()
        self.id: str
        (self.id,) = self._writer.execute("SELECT id FROM journal").fetchone()
        self._open()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        """Bytes of frames waiting for the disk."""
        return self._waiting_bytes

    @property
    def dropped_by_retention(self) -> int:
        """Number of frames deleted before they were in a segment."""
        return self._retention.dropped

    def submit(self, batch: Batch) -> Future[Appended]:
        """Return a future that is done once the batch is durable. Raises HistoryBusy, HistoryUnavailable."""
        return self._enqueue(batch, batch.raw_bytes + BATCH_BYTES * len(batch.refs))

    def change(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Run ``work`` in a transaction of its own; return a future of its result. Raises HistoryUnavailable."""
        return self._enqueue(work, 0)

    def streams(self) -> list[StreamInfo]:
        """Return every stream that the history knows."""
        rows = self.reader.read(
            "SELECT n.node, s.stream, s.sequences, s.heard_s FROM streams s JOIN nodes n ON n.id = s.node_id", ()
        )
        return self._streams.known(rows)

    def problem(self) -> str | None:
        """Return why frames cannot be made durable at present, or None."""
        if not self._thread.is_alive():
            return "the history's writer has ended"
        return self._refusals.reason or self._condition.damage

    def note_damage(self, how: str) -> None:
        """Make ``problem`` report that the file is damaged."""
        self._condition.note_damage(how)

    def close(self) -> None:
        """Make durable what was submitted, then release the files."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self.reader.close()
        self._writer.close()

    # The writer thread

    def _enqueue(self, what: Batch | _Work, size: int) -> Future[Any]:
        with self._wake:
            if self._closing or not self._thread.is_alive():
                raise HistoryUnavailable("the history is closed; the server is stopping")
            if size and self._waiting and self._waiting_bytes + size > self._pending_bytes_max:
                raise HistoryBusy(
                    f"{self._waiting_bytes} bytes of frames wait for the disk, at most {self._pending_bytes_max}"
                    " may; send again later (ingest.pending_bytes_max)"
                )
            future: Future[Any] = Future()
            self._waiting.append((what, size, future))
            self._waiting_bytes += size
            self._wake.notify()
        return future

    def _open(self) -> None:
        try:
            with database.transaction(self._writer):
                self._streams.recover()
            self._adopt()
            for id_, frames in sorted(
                self._writer.execute("SELECT id, frames FROM chunks INDEXED BY chunks_of_shard").fetchall()
            ):
                self._note_commit(id_, frames)
        except (sqlite3.Error, struct.error, TypeError, ValueError) as error:
            # What no commit ever writes: a directory of a wrong length, or streams without rows.
            damaged = not isinstance(error, sqlite3.Error) or database.tells_damage(error)
            remedy = f"; it is damaged: {database.REMEDY}" if damaged else ""
            raise StoreUnavailable(f"{self.path} cannot be read: {error}{remedy}") from error

    def _adopt(self) -> None:
        """Move the frames of the first version's file, which had a row for each, into chunks."""
        while True:
            rows = self._writer.execute(
                "SELECT f.id, s.node, s.stream, f.received_s, f.offset_s, f.sequence, f.time_s, f.raw"
                " FROM earlier_frames f JOIN earlier_streams s ON s.id = f.stream_id ORDER BY f.id LIMIT ?",
                (ADOPT_FRAMES,),
            ).fetchall()
            if not rows:
                return
            touched = Touched()
            with database.transaction(self._writer):
                batch = Batch.of(
                    (StreamRef(node, stream), sequence, time_s - offset_s, received_s, offset_s, raw)
                    for _, node, stream, received_s, offset_s, sequence, time_s, raw in rows
                )
                insert_chunks(self._writer, self._append(batch, touched)[2])
                self._writer.execute("DELETE FROM earlier_frames WHERE id <= ?", (rows[-1][0],))
            self._streams.keep(touched)

    def _run(self) -> None:
        while True:
            taken = self._take()
            if taken and not isinstance(taken[0][0], Batch):
                self._do(taken[0][0], taken[0][1])
            elif taken:
                self._write([(what, future) for what, future in taken if isinstance(what, Batch)])
            elif self._closing:
                return
            elif self._refusals.reason is not None:
                self._probe()
            self._retain_if_due()
            self._refusals.log_end()

    def _take(self) -> list[tuple[Batch | _Work, Future[Any]]]:
        # No delay is added to gather more: while one commit runs, the next group gathers by itself.
        with self._wake:
            if not self._waiting and not self._closing:
                until_step_s = self._next_step_s - time.monotonic()
                self._wake.wait(IDLE_S if self._retaining is None else min(max(until_step_s, 0.0), IDLE_S))
            taken: list[tuple[Batch | _Work, Future[Any]]] = []
            entries = 0
            while self._waiting and entries < COMMIT_ENTRIES_MAX:
                what, size, future = self._waiting[0]
                batch = what if isinstance(what, Batch) else None
                if taken and batch is None:
                    break
                self._waiting.popleft()
                self._waiting_bytes -= size
                # From here on the waiting request can no longer cancel it.
                if future.set_running_or_notify_cancel():
                    taken.append((what, future))
                    if batch is None:
                        break
                    entries += len(batch.refs)
            return taken

    def _do(self, work: _Work, future: Future[Any]) -> None:
        try:
            with database.transaction(self._writer):
                result = work(self._writer)
        except Exception as error:  # noqa: BLE001 - the thread must survive and the caller must get the error
            self._condition.record_error(error)
            future.set_exception(HistoryUnavailable(f"{self.path} cannot be changed: {error}"))
        else:
            future.set_result(result)

    def _write(self, taken: list[tuple[Batch, Future[Any]]]) -> None:
        touched = Touched()
        chunks: list[tuple[object, ...]] = []
        results: list[tuple[Appended, list[JournalStream]]] = []
        try:
            with database.transaction(self._writer):
                for batch, _ in taken:
                    appended, streams, rows = self._append(batch, touched)
                    results.append((appended, streams))
                    chunks += rows
                last_id = insert_chunks(self._writer, chunks)
        except Exception as error:  # noqa: BLE001 - the thread must survive and the agents must get the error
            touched.undo()
            self._failed("frames cannot be written to", error, sum(len(batch.refs) for batch, _ in taken))
            for _, future in taken:
                future.set_exception(HistoryUnavailable(self.problem()))
            return
        self._refusals.worked()
        self._note_commit(last_id, sum(sum(appended.new) for appended, _ in results))
        room_wanted = self._streams.keep(touched)
        for (batch, future), (appended, streams) in zip(taken, results, strict=True):
            self._streams.keep_referred(batch.refs, streams)
            future.set_result(appended)
        if room_wanted:
            self._note_streams()

    def _append(self, batch: Batch, touched: Touched) -> tuple[Appended, list[JournalStream], list[tuple[object, ...]]]:
        """Return the result of a batch, the streams of its rows, and its new frames as chunks for ``insert``."""
        streams = self._streams.referred(batch.refs, batch.received_s, touched)
        if batch.templates:
            used_s = float(batch.received_s.max())
            self.templates.write({id_: (raw, used_s) for id_, raw in batch.templates.items()})
        appended = touched.add(streams, batch.sequence.tolist(), batch.received_s.tolist())
        ids, shards = [stream.id for stream in streams], [stream.shard for stream in streams]
        return appended, streams, list(chunks_of(batch, ids, shards, appended.new, CHUNK_BYTES_MAX))

    def _note_commit(self, last_id: int | None, frames: int) -> None:
        if last_id is None:
            return
        self._commits_frames += frames
        if self._commits and self._commits[-1][1] < self._settings.replay_frames_max / COMMITS_MAX:
            frames += self._commits.pop()[1]  # merged: an hour has a hundred thousand commits
        self._commits.append((last_id, frames))
        while self._commits_frames - self._commits[0][1] >= self._settings.replay_frames_max:
            self._replay_id, gone = self._commits.popleft()
            self._commits_frames -= gone

    def _note_streams(self) -> None:
        try:
            for _ in self._streams.noting():
                pass
        except sqlite3.Error as error:
            self._failed("streams cannot be written to", error)

    def _probe(self) -> None:
        # Otherwise a full disk that has space again would count as full until an agent tries.
        try:
            with database.transaction(self._writer):
                insert_chunks(self._writer, [(-1, 0, 0, 0.0, 0.0, 0.0, b"", bytes(65_536))])
                self._writer.execute("DELETE FROM chunks WHERE shard = -1")
        except sqlite3.Error as error:
            self._failed("frames cannot be written to", error)
        else:
            self._refusals.worked()

    def _failed(self, what: str, error: Exception, frames: int = 0) -> None:
        self._condition.record_error(error)
        if frames or self._condition.damage is None:  # damage that affects no frame refuses none
            self._refusals.failed(f"{what} {self.path}: {error}", frames)

    def _retain_if_due(self) -> None:
        """Run one step of retention if a round is in progress or due.

        What a compactor seals in a minute takes many steps. They run one at a time, with pauses in which only frames
        are written; otherwise acknowledgements would wait for all of them.
        """
        now_s, began_s = self._clock.monotonic_s(), time.monotonic()
        if began_s < self._next_step_s:
            return
        if self._retaining is None and now_s - self._retained_at_s < RETENTION_S:
            return
        if self._retaining is None:
            self._retained_at_s = now_s
            self._retaining = self._retention.round(self._clock.now_s(), self._replay_id)
        try:
            next(self._retaining)
        except StopIteration:
            self._retaining = None
        except sqlite3.Error as error:
            self._retaining = None
            self._failed("old frames cannot be deleted from", error)
        ended_s = time.monotonic()
        self._next_step_s = ended_s + (ended_s - began_s) / RETENTION_SHARE
