"""The segment store: a manifest in the journal's file, a folder per segment, limits of age and size.

A segment counts once it is in the manifest. Folders that are not in it remain from a change that a crash interrupted.
Folders with frames that this journal never had are adopted: a history.db that was lost, or restored from a backup,
costs only its own frames.
"""

from __future__ import annotations

import logging
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from eagle_eye.schema.metrics import MetricSpec
from eagle_eye.server.history.history import RankReport, Recorded, Run
from eagle_eye.server.history.journal import Journal
from eagle_eye.server.history.journal_schema import live_bytes
from eagle_eye.server.history.segments import level_table
from eagle_eye.server.history.segments.facts import (
    FACTS_FILE,
    FORMAT,
    PARTIAL,
    RAW_FOLDER,
    Facts,
    MinutesFacts,
    any_between,
)
from eagle_eye.server.history.segments.gaps import SetAsideSegment
from eagle_eye.server.history.segments.level_store import LevelSize, LevelStore
from eagle_eye.server.history.segments.replaced_folders import FolderRemoval
from eagle_eye.server.history.settings import HistorySettings

if TYPE_CHECKING:
    from eagle_eye.server.history.segments.reader import Segment

SET_ASIDE_FOLDER = "set-aside"
RETIRE_BATCH = 100  # segments retired in one transaction

T = TypeVar("T")
_log = logging.getLogger(__name__)


class SegmentEntry(NamedTuple):
    """A readable segment of the manifest."""

    id: int
    name: str
    first_node: str
    last_node: str
    first_s: float
    last_s: float
    frames: int


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
        level_table.add(writer, minutes)

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
            downsampled = level_table.note_gone(writer, name, id_, first_s, last_s)
            gone.append((name, frames, downsampled or problem is not None))
        return gone

    def _guarded(self, one: SegmentEntry, read: Callable[[Segment], Iterator[T]]) -> Iterator[T]:
        # imported here: ingestion alone needs no Parquet
        from eagle_eye.server.history.segments.reader import BrokenSegment, Segment

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
            level_table.note_gone(writer, name, one.id, one.first_s, one.last_s)
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
