"""The segment store: a manifest in the journal's file, a folder per segment, limits of age and size.

A segment counts once it is in the manifest. Folders that are not in it remain from a change that a crash interrupted.
Folders with frames that this journal never had are adopted: a history.db that was lost, or restored from a backup,
costs only its own frames.

Minutes, and hours of earlier versions, have a table of their own (``levels``), and a folder for each segment too. A row
of it summarizes the raw segments of its group with ids ``from_id`` to ``through_id`` within its time range: minutes
summarize the segment they were written with; an hour of an earlier version, all segments it was made from.
"""

from __future__ import annotations

import json
import logging
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from eagle_eye.schema.metrics import MetricSpec
from eagle_eye.server.history.history import BucketSeries, RankReport, Recorded, Run
from eagle_eye.server.history.journal import Journal
from eagle_eye.server.history.journal_reader import live_bytes
from eagle_eye.server.history.segment_tables import (
    BUCKET_S,
    FACTS_FILE,
    FORMAT,
    HOURS_FOLDER,
    MINUTES_FOLDER,
    MINUTES_FORMAT,
    PARTIAL,
    RAW_FOLDER,
    WINDOW_FORMAT,
    Facts,
    MinutesFacts,
    Remade,
    any_between,
    shard_of,
)
from eagle_eye.server.history.settings import HistorySettings
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import HistoryMoved, HistoryUnavailable

if TYPE_CHECKING:
    from eagle_eye.server.history.segment_files import Segment


# ``alone``: raw segments that it summarizes are gone, so it answers any step. ``adopted``: made by another history.db.
# ``problem``: why it is no longer read, if it cannot be rebuilt.
LEVELS_TABLE = """
    CREATE TABLE IF NOT EXISTS levels (
        id INTEGER PRIMARY KEY AUTOINCREMENT, level TEXT NOT NULL, name TEXT NOT NULL, shard INTEGER NOT NULL,
        first_node TEXT NOT NULL, last_node TEXT NOT NULL, start_s REAL NOT NULL, end_s REAL NOT NULL,
        from_id INTEGER NOT NULL, through_id INTEGER NOT NULL, alone INTEGER NOT NULL, adopted INTEGER NOT NULL,
        frames INTEGER NOT NULL, bytes INTEGER NOT NULL, problem TEXT, UNIQUE (level, name))
"""
LEVELS_INDEXES = (
    "CREATE INDEX IF NOT EXISTS levels_by_time ON levels (end_s, start_s)",
    "CREATE INDEX IF NOT EXISTS levels_of_shard ON levels (shard, end_s)",
)
# Rows of an earlier version. An hour or a day summarized all raw segments up to the newest it was made from; for hours,
# which were made from minutes, that one is unknown.
MOVE_DOWNSAMPLED = """
    INSERT OR REPLACE INTO levels (level, name, shard, first_node, last_node, start_s, end_s, from_id, through_id,
        alone, adopted, frames, bytes, problem)
    SELECT level, name, shard, first_node, last_node, start_s, end_s, 0,
        iif(level = '1m', through_id, (SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'segments')),
        level = '1h' OR partial, adopted, frames, bytes, NULL
    FROM downsampled WHERE name IS NOT NULL
"""
LEVEL_COLUMNS = (
    "id, level, name, shard, first_node, last_node, start_s, end_s, from_id, through_id, alone, adopted, frames,"
    " problem"
)


class LevelRow(NamedTuple):
    """A row of the table."""

    id: int
    level: str
    name: str
    shard: int
    first_node: str
    last_node: str
    start_s: float
    end_s: float
    from_id: int
    through_id: int
    alone: int
    adopted: int
    frames: int
    problem: str | None

    @property
    def of_window(self) -> bool:
        """Whether it is an hour or a day of an earlier version, made from all segments up to one."""
        return self.from_id == 0


def create_levels(writer: sqlite3.Connection) -> None:
    """Create the table, with all rows of an earlier version's table."""
    for statement in (LEVELS_TABLE, *LEVELS_INDEXES):
        writer.execute(statement)
    if writer.execute("SELECT 1 FROM sqlite_schema WHERE name = 'downsampled'").fetchone():
        writer.execute("DELETE FROM levels WHERE from_id = 0")  # from before a downgrade to that version
        writer.execute(MOVE_DOWNSAMPLED)
        writer.execute("DROP TABLE downsampled")


def levels_holding(reader: sqlite3.Connection, nodes: Sequence[str], start_s: float, end_s: float) -> list[LevelRow]:
    """Return the rows, including unreadable ones, that overlap the range and may hold the nodes (any if empty)."""
    statement = f"SELECT {LEVEL_COLUMNS} FROM levels WHERE end_s > ? AND start_s <= ?"  # noqa: S608 - a constant
    values: tuple[object, ...] = (start_s, end_s)
    if nodes:
        # Another history.db has different groups: segments adopted from it are selected by node names.
        own = "SELECT shard FROM nodes WHERE node IN (SELECT value FROM json_each(?))"
        statement += f" AND (adopted OR shard IN ({own}))"
        values = (*values, json.dumps(list(nodes)))
    wanted = sorted(nodes)
    rows = (LevelRow(*row) for row in reader.execute(statement, values))
    return [one for one in rows if not nodes or any_between(wanted, one.first_node, one.last_node)]


def level_named(reader: sqlite3.Connection, level: str, name: str) -> LevelRow | None:
    """Return the readable row of this name, if there is one."""
    row = reader.execute(
        f"SELECT {LEVEL_COLUMNS} FROM levels WHERE level = ? AND name = ? AND problem IS NULL",  # noqa: S608 - a constant
        (level, name),
    ).fetchone()
    return LevelRow(*row) if row else None


def insert_level(
    writer: sqlite3.Connection, facts: MinutesFacts, ids: tuple[int, int], alone: bool, adopted: bool
) -> None:
    """Add a row that summarizes the raw segments with these ids, first and last."""
    writer.execute(
        "INSERT OR REPLACE INTO levels (level, name, shard, first_node, last_node, start_s, end_s, from_id, through_id,"
        " alone, adopted, frames, bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(facts.level, facts.name, facts.shard, facts.first_node, facts.last_node, facts.start_s, facts.end_s),
            *(*ids, alone, adopted, facts.frames, facts.bytes),
        ),
    )


def add_minutes(writer: sqlite3.Connection, facts: Sequence[MinutesFacts]) -> list[str]:
    """Add the minutes of raw segments that are in the manifest; return the names of those that are not."""
    (journal,) = writer.execute("SELECT id FROM journal").fetchone()
    left = []
    for one in facts:
        row = writer.execute("SELECT id FROM segments WHERE name = ? AND problem IS NULL", (one.name,)).fetchone()
        if row is None:
            left.append(one.name)
        else:
            insert_level(writer, one, (row[0], row[0]), alone=False, adopted=one.journal != journal)
    return left


def note_retired(writer: sqlite3.Connection, name: str, id_: int, first_s: float, last_s: float) -> bool:
    """Record that a raw segment is retired; return whether a row summarizes at least part of it."""
    marked = writer.execute(
        "UPDATE levels SET alone = 1"
        " WHERE shard = ? AND from_id <= ? AND through_id >= ? AND start_s <= ? AND end_s > ?",
        (shard_of(name), id_, id_, last_s, first_s),
    )
    return marked.rowcount > 0


def segments_without_minutes(reader: sqlite3.Connection, since_s: float) -> list[str]:
    """Return the names of the raw segments since ``since_s`` whose time is not fully covered by minutes."""
    rows = reader.execute(
        "SELECT s.id, s.name, s.first_s, s.last_s FROM segments s LEFT JOIN levels l ON l.level = ? AND l.name = s.name"
        " WHERE s.problem IS NULL AND s.last_s >= ? AND l.id IS NULL ORDER BY s.id",
        (MINUTES_FOLDER, since_s),
    ).fetchall()
    found = []
    for id_, name, first_s, last_s in rows:
        at_s = first_s
        for start_s, end_s in reader.execute(
            "SELECT start_s, end_s FROM levels WHERE level = ? AND shard = ? AND from_id = 0 AND through_id >= ?"
            " AND start_s <= ? AND end_s > ? AND problem IS NULL ORDER BY start_s",
            (MINUTES_FOLDER, shard_of(name), id_, last_s, first_s),
        ):
            at_s = end_s if start_s <= at_s else at_s
        if at_s <= last_s:
            found.append(name)
    return found


def forget_nodes(writer: sqlite3.Connection) -> None:
    """Delete nodes without streams in the journal, and without segments of their group at any level.

    Until then a node's row tells which group's segments hold its past, and puts it back into that group if it returns.
    """
    writer.execute(
        "DELETE FROM nodes WHERE NOT EXISTS (SELECT 1 FROM streams WHERE node_id = nodes.id)"
        " AND shard NOT IN (SELECT shard FROM levels)"
    )


# Replaced folders wait for the readers that may use them

READ_S_MAX = 3_600.0  # readers that take longer are asked to query less


class FolderRemoval:
    """Folders to be removed, and the readers that they wait for. For any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._readers: dict[object, float] = {}
        self._folders: dict[Path, tuple[float, set[object]]] = {}
        self._gone: dict[str, float] = {}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the current folders while the block reads, for an hour at most."""
        reader = object()
        with self._lock:
            self._readers[reader] = self._clock.monotonic_s()
        try:
            yield
        finally:
            with self._lock:
                del self._readers[reader]
            self.sweep()

    def remove(self, folder: Path) -> None:
        """Remove the folder once no reader is left that began before now."""
        with self._lock:
            self._folders[folder] = (self._clock.monotonic_s(), set(self._readers))
        self.sweep()

    def sweep(self) -> None:
        """Remove the folders that no reader needs any more."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            due = [
                folder
                for folder, (since_s, readers) in self._folders.items()
                if now_s - since_s >= READ_S_MAX or readers.isdisjoint(self._readers)
            ]
            for folder in due:
                self._gone[folder.name] = now_s
                del self._folders[folder]
            oldest_s = min(self._readers.values(), default=now_s)
            self._gone = {name: at_s for name, at_s in self._gone.items() if at_s >= oldest_s}
        for folder in due:
            shutil.rmtree(folder, ignore_errors=True)

    def check(self, name: str) -> None:
        """Raise HistoryUnavailable if a folder of this name was removed during a read."""
        with self._lock:
            gone = name in self._gone
        if gone:
            raise HistoryUnavailable(
                f"the frames have moved on: reading took more than {READ_S_MAX:.0f} s; ask for less at a time"
            )


# Minutes and hours

LEVELS_RETENTION_S = 60.0  # how often to look for old segments
RETIRE_BATCH = 100  # segments retired in one transaction

_log = logging.getLogger(__name__)


class LevelSize(NamedTuple):
    """The size of one level."""

    segments: int
    bytes: int
    oldest_s: float | None  # where the oldest begins; None if there is none


class LevelStore:
    """The downsampled segments below ``folder``, a folder for each level."""

    def __init__(
        self, folder: Path, aside: Path, journal: Journal, settings: HistorySettings, removal: FolderRemoval
    ) -> None:
        self._folder = folder
        self._aside = aside
        self._journal = journal
        self._removal = removal
        self._retention_s = {MINUTES_FOLDER: settings.minutes_retention_s, HOURS_FOLDER: settings.hours_retention_s}
        self._bytes_max = {
            MINUTES_FOLDER: settings.minutes_retention_bytes,
            HOURS_FOLDER: settings.hours_retention_bytes,
        }
        self._kept: dict[str, LevelSize] = {}
        self._retained_s = float("-inf")
        self._wanting = True  # there may be raw segments without minutes
        self.set_aside_total = 0
        for level in BUCKET_S:
            self.folder(level).mkdir(parents=True, exist_ok=True, mode=0o700)
        journal.change(create_levels).result()
        self._sweep()
        self.measure()

    def folder(self, level: str) -> Path:
        """Return the folder of the level's segments."""
        return self._folder / level

    def kept(self) -> dict[str, LevelSize]:
        """Return each level's size as last measured, without disk access."""
        return self._kept

    def measure(self) -> None:
        """Update ``kept`` from the table. Raises HistoryUnavailable."""
        rows = self._journal.reader.read(
            "SELECT level, count(*), sum(bytes), min(start_s) FROM levels WHERE problem IS NULL GROUP BY level", ()
        )
        found = {level: LevelSize(*row) for level, *row in rows}
        self._kept = {level: found.get(level, LevelSize(0, 0, None)) for level in BUCKET_S}

    def without_minutes(self, now_s: float) -> list[str]:
        """Return the raw segments whose minutes are missing: those of earlier versions, or with broken minutes."""
        if not self._wanting:
            return []
        since_s = now_s - self._retention_s[MINUTES_FOLDER]
        names = self._journal.reader.read_together(lambda reader: segments_without_minutes(reader, since_s))
        self._wanting = bool(names)
        return names

    def put(self, remade: Remade) -> None:
        """Add the minutes of a raw segment to the table, unless the segment was retired meanwhile."""
        if remade.minutes is None:
            return
        facts = remade.minutes
        left = self._journal.change(lambda writer: add_minutes(writer, [facts])).result()
        self.discard(left)
        self.measure()

    def discard(self, names: Sequence[str]) -> None:
        """Remove minutes that were not added to the table."""
        for name in names:
            shutil.rmtree(self.folder(MINUTES_FOLDER) / name, ignore_errors=True)

    def courses(
        self, stored: LevelRow, metric: MetricSpec, nodes: Sequence[str], start_s: float, end_s: float, job: str | None
    ) -> Iterator[BucketSeries]:
        """Yield the segment's buckets that begin in ``start_s`` to before ``end_s``; set it aside if it is broken.

        Raises HistoryMoved in that case, and HistoryUnavailable if it was removed during a read that took too long.
        """
        # imported here: ingestion alone needs no Parquet
        from eagle_eye.server.history.minutes import courses
        from eagle_eye.server.history.segment_files import BrokenSegment

        level, name = stored.level, stored.name
        try:
            yield from courses(self.folder(level) / name, metric, nodes, start_s, end_s, job)
        except BrokenSegment as error:
            if not self.set_aside(level, name, str(error)):
                self._removal.check(name)
            raise HistoryMoved(f"{level}/{name} was found broken; ask again: what is left answers then") from error

    def retain(self, now_s: float) -> None:
        """Retire segments beyond the age or size limits, the oldest first. Raises HistoryUnavailable.

        Runs once a minute at most.
        """
        if abs(now_s - self._retained_s) < LEVELS_RETENTION_S:
            return
        self._retained_s = now_s
        for level in BUCKET_S:
            while True:
                gone = self._journal.change(partial(self._retire, level, now_s)).result()
                for name in gone:
                    self._removal.remove(self.folder(level) / name)
                    shutil.rmtree(self._aside / f"{level}-{name}", ignore_errors=True)
                if len(gone) < RETIRE_BATCH:
                    break
            for path in self._aside.glob(f"{level}-*"):
                start = path.name.removeprefix(f"{level}-").split("-")[0]
                if start.isdigit() and int(start) < now_s - self._retention_s[level]:
                    shutil.rmtree(path, ignore_errors=True)
        self._journal.change(forget_nodes).result()
        self.measure()

    def set_aside(self, level: str, name: str, reason: str) -> bool:
        """Stop reading a broken segment; return whether there is one of this name.

        If all raw segments that it summarizes still exist, they answer instead, and its minutes are built again.
        """

        def change(writer: sqlite3.Connection) -> LevelRow | None:
            stored = level_named(writer, level, name)
            if stored is not None and stored.alone:
                writer.execute("UPDATE levels SET problem = ?, bytes = 0 WHERE id = ?", (reason[:500], stored.id))
            elif stored is not None:
                writer.execute("DELETE FROM levels WHERE id = ?", (stored.id,))
            return stored

        stored = self._journal.change(change).result()
        if stored is None:
            return False
        self._wanting = True
        self.set_aside_total += 1
        self.measure()
        self._aside.mkdir(exist_ok=True, mode=0o700)
        aside = self._aside / f"{level}-{name}"
        try:
            shutil.rmtree(aside, ignore_errors=True)  # of the same segment, rebuilt and broken again
            (self.folder(level) / name).rename(aside)
        except OSError as error:
            reason = f"{reason}; and it cannot be moved: {error}"
        _log.error(
            "the downsampled segment %s of %s to %s is broken and set aside in %s; %s: %s",
            f"{level}/{name}",
            stored.first_node,
            stored.last_node,
            self._aside,
            "frames of it are gone, so it stays so" if stored.alone else "it is made anew",
            reason,
        )
        return True

    def _retire(self, level: str, now_s: float, writer: sqlite3.Connection) -> list[str]:
        (size,) = writer.execute("SELECT coalesce(sum(bytes), 0) FROM levels WHERE level = ?", (level,)).fetchone()
        surplus = size - self._bytes_max[level]
        gone: list[str] = []
        for id_, end_s, name, bytes_ in writer.execute(
            "SELECT id, end_s, name, bytes FROM levels WHERE level = ? ORDER BY end_s, id LIMIT ?",
            (level, RETIRE_BATCH),
        ).fetchall():
            if surplus <= 0 and end_s >= now_s - self._retention_s[level]:
                break
            writer.execute("DELETE FROM levels WHERE id = ?", (id_,))
            surplus -= bytes_
            gone.append(name)
        return gone

    def _sweep(self) -> None:
        """Remove the remains of a crash, and adopt segments that only another history.db knew."""
        foreign = list(self._unknown())
        if not foreign:
            return
        taken = self._journal.change(lambda writer: self._adopt(writer, foreign)).result()
        for facts in foreign:
            if facts not in taken:
                shutil.rmtree(self.folder(facts.level) / facts.name, ignore_errors=True)
        if taken:
            _log.warning("%d downsampled segments that only another history.db knew are taken over", len(taken))

    def _unknown(self) -> Iterator[MinutesFacts]:
        """Yield segments on disk that are not in the table; remove unfinished ones."""
        known = set(self._journal.reader.read("SELECT level, name FROM levels", ()))
        for level in BUCKET_S:
            for path in sorted(self.folder(level).iterdir()):
                if (level, path.name) in known:
                    continue
                if path.name.startswith(PARTIAL):
                    shutil.rmtree(path, ignore_errors=True)
                    continue
                try:
                    facts = msgspec.json.decode((path / FACTS_FILE).read_bytes(), type=MinutesFacts)
                except (OSError, msgspec.MsgspecError) as error:
                    _log.warning("%s is no segment of the history and is left alone: %s", path, error)
                    continue
                if facts.format in (MINUTES_FORMAT, WINDOW_FORMAT) and (facts.name, facts.level) == (path.name, level):
                    yield facts

    def _adopt(self, writer: sqlite3.Connection, foreign: Sequence[MinutesFacts]) -> list[MinutesFacts]:
        """Adopt all but the remains of a crash, whose frames still exist and whose minutes are built again."""
        (journal,) = writer.execute("SELECT id FROM journal").fetchone()
        highest = dict(writer.execute("SELECT name, seq FROM sqlite_sequence"))
        taken = []
        for facts in foreign:
            if facts.format == MINUTES_FORMAT:
                if add_minutes(writer, [facts]):  # its raw segment is not here
                    if facts.journal == journal and facts.last_chunk <= highest.get("chunks", 0):
                        continue
                    insert_level(writer, facts, (-1, -1), alone=True, adopted=True)
            else:
                own = "SELECT name FROM segments WHERE last_s >= ? AND first_s < ? AND problem IS NULL"
                raw = [name for (name,) in writer.execute(own, (facts.start_s, facts.end_s))]
                if facts.journal == journal and any(shard_of(name) == facts.shard for name in raw):
                    continue
                insert_level(writer, facts, (0, highest.get("segments", 0)), alone=True, adopted=True)
            taken.append(facts)
        return taken


# Raw segments

SET_ASIDE_FOLDER = "set-aside"

T = TypeVar("T")


class SegmentEntry(NamedTuple):
    """A readable segment of the manifest."""

    id: int
    name: str
    first_node: str
    last_node: str
    first_s: float
    last_s: float
    frames: int


class SetAsideSegment(NamedTuple):
    """A raw segment that was set aside."""

    id: int
    name: str
    first_node: str
    last_node: str
    first_s: float
    last_s: float
    frames: int
    problem: str


SegmentT = TypeVar("SegmentT", SegmentEntry, SetAsideSegment)


class SegmentStore:
    """The segments below ``folder``, named in the manifest of ``journal``."""

    def __init__(self, folder: Path, journal: Journal, settings: HistorySettings, removal: FolderRemoval) -> None:
        self.folder = folder / RAW_FOLDER
        self._aside = folder / SET_ASIDE_FOLDER
        self._journal = journal
        self._settings = settings
        self._removal = removal
        self._size = (0, 0)
        self._oldest_s: float | None = None
        self.set_aside_total = 0
        self.dropped_by_retention = 0
        self.dropped_as_they_were = 0  # of these, frames that are in no level at all
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._sweep()
        self.levels = LevelStore(folder, self._aside, journal, settings, removal)
        self.measure()

    def size(self) -> tuple[int, int]:
        """Return the number of segments and their bytes as last measured, without disk access."""
        return self._size

    def kept(self) -> dict[str, LevelSize]:
        """Return the sizes of raw segments and of each level as last measured, without disk access."""
        return {RAW_FOLDER: LevelSize(*self._size, self._oldest_s), **self.levels.kept()}

    def measure(self) -> None:
        """Update ``size`` and ``kept`` from the manifest. Raises HistoryUnavailable."""
        ((count, size, oldest_s),) = self._journal.reader.read(
            "SELECT count(*), coalesce(sum(bytes), 0), min(first_s) FROM segments", ()
        )
        self._size = (count, size)
        self._oldest_s = oldest_s

    @staticmethod
    def holding(reader: sqlite3.Connection, nodes: Sequence[str], start_s: float, end_s: float) -> list[SegmentEntry]:
        """Return the segments that may hold frames of the nodes (any if empty) in the range."""
        return _listed(reader, SegmentEntry, "problem IS NULL", nodes, start_s, end_s)

    @staticmethod
    def broken(reader: sqlite3.Connection, nodes: Sequence[str], start_s: float, end_s: float) -> list[SetAsideSegment]:
        """Return the segments that were set aside and held frames of the nodes (any if empty) in the range."""
        return _listed(reader, SetAsideSegment, "problem IS NOT NULL", nodes, start_s, end_s)

    def frames(self, one: SegmentEntry, nodes: Sequence[str], start_s: float, end_s: float) -> Iterator[Recorded]:
        """Yield the segment's frames of the nodes (all if empty) in the range; set it aside if it is broken."""
        return self._guarded(one, lambda segment: segment.frames(nodes, start_s, end_s))

    def runs(
        self, one: SegmentEntry, metric: MetricSpec, nodes: Sequence[str], start_s: float, end_s: float, job: str | None
    ) -> Iterator[Run]:
        """Yield the segment's values of the metric, as History.runs does; set it aside if it is broken."""
        return self._guarded(one, lambda segment: segment.runs(metric, nodes, start_s, end_s, job))

    def ranks(self, one: SegmentEntry, nodes: Sequence[str], start_s: float, end_s: float) -> Iterator[RankReport]:
        """Yield the ranks that the segment's frames report, as History.ranks does; set it aside if it is broken."""
        return self._guarded(one, lambda segment: segment.ranks(nodes, start_s, end_s))

    def count(self, one: SegmentEntry, nodes: Sequence[str], start_s: float, end_s: float) -> int:
        """Return how many frames ``frames`` would yield."""
        if not nodes and start_s <= one.first_s and one.last_s <= end_s:
            return one.frames
        return sum(self._guarded(one, lambda segment: iter([segment.count(nodes, start_s, end_s)])))

    @staticmethod
    def add(writer: sqlite3.Connection, facts: Sequence[Facts], minutes: Sequence[MinutesFacts] = ()) -> None:
        """Add segments on disk and their minutes to the manifest, within a transaction."""
        writer.executemany(
            "INSERT INTO segments (name, first_node, last_node, first_s, last_s, received_s, frames, bytes)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [(f.name, f.first_node, f.last_node, f.first_s, f.last_s, f.received_s, f.frames, f.bytes) for f in facts],
        )
        add_minutes(writer, minutes)

    def retain(self, now_s: float) -> None:
        """Retire segments beyond the age or size limits, the oldest first. Raises HistoryUnavailable."""
        while True:
            gone = self._journal.change(lambda writer: self._retire(writer, now_s)).result()
            # Out of the manifest first, so that no later read finds a half-deleted folder.
            for name, *_ in gone:
                self._removal.remove(self.folder / name)
                shutil.rmtree(self._aside / name, ignore_errors=True)
            self.dropped_by_retention += sum(frames for _, frames, _ in gone)
            self.dropped_as_they_were += sum(frames for _, frames, downsampled in gone if not downsampled)
            if len(gone) < RETIRE_BATCH:
                break
        self.levels.retain(now_s)
        self._removal.sweep()
        self.measure()

    def discard(self, facts: Sequence[Facts]) -> None:
        """Remove segments that were not added to the manifest."""
        for one in facts:
            shutil.rmtree(self.folder / one.name, ignore_errors=True)
        self.levels.discard([one.name for one in facts])

    def _retire(self, writer: sqlite3.Connection, now_s: float) -> list[tuple[str, int, bool]]:
        (size,) = writer.execute("SELECT coalesce(sum(bytes), 0) FROM segments").fetchone()
        surplus = size + live_bytes(writer) - self._settings.retention_bytes
        gone: list[tuple[str, int, bool]] = []
        oldest = writer.execute(
            "SELECT id, name, frames, bytes, received_s, first_s, last_s, problem FROM segments"
            " ORDER BY received_s, id LIMIT ?",
            (RETIRE_BATCH,),
        ).fetchall()
        for id_, name, frames, bytes_, received_s, first_s, last_s, problem in oldest:
            if surplus <= 0 and received_s >= now_s - self._settings.retention_s:
                break
            writer.execute("DELETE FROM segments WHERE id = ?", (id_,))
            surplus -= bytes_
            downsampled = note_retired(writer, name, id_, first_s, last_s)
            gone.append((name, frames, downsampled or problem is not None))
        return gone

    def _guarded(self, one: SegmentEntry, read: Callable[[Segment], Iterator[T]]) -> Iterator[T]:
        # imported here: ingestion alone needs no Parquet
        from eagle_eye.server.history.segment_files import BrokenSegment, Segment

        try:
            segment = Segment(self.folder / one.name)
            segment.check_tables()
            yield from read(segment)
        except BrokenSegment as error:
            if not self.set_aside(one.name, str(error)):
                self._removal.check(one.name)

    def set_aside(self, name: str, reason: str) -> bool:
        """Stop reading a broken segment, and return whether there is one of this name.

        It stays until retention deletes it. A segment that was already retired is no loss.
        """

        def change(writer: sqlite3.Connection) -> SegmentEntry | None:
            row = writer.execute(
                "SELECT id, name, first_node, last_node, first_s, last_s, frames FROM segments"
                " WHERE name = ? AND problem IS NULL",
                (name,),
            ).fetchone()
            if row is None:
                return None
            one = SegmentEntry(*row)
            writer.execute("UPDATE segments SET problem = ? WHERE id = ?", (reason[:500], one.id))
            note_retired(writer, name, one.id, one.first_s, one.last_s)
            return one

        one = self._journal.change(change).result()
        if one is None:
            return False
        self.set_aside_total += 1
        self._aside.mkdir(exist_ok=True, mode=0o700)
        try:
            (self.folder / one.name).rename(self._aside / one.name)
        except OSError as error:
            reason = f"{reason}; and it cannot be moved: {error}"
        _log.error(
            "segment %s of the history is broken and set aside in %s: %d frames of %s to %s cannot be read: %s",
            one.name,
            self._aside,
            one.frames,
            one.first_node,
            one.last_node,
            reason,
        )
        return True

    def _sweep(self) -> None:
        """Remove the remains of a crash, and adopt what another journal wrote."""
        journal_id, newest_chunk = self._journal.reader.read(
            "SELECT id, coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'chunks'), 0) FROM journal", ()
        )[0]
        known = {name for (name,) in self._journal.reader.read("SELECT name FROM segments", ())}
        foreign: list[Facts] = []
        merged: list[Facts] = []
        for path in sorted(self.folder.iterdir()):
            if path.name in known:
                continue
            if path.name.startswith(PARTIAL):
                shutil.rmtree(path, ignore_errors=True)
                continue
            try:
                facts = msgspec.json.decode((path / FACTS_FILE).read_bytes(), type=Facts)
            except (OSError, msgspec.MsgspecError) as error:
                _log.warning("%s is no segment of the history and is left alone: %s", path, error)
                continue
            if facts.format != FORMAT or facts.name != path.name:
                continue
            if facts.sources:
                merged.append(facts)
            elif facts.journal == journal_id and facts.last_chunk <= newest_chunk:
                shutil.rmtree(path, ignore_errors=True)
            else:
                foreign.append(facts)
        if foreign or merged:
            self._adopt(known, foreign, merged)

    def _adopt(self, known: set[str], foreign: list[Facts], merged: list[Facts]) -> None:
        """Adopt segments that the manifest does not know, each frame once: a merged one instead of its sources."""
        replaced = {name for one in merged for name in one.sources}
        if foreign:
            replaced |= {name for other in known for name in self._sources(other)}
        taken = [one for one in (*merged, *foreign) if one.name not in replaced]
        for one in (*merged, *foreign):
            if one.name in replaced:
                shutil.rmtree(self.folder / one.name, ignore_errors=True)

        def change(writer: sqlite3.Connection) -> None:
            for one in taken:
                ids = [
                    row[0]
                    for name in one.sources
                    for row in writer.execute("DELETE FROM segments WHERE name = ? RETURNING id", (name,)).fetchall()
                ]
                self.add(writer, [one])
                if ids:
                    writer.execute("UPDATE segments SET id = ? WHERE name = ?", (min(ids), one.name))

        self._journal.change(change).result()
        for name in replaced & known:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        _log.warning("%d segments that this history.db did not know are taken over", len(taken))

    def _sources(self, name: str) -> tuple[str, ...]:
        try:
            return msgspec.json.decode((self.folder / name / FACTS_FILE).read_bytes(), type=Facts).sources
        except (OSError, msgspec.MsgspecError):
            return ()  # broken segments are detected when they are read


def _listed(
    reader: sqlite3.Connection,
    kind: type[SegmentT],
    condition: str,
    nodes: Sequence[str],
    start_s: float,
    end_s: float,
) -> list[SegmentT]:
    """Return the manifest's segments of the condition that may hold frames of the nodes (any if empty) in the range."""
    rows = reader.execute(
        f"SELECT {', '.join(kind._fields)} FROM segments"  # noqa: S608 - our own fields and conditions
        f" WHERE last_s >= ? AND first_s <= ? AND {condition}",
        (start_s, end_s),
    )
    found = (kind(*row) for row in rows)
    wanted = sorted(nodes)
    return [one for one in found if not nodes or any_between(wanted, one.first_node, one.last_node)]
