"""The downsampled segments that there are: a table in the journal's file, a folder each, limits of age and size."""

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
from eagle_eye.server.history.segments.facts import DOWNSAMPLED_FORMAT, FACTS_FILE, PARTIAL, RAW_FOLDER
from eagle_eye.server.history.segments.level_table import Window
from eagle_eye.server.history.segments.levels import HOURS, LEVEL_OF_NAME, LEVELS, MINUTES, Level, LevelFacts
from eagle_eye.server.history.segments.replaced_folders import Leaving
from eagle_eye.server.history.settings import HistorySettings
from eagle_eye.server.model.errors import HistoryMoved

RETENTION_S = 60.0  # how often old segments are looked for
RETIRE_BATCH = 100  # segments retired in one transaction

_log = logging.getLogger(__name__)


class LevelSize(NamedTuple):
    """How much there is of one level."""

    segments: int
    bytes: int
    oldest_s: float | None  # where the oldest begins; None: there is none


class LevelStore:
    """The downsampled segments below ``folder``, a folder for each level."""

    def __init__(
        self, folder: Path, aside: Path, journal: Journal, settings: HistorySettings, leaving: Leaving
    ) -> None:
        self._folder = folder
        self._aside = aside
        self._journal = journal
        self._leaving = leaving
        self._retention_s = {MINUTES.name: settings.minutes_retention_s, HOURS.name: settings.hours_retention_s}
        self._bytes_max = {MINUTES.name: settings.minutes_retention_bytes, HOURS.name: settings.hours_retention_bytes}
        self._kept: dict[str, LevelSize] = {}
        self._retained_s = float("-inf")
        self.set_aside_total = 0
        for level in LEVELS:
            self.folder(level).mkdir(parents=True, exist_ok=True, mode=0o700)
        journal.change(lambda writer: [writer.execute(statement) for statement in (table.TABLE, table.INDEX)]).result()
        self._sweep()
        self.measure()

    def folder(self, level: Level) -> Path:
        """Return where the level's segments are."""
        return self._folder / level.name

    def kept(self) -> dict[str, LevelSize]:
        """Return how much there is of each level, as last measured: it needs no disk."""
        return self._kept

    def measure(self) -> None:
        """Have ``kept`` tell what is in the table now. Raises HistoryUnavailable."""
        rows = self._journal.reader.read(
            "SELECT level, count(*), sum(bytes), min(start_s) FROM downsampled WHERE name IS NOT NULL GROUP BY level",
            (),
        )
        found = {level: LevelSize(*row) for level, *row in rows}
        self._kept = {level.name: found.get(level.name, LevelSize(0, 0, None)) for level in LEVELS}

    def beginning_s(self, level: Level, now_s: float) -> float:
        """Return how far back the level is kept: what is older is not downsampled any more."""
        return now_s - self._retention_s[level.name]

    def courses(
        self, window: Window, metric: MetricSpec, nodes: Sequence[str], start_s: float, end_s: float, job: str | None
    ) -> Iterator[BucketSeries]:
        """Yield the segment's buckets that begin in ``start_s`` to before ``end_s``; what is broken is set aside.

        Raises HistoryMoved then, and HistoryUnavailable where it was removed although somebody still read.
        """
        # Here, since whoever only takes frames needs no Parquet.
        from eagle_eye.server.history.segments.reader import BrokenSegment
        from eagle_eye.server.history.segments.series import courses

        level, name = LEVEL_OF_NAME[window.level], window.name
        assert name is not None  # noqa: S101 - the query chose a window that has a segment
        try:
            yield from courses(self.folder(level) / name, metric, nodes, start_s, end_s, job)
        except BrokenSegment as error:
            if not self.set_aside(level, name, str(error)):
                self._leaving.check(name)
            raise HistoryMoved(f"{level.name}/{name} was found broken; ask again: what is left answers then") from error

    def put(
        self,
        level: Level,
        shard: int,
        start_s: float,
        through_id: int,
        before: Window | None,
        facts: LevelFacts | None,
    ) -> bool:
        """Put a window's new segment (None: it has no rows) in the place of the one before, and return whether.

        It is not done where that one went meanwhile. Raises HistoryUnavailable.
        """

        def change(writer: sqlite3.Connection) -> bool:
            now = table.window(writer, level, shard, start_s)
            if (now and now.id) != (before and before.id):
                return False
            in_part = now.partial if now else 0  # its sources may have gone while they were read
            adopted = bool(now and now.adopted)
            writer.execute("DELETE FROM downsampled WHERE id = ?", (now.id if now else -1,))
            table.insert(writer, level.name, shard, start_s, through_id, in_part, facts, adopted)
            return True

        done: bool = self._journal.change(change).result()
        gone = before.name if done and before else (facts.name if facts and not done else None)
        if gone is not None:
            self._leaving.remove(self.folder(level) / gone)
        return done

    def retain(self, now_s: float) -> None:
        """Retire what is older or more than the settings allow, the oldest first. Raises HistoryUnavailable.

        It looks once a minute at most.
        """
        if abs(now_s - self._retained_s) < RETENTION_S:
            return
        self._retained_s = now_s
        for level in LEVELS:
            while True:
                gone = self._journal.change(partial(self._retire, level, now_s)).result()
                for name in gone:
                    self._leaving.remove(self.folder(level) / name)
                if len(gone) < RETIRE_BATCH:
                    break
            self._retain_aside(level, now_s)
        self._journal.change(table.forget_nodes).result()
        self.measure()

    def set_aside(self, level: Level, name: str, reason: str) -> bool:
        """Have a broken segment read no more; return whether there is one of this name.

        Its window is then due again.
        """

        def change(writer: sqlite3.Connection) -> Window | None:
            row = writer.execute(f"SELECT {table.COLUMNS} FROM downsampled WHERE name = ?", (name,)).fetchone()  # noqa: S608
            if row is None:
                return None
            window = Window(*row)
            # Minutes whose frames are gone in part would be made of the rest, and the hours that know better of them.
            again = level is HOURS or not window.partial
            lost = 1 if again else -1
            writer.execute("UPDATE downsampled SET name = NULL, bytes = 0, lost = ? WHERE id = ?", (lost, window.id))
            return window

        window = self._journal.change(change).result()
        if window is None:
            return False
        self.set_aside_total += 1
        self.measure()
        self._aside.mkdir(exist_ok=True, mode=0o700)
        try:
            (self.folder(level) / name).rename(self._aside / f"{level.name}-{name}")
        except OSError as error:
            reason = f"{reason}; and it cannot be moved: {error}"
        _log.error(
            "the downsampled segment %s of %s to %s is broken and set aside in %s; %s: %s",
            f"{level.name}/{name}",
            window.first_node,
            window.last_node,
            self._aside,
            "it is made anew" if level is HOURS or not window.partial else "frames of it are gone, so it stays so",
            reason,
        )
        return True

    def _retire(self, level: Level, now_s: float, writer: sqlite3.Connection) -> list[str]:
        (size,) = writer.execute(
            "SELECT coalesce(sum(bytes), 0) FROM downsampled WHERE level = ?", (level.name,)
        ).fetchone()
        surplus = size - self._bytes_max[level.name]
        before_s = self.beginning_s(level, now_s)
        gone: list[str] = []
        for id_, shard, start_s, end_s, name, bytes_ in writer.execute(
            "SELECT id, shard, start_s, end_s, name, bytes FROM downsampled WHERE level = ? AND name IS NOT NULL"
            " ORDER BY start_s, id LIMIT ?",
            (level.name, RETIRE_BATCH),
        ).fetchall():
            if surplus <= 0 and end_s >= before_s:
                break
            writer.execute("UPDATE downsampled SET name = NULL, bytes = 0 WHERE id = ?", (id_,))
            if level is MINUTES:
                table.note_gone(writer, HOURS, shard, id_, start_s, end_s - 1)
            surplus -= bytes_
            gone.append(name)
        # A row without a segment is needed as long as anything may be downsampled into it again.
        writer.execute(
            "DELETE FROM downsampled WHERE level = ? AND name IS NULL AND end_s < ?"
            " AND end_s < (SELECT coalesce(min(first_s), 9e18) FROM segments)",
            (level.name, before_s),
        )
        return gone

    def _retain_aside(self, level: Level, now_s: float) -> None:
        for path in self._aside.glob(f"{level.name}-*"):
            start = path.name.removeprefix(f"{level.name}-").split("-")[0]
            if start.isdigit() and int(start) + level.window_s < self.beginning_s(level, now_s):
                shutil.rmtree(path, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove what a crash left, and take over what only another history.db knew."""
        known = {name for (name,) in self._journal.reader.read("SELECT name FROM downsampled", ())}
        foreign: list[LevelFacts] = []
        for level in LEVELS:
            for path in sorted(self.folder(level).iterdir()):
                if path.name in known:
                    continue
                if path.name.startswith(PARTIAL):
                    shutil.rmtree(path, ignore_errors=True)
                    continue
                try:
                    facts = msgspec.json.decode((path / FACTS_FILE).read_bytes(), type=LevelFacts)
                except (OSError, msgspec.MsgspecError) as error:
                    _log.warning("%s is no segment of the history and is left alone: %s", path, error)
                    continue
                if (facts.format, facts.name, facts.level) == (DOWNSAMPLED_FORMAT, path.name, level.name):
                    foreign.append(facts)
        taken = self._journal.change(lambda writer: self._adopt(writer, foreign)).result() if foreign else []
        for facts in foreign:
            if facts.name not in taken:
                shutil.rmtree(self.folder(LEVEL_OF_NAME[facts.level]) / facts.name, ignore_errors=True)
        if taken:
            _log.warning("%d downsampled segments that only another history.db knew are taken over", len(taken))

    def _adopt(self, writer: sqlite3.Connection, foreign: Sequence[LevelFacts]) -> list[str]:
        """Take over the segments of windows whose own are not on the disk; return their names.

        What a crash left is not: its window's segment is there, or is made anew of sources that are.
        """
        taken = []
        for facts in foreign:
            level = LEVEL_OF_NAME[facts.level]
            own = table.window(writer, level, facts.shard, facts.start_s)
            if own is not None and own.name is not None and (self.folder(level) / own.name).is_dir():
                continue
            if own is None and self._can_be_made(writer, facts):
                continue
            through = table.newest(writer, facts.level)
            writer.execute("DELETE FROM downsampled WHERE id = ?", (own.id if own is not None else -1,))
            table.insert(writer, level.name, facts.shard, facts.start_s, through, 1, facts, adopted=True)
            taken.append(facts.name)
        return taken

    def _can_be_made(self, writer: sqlite3.Connection, facts: LevelFacts) -> bool:
        """Return whether the segment is of this history.db and what it was made of is all there still."""
        (journal,) = writer.execute("SELECT id FROM journal").fetchone()
        if facts.journal != journal:
            return False
        if facts.level == MINUTES.name:
            names = [name for _, name in table.raw_sources(writer, facts.shard, facts.start_s, facts.end_s)]
            folder = self._folder / RAW_FOLDER
        else:
            names = [
                one.name for one in table.level_sources(writer, facts.shard, facts.start_s, facts.end_s) if one.name
            ]
            folder = self.folder(MINUTES)
        return bool(names) and all((folder / name).is_dir() for name in names)
