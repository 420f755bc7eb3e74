"""The segments that there are: a manifest in the journal's file, a folder each, limits of age and size.

A segment counts once it is in the manifest. What lies in the folder and not there is what a crash left of a change that
was not made. What holds frames that this journal never had is taken over: a history.db that was lost, or restored from
a backup, costs only its own frames.
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
from eagle_eye.server.config import HistorySettings
from eagle_eye.server.history import Recorded, Run
from eagle_eye.server.journal import Journal
from eagle_eye.server.segments.facts import FACTS_FILE, FORMAT, PARTIAL, Facts, any_between

if TYPE_CHECKING:
    from eagle_eye.server.segments.reader import Segment

RAW_FOLDER = "raw"
SET_ASIDE_FOLDER = "set-aside"
RETIRE_BATCH = 100  # segments retired in one transaction

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Shelved(NamedTuple):
    """A segment of the manifest that may be read."""

    name: str
    first_node: str
    last_node: str
    first_s: float
    last_s: float
    frames: int


class Shelf:
    """The segments below ``folder``, named in the manifest of ``journal``."""

    def __init__(self, folder: Path, journal: Journal, settings: HistorySettings) -> None:
        self.folder = folder / RAW_FOLDER
        self._aside = folder / SET_ASIDE_FOLDER
        self._journal = journal
        self._settings = settings
        self._size = (0, 0)
        self.set_aside_total = 0
        self.dropped_by_retention = 0
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._sweep()
        self.measure()

    def size(self) -> tuple[int, int]:
        """Return how many segments there are, and their bytes, as last measured: it needs no disk."""
        return self._size

    def measure(self) -> None:
        """Have ``size`` tell what is in the manifest now. Raises HistoryUnavailable."""
        count, size = self._journal.reader.read("SELECT count(*), coalesce(sum(bytes), 0) FROM segments", ())[0]
        self._size = (count, size)

    @staticmethod
    def holding(reader: sqlite3.Connection, nodes: Sequence[str], start_s: float, end_s: float) -> list[Shelved]:
        """Return the segments that may hold frames of the nodes (any if empty) in the range."""
        rows = reader.execute(
            "SELECT name, first_node, last_node, first_s, last_s, frames FROM segments"
            " WHERE last_s >= ? AND first_s <= ? AND problem IS NULL",
            (start_s, end_s),
        )
        found = (Shelved(*row) for row in rows)
        wanted = sorted(nodes)
        return [one for one in found if not nodes or any_between(wanted, one.first_node, one.last_node)]

    def frames(self, one: Shelved, nodes: Sequence[str], start_s: float, end_s: float) -> Iterator[Recorded]:
        """Yield the segment's frames of the nodes (all if empty) in the range; what is broken is set aside."""
        return self._guarded(one, lambda segment: segment.frames(nodes, start_s, end_s))

    def runs(
        self, one: Shelved, metric: MetricSpec, nodes: Sequence[str], start_s: float, end_s: float, job: str | None
    ) -> Iterator[Run]:
        """Yield the segment's values of the metric, as History.runs does; what is broken is set aside."""
        return self._guarded(one, lambda segment: segment.runs(metric, nodes, start_s, end_s, job))

    def count(self, one: Shelved, nodes: Sequence[str], start_s: float, end_s: float) -> int:
        """Return how many frames ``frames`` would yield."""
        if not nodes and start_s <= one.first_s and one.last_s <= end_s:
            return one.frames
        return sum(self._guarded(one, lambda segment: iter([segment.count(nodes, start_s, end_s)])))

    @staticmethod
    def add(writer: sqlite3.Connection, facts: Sequence[Facts]) -> None:
        """Put segments that are on the disk into the manifest, within a transaction."""
        writer.executemany(
            "INSERT INTO segments (name, first_node, last_node, first_s, last_s, received_s, frames, bytes)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [(f.name, f.first_node, f.last_node, f.first_s, f.last_s, f.received_s, f.frames, f.bytes) for f in facts],
        )

    def retain(self, now_s: float) -> None:
        """Retire what is older or more than the settings allow, the oldest first. Raises HistoryUnavailable."""
        while True:
            gone = self._journal.change(lambda writer: self._retire(writer, now_s)).result()
            # Out of the manifest first: what is read next must not look for a folder that is half gone.
            for name, _ in gone:
                shutil.rmtree(self.folder / name, ignore_errors=True)
                shutil.rmtree(self._aside / name, ignore_errors=True)
            self.dropped_by_retention += sum(frames for _, frames in gone)
            if len(gone) < RETIRE_BATCH:
                break
        self.measure()

    def discard(self, facts: Sequence[Facts]) -> None:
        """Remove segments that did not come into the manifest."""
        for one in facts:
            shutil.rmtree(self.folder / one.name, ignore_errors=True)

    def _retire(self, writer: sqlite3.Connection, now_s: float) -> list[tuple[str, int]]:
        (size,) = writer.execute("SELECT coalesce(sum(bytes), 0) FROM segments").fetchone()
        surplus = size + self._journal.live_bytes(writer) - self._settings.retention_bytes
        gone: list[tuple[str, int]] = []
        oldest = writer.execute(
            "SELECT id, name, frames, bytes, received_s FROM segments ORDER BY received_s, id LIMIT ?", (RETIRE_BATCH,)
        ).fetchall()
        for id_, name, frames, bytes_, received_s in oldest:
            if surplus <= 0 and received_s >= now_s - self._settings.retention_s:
                break
            writer.execute("DELETE FROM segments WHERE id = ?", (id_,))
            surplus -= bytes_
            gone.append((name, frames))
        return gone

    def _guarded(self, one: Shelved, read: Callable[[Segment], Iterator[T]]) -> Iterator[T]:
        # Here, since whoever only takes frames needs no Parquet.
        from eagle_eye.server.segments.reader import BrokenSegment, Segment

        try:
            yield from read(Segment(self.folder / one.name))
        except BrokenSegment as error:
            self._set_aside(one, str(error))

    def _set_aside(self, one: Shelved, reason: str) -> None:
        """Have a broken segment read no more; it stays until retention takes it. One that was retired is no loss."""
        marked = self._journal.change(
            lambda writer: (
                writer.execute(
                    "UPDATE segments SET problem = ? WHERE name = ? AND problem IS NULL", (reason[:500], one.name)
                ).rowcount
            )
        ).result()
        if not marked:
            return
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

    def _sweep(self) -> None:
        """Remove what a crash left, and take over what another journal wrote."""
        journal_id, newest_chunk = self._journal.reader.read(
            "SELECT id, coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'chunks'), 0) FROM journal", ()
        )[0]
        known = {name for (name,) in self._journal.reader.read("SELECT name FROM segments", ())}
        foreign: list[Facts] = []
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
            if facts.journal == journal_id and facts.last_chunk <= newest_chunk:
                shutil.rmtree(path, ignore_errors=True)
            elif facts.format == FORMAT and facts.name == path.name:
                foreign.append(facts)
        if foreign:
            self._journal.change(lambda writer: self.add(writer, foreign)).result()
            _log.warning("%d segments that only another or a later history.db knew are taken over", len(foreign))
