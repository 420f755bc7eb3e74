"""Which windows hold something that is not downsampled yet, and when it is time for them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq

from eagle_eye.server.history.journal import Journal
from eagle_eye.server.history.segments.facts import shard_of
from eagle_eye.server.history.segments.layout import FRAMES_FILE
from eagle_eye.server.history.segments.level_table import Window, level_sources, lost, raw_sources, window
from eagle_eye.server.history.segments.levels import HOURS, LEVELS, MINUTES, Level
from eagle_eye.server.history.segments.planning import SourceSegment, WindowKey, windows_of
from eagle_eye.server.history.segments.reader import BrokenSegment, reading
from eagle_eye.server.history.segments.segment_store import SegmentStore
from eagle_eye.server.history.settings import HistorySettings

SETTLE_S = 300.0  # after a window's end and the time of two stretches of the journal: then its frames are in segments
AGAIN_S = 3_600.0  # a window is downsampled again, for what came late, at most so often
URGENT_S = 900.0  # before raw segments go by age, and
URGENT_SHARE = 0.9  # of retention_bytes: what they have is downsampled although its window is not over
WINDOWS_MAX = 2  # a segment over more windows than this has late frames, of few of them perhaps: it is looked up
LOOKED_UP_MAX = 10_000

_SOURCE = "id, name, first_s, last_s, received_s, frames, bytes"


class Due(NamedTuple):
    """A window that is to be downsampled: all sources, or those since ``before`` where that one ``adds`` them."""

    place: WindowKey
    before: Window | None
    through_id: int
    sources: tuple[str, ...]
    adds: bool
    anew_s: tuple[float, ...] = ()


class _Waiting(NamedTuple):
    """What a window waits for: the newest source's id, and when the oldest one's frames came; or all of it was lost."""

    id: int
    received_s: float
    lost: bool = False


class Backlog:
    """The windows that wait, found from the manifests. For one thread."""

    def __init__(self, journal: Journal, segment_store: SegmentStore, settings: HistorySettings) -> None:
        self._journal = journal
        self._shelf = segment_store
        self._settings = settings
        self._seen = dict.fromkeys((level.name for level in LEVELS), 0)
        self._waiting: dict[str, dict[WindowKey, _Waiting]] = {level.name: {} for level in LEVELS}
        self._looked_up: dict[str, tuple[float, ...]] = {}
        self._done_s: dict[tuple[str, WindowKey], float] = {}
        self.settle_s = SETTLE_S + 2 * settings.segment_s
        ((self.journal_id,),) = journal.reader.read("SELECT id FROM journal", ())

    def due(self, level: Level, now_s: float, monotonic_s: float) -> Iterator[Due]:
        """Yield the windows that are to be downsampled now, the oldest first. Raises HistoryUnavailable."""
        self._note(level, now_s)
        # Whoever waits for minutes is not made of hours that lack them.
        unfinished = {(place.shard, place.start_s // HOURS.window_s) for place in self._waiting[MINUTES.name]}
        urgent_s = self._urgent_s(now_s) if level is MINUTES else float("-inf")
        for place, waiting in sorted(self._waiting[level.name].items(), key=lambda item: (item[0].start_s, item[0])):
            over = now_s >= place.start_s + level.window_s + self.settle_s
            again = monotonic_s - self._done_s.get((level.name, place), float("-inf")) < AGAIN_S
            held = level is HOURS and (place.shard, place.start_s // HOURS.window_s) in unfinished
            if waiting.lost or waiting.received_s < urgent_s or (over and not again and not held):
                of = self._of_minutes if level is MINUTES else self._of_hours
                yield self._journal.reader.read_together(partial(of, place))

    def done(self, level: Level, due: Due, monotonic_s: float) -> None:
        """Note that the window has all sources that it was due for."""
        self._done_s = {key: at_s for key, at_s in self._done_s.items() if monotonic_s - at_s < AGAIN_S}
        self._done_s[level.name, due.place] = monotonic_s
        waiting = self._waiting[level.name].get(due.place)
        if waiting is not None and (waiting.id <= due.through_id or not due.sources):
            del self._waiting[level.name][due.place]

    def _note(self, level: Level, now_s: float) -> None:
        """Have the windows of sources wait that were not here when this was looked at last."""
        for broken in self._journal.reader.read_together(lambda reader: lost(reader, level)):
            place = WindowKey(broken.shard, broken.start_s)
            self._waiting[level.name][place] = _Waiting(broken.through_id, float("inf"), lost=True)
        columns = (
            f"SELECT {_SOURCE} FROM segments WHERE problem IS NULL AND id > ? ORDER BY id"  # noqa: S608
            if level is MINUTES
            else "SELECT id, name, start_s, start_s, 0.0, frames, bytes, shard FROM downsampled"
            " WHERE level = '1m' AND name IS NOT NULL AND id > ? ORDER BY id"
        )
        rows = self._journal.reader.read(columns, (self._seen[level.name],))
        if not rows:
            return
        sources = [SourceSegment(*row[:7]) for row in rows]
        found = [
            (source, WindowKey(shard_of(source.name), start_s))
            for source in sources
            for start_s in self._windows(level, source)
            if start_s + level.window_s >= self._shelf.levels.beginning_s(level, now_s)
        ]
        through = {
            WindowKey(shard, start_s): id_
            for shard, start_s, id_ in self._journal.reader.read(
                "SELECT shard, start_s, through_id FROM downsampled WHERE start_s >= ? AND level = ?",
                (min((place.start_s for _, place in found), default=now_s), level.name),
            )
        }
        waiting = self._waiting[level.name]
        for source, place in found:
            if source.id > through.get(place, 0):
                before = waiting.get(place, _Waiting(0, float("inf")))
                received_s = min(source.received_s, before.received_s)
                waiting[place] = _Waiting(max(source.id, before.id), received_s, before.lost)
        self._seen[level.name] = sources[-1].id

    def _windows(self, level: Level, source: SourceSegment) -> Iterable[float]:
        """Return where the windows begin that the source has frames in."""
        if (source.last_s - source.first_s) / level.window_s < WINDOWS_MAX:
            return windows_of(level, source.first_s, source.last_s)
        found = self._looked_up.get(source.name)
        if found is None:
            path = self._shelf.folder / source.name / FRAMES_FILE
            try:
                with reading(source.name):
                    times_s = pq.read_table(path, columns=["time"], use_threads=False)["time"].to_numpy()
            except BrokenSegment:
                return ()  # whoever reads it sets it aside
            found = tuple((np.unique(np.floor(times_s / level.window_s)) * level.window_s).tolist())
            if len(self._looked_up) >= LOOKED_UP_MAX:
                self._looked_up.clear()
            self._looked_up[source.name] = found
        return found

    def _urgent_s(self, now_s: float) -> float:
        """Return the time: what was received before it may go soon."""
        by_age_s = now_s - self._settings.retention_s + URGENT_S
        surplus = self._shelf.size()[1] - URGENT_SHARE * self._settings.retention_bytes
        if surplus <= 0:
            return by_age_s
        rows = self._journal.reader.read(
            "SELECT received_s FROM (SELECT received_s, sum(bytes) OVER (ORDER BY received_s, id) AS gone"
            " FROM segments ORDER BY received_s, id) WHERE gone >= ? LIMIT 1",
            (surplus,),
        )
        return max(by_age_s, rows[0][0]) if rows else by_age_s

    def _of_minutes(self, place: WindowKey, reader: sqlite3.Connection) -> Due:
        shard, start_s = place
        before = window(reader, MINUTES, shard, start_s)
        sources = raw_sources(reader, shard, start_s, start_s + MINUTES.window_s)
        through = max((id_ for id_, _ in sources), default=0)
        adds = before is not None and bool(before.partial)
        if adds and before is not None:
            # What was retired is not begun anew; what is only in part to be had is added to.
            sources = [one for one in sources if one[0] > before.through_id] if before.name is not None else []
        return Due(place, before, through, tuple(name for _, name in sources), adds)

    def _of_hours(self, place: WindowKey, reader: sqlite3.Connection) -> Due:
        shard, start_s = place
        before = window(reader, HOURS, shard, start_s)
        sources = level_sources(reader, shard, start_s, start_s + HOURS.window_s)
        through = max((one.id for one in sources), default=0)
        # An hour is made of one window of minutes, so what is new of it takes the place of what was.
        adds = before is not None and before.name is not None
        if adds and before is not None:
            sources = [one for one in sources if one.id > before.through_id]
        named = [one for one in sources if one.name is not None]
        return Due(
            place,
            before,
            through,
            tuple(one.name for one in named if one.name is not None),
            adds,
            tuple(one.start_s for one in named),
        )
