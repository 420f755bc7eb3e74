"""The store of minutes, and of hours of earlier versions: a table in the journal's file and a folder each."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from eagle_eye.schema.metrics import MetricSpec
from eagle_eye.server.history.journal import Journal
from eagle_eye.server.history.segments import level_table as table
from eagle_eye.server.history.segments.downsampling import BucketSeries
from eagle_eye.server.history.segments.facts import (
    BUCKET_S,
    FACTS_FILE,
    HOURS_FOLDER,
    MINUTES_FOLDER,
    MINUTES_FORMAT,
    PARTIAL,
    WINDOW_FORMAT,
    MinutesFacts,
    Remade,
    shard_of,
)
from eagle_eye.server.history.segments.level_table import LevelRow
from eagle_eye.server.history.segments.replaced_folders import FolderRemoval
from eagle_eye.server.history.settings import HistorySettings
from eagle_eye.server.model.errors import HistoryMoved

RETENTION_S = 60.0  # how often to look for old segments
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
        journal.change(table.move).result()
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
        names = self._journal.reader.read_together(lambda reader: table.without_minutes(reader, since_s))
        self._wanting = bool(names)
        return names

    def put(self, remade: Remade) -> None:
        """Add the minutes of a raw segment to the table, unless the segment was retired meanwhile."""
        if remade.minutes is None:
            return
        facts = remade.minutes
        left = self._journal.change(lambda writer: table.add(writer, [facts])).result()
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
        from eagle_eye.server.history.segments.level_reader import courses
        from eagle_eye.server.history.segments.reader import BrokenSegment

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
        if abs(now_s - self._retained_s) < RETENTION_S:
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
        self._journal.change(table.forget_nodes).result()
        self.measure()

    def set_aside(self, level: str, name: str, reason: str) -> bool:
        """Stop reading a broken segment; return whether there is one of this name.

        If all raw segments that it summarizes still exist, they answer instead, and its minutes are built again.
        """

        def change(writer: sqlite3.Connection) -> LevelRow | None:
            stored = table.named(writer, level, name)
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
                if table.add(writer, [facts]):  # its raw segment is not here
                    if facts.journal == journal and facts.last_chunk <= highest.get("chunks", 0):
                        continue
                    table.insert(writer, facts, (-1, -1), alone=True, adopted=True)
            else:
                own = "SELECT name FROM segments WHERE last_s >= ? AND first_s < ? AND problem IS NULL"
                raw = [name for (name,) in writer.execute(own, (facts.start_s, facts.end_s))]
                if facts.journal == journal and any(shard_of(name) == facts.shard for name in raw):
                    continue
                table.insert(writer, facts, (0, highest.get("segments", 0)), alone=True, adopted=True)
            taken.append(facts)
        return taken
