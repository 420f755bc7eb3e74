"""Chooses a query's sources: minutes where the step allows them or nothing finer is left, else frames. Pure.

Then: which parts of its range cannot be read, because a damaged segment was set aside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from eagle_eye.server.history.history import QueryPart, UnreadableRange
from eagle_eye.server.history.segment_store import LevelRow, SetAsideSegment
from eagle_eye.server.history.segment_tables import BUCKET_S, HOUR_S, HOURS_FOLDER, MINUTE_S, MINUTES_FOLDER, shard_of

BUCKETS_PER_FRAME = 10  # a frame is decoded whole, but only some columns of one metric of a bucket


class Cover(NamedTuple):
    """A time range, ``start_s`` to before ``end_s``, in which the raw segments with these ids are not read."""

    start_s: float
    end_s: float
    from_id: int
    through_id: int


class Piece(NamedTuple):
    """A downsampled segment to read, limited to buckets that begin from ``start_s`` to before ``end_s``."""

    stored: LevelRow
    start_s: float
    end_s: float

    def frames(self, nodes: Sequence[str]) -> int:
        """Return the cost of its buckets of the nodes (all if empty) as an approximate number of frames."""
        length_s = self.end_s - self.start_s
        buckets = self.stored.frames * length_s / (self.stored.end_s - self.stored.start_s)
        if nodes:
            buckets = min(buckets, len(nodes) * length_s / BUCKET_S[self.stored.level])
        return math.ceil(buckets / BUCKETS_PER_FRAME)


class SegmentChoice(NamedTuple):
    """The pieces to read, the ranges of raw segments that they replace, by group, and the resolutions."""

    pieces: list[Piece]
    covers: dict[int, list[Cover]]
    spans: list[QueryPart]


def choose(rows: Iterable[LevelRow], step_s: float, start_s: float, end_s: float) -> SegmentChoice:
    """Return what answers a query with this step. Only whole buckets within the range are read."""
    readable = sorted((one for one in rows if one.problem is None), key=lambda one: (one.start_s, one.id))
    minutes = [one for one in readable if one.level == MINUTES_FOLDER]
    answering = [(one, one.start_s, one.end_s) for one in minutes if one.alone or step_s >= MINUTE_S]
    for one in readable:
        if one.level != MINUTES_FOLDER:  # of an earlier version: used where its minutes are gone
            answering += [(one, low_s, high_s) for low_s, high_s in _hours(one, minutes)]
    covers: dict[int, list[Cover]] = {}
    windows: dict[int, list[Cover]] = {}
    for one, low_s, high_s in answering:
        cover = Cover(low_s, high_s, one.from_id, one.through_id)
        covers.setdefault(one.shard, []).append(cover)
        if one.of_window:
            windows.setdefault(one.shard, []).append(cover)
    pieces: list[Piece] = []
    coarsest: dict[float, int] = {}
    for one, first_s, last_s in sorted(answering, key=lambda each: each[1]):
        bucket_s = BUCKET_S[one.level]
        low_s, high_s = max(first_s, -(-start_s // bucket_s) * bucket_s), min(last_s, end_s // bucket_s * bucket_s)
        # After a downgrade, the older version may have made an hour of what has its own minutes.
        others = () if one.of_window else windows.get(one.shard, ())
        for begin_s, until_s in left_of(low_s, np.nextafter(high_s, 0.0), one.through_id, others):
            pieces.append(Piece(one, begin_s, math.ceil(until_s)))
        for hour_s in range(int(first_s // HOUR_S * HOUR_S), int(last_s), HOUR_S):
            coarsest[hour_s] = max(coarsest.get(hour_s, 0), bucket_s)
    return SegmentChoice(_joined(pieces), covers, _spans(coarsest, start_s, end_s))


def left_of(first_s: float, last_s: float, id_: int, covers: Iterable[Cover]) -> list[tuple[float, float]]:
    """Return the parts of a raw segment's range, ends included, that no cover replaces."""
    left = []
    for start_s, end_s, from_id, through_id in sorted(covers):
        if from_id <= id_ <= through_id and start_s <= last_s and end_s > first_s:
            if first_s < start_s:
                left.append((first_s, float(np.nextafter(start_s, 0.0))))
            first_s = end_s
    if first_s <= last_s:
        left.append((first_s, last_s))
    return left


def _hours(stored: LevelRow, minutes: Iterable[LevelRow]) -> Iterator[tuple[float, float]]:
    """Yield the hours of this segment for which no minutes are left."""
    finer = [one for one in minutes if one.shard == stored.shard and one.through_id <= stored.through_id]
    for begin_s in range(int(stored.start_s), int(stored.end_s), HOUR_S):
        if not any(one.start_s < begin_s + HOUR_S and one.end_s > begin_s for one in finer):
            yield begin_s, begin_s + HOUR_S


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces with adjacent ones of the same segment merged."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].stored is piece.stored and joined[-1].end_s == piece.start_s:
            joined[-1] = joined[-1]._replace(end_s=piece.end_s)
        else:
            joined.append(piece)
    return joined


def _spans(coarsest: dict[float, int], start_s: float, end_s: float) -> list[QueryPart]:
    """Return the resolution of each hour of the range, with equal neighbours merged."""
    spans: list[QueryPart] = []

    def add(low_s: float, high_s: float, bucket_s: int) -> None:
        if spans and spans[-1].bucket_s == bucket_s:
            spans[-1] = spans[-1]._replace(end_s=high_s)
        elif low_s < high_s or not spans:
            spans.append(QueryPart(low_s, high_s, bucket_s))

    at_s = start_s
    for begin_s, bucket_s in sorted(coarsest.items()):
        if begin_s > end_s or begin_s + HOUR_S <= start_s:
            continue
        if begin_s > at_s:
            add(at_s, begin_s, 0)
        at_s = min(begin_s + HOUR_S, end_s)
        add(max(begin_s, start_s), at_s, bucket_s)
    if at_s < end_s or not spans:
        add(at_s, end_s, 0)
    return spans


GAPS_MAX = 50  # in an answer; beyond this, the last one covers the rest


def gaps(
    raw: Iterable[SetAsideSegment], rows: Iterable[LevelRow], start_s: float, end_s: float
) -> list[UnreadableRange]:
    """Return the gaps in the range, in order and disjoint; ``rows`` are those that may answer in place of frames."""
    found: list[UnreadableRange] = []
    levels = list(rows)
    for one in raw:
        # Minutes made while it was readable include its data; those made since do not.
        having = _covers_of_shard([row for row in levels if row.alone and row.problem is None], shard_of(one.name))
        who = f"{one.frames} frames of {one.first_node} to {one.last_node}"
        problem = f"segment {one.name} is damaged and set aside, with {who}: {one.problem}"
        found += [
            UnreadableRange(low_s, high_s, problem)
            for low_s, high_s in left_of(one.first_s, one.last_s, one.id, having)
        ]
    for row in levels:
        if row.problem is not None:
            hours = [other for other in levels if other.level == HOURS_FOLDER and other.problem is None]
            problem = f"a segment of level {row.level} is damaged and set aside: {row.first_node} to {row.last_node}"
            parts = left_of(row.start_s, row.end_s, row.through_id, _covers_of_shard(hours, row.shard))
            found += [UnreadableRange(low_s, high_s, problem) for low_s, high_s in parts]
    clipped = (UnreadableRange(max(one.start_s, start_s), min(one.end_s, end_s), one.problem) for one in found)
    return _apart([one for one in clipped if one.start_s <= one.end_s])


def _covers_of_shard(rows: Iterable[LevelRow], shard: int) -> list[Cover]:
    return [Cover(one.start_s, one.end_s, one.from_id, one.through_id) for one in rows if one.shard == shard]


def _apart(found: list[UnreadableRange]) -> list[UnreadableRange]:
    apart: list[UnreadableRange] = []
    for gap in sorted(found):
        if apart and (gap.start_s <= apart[-1].end_s or len(apart) == GAPS_MAX):
            last = apart[-1]
            more = last.problem if gap.problem in last.problem else f"{last.problem}; {gap.problem}"[:2_000]
            apart[-1] = UnreadableRange(last.start_s, max(last.end_s, gap.end_s), more)
        else:
            apart.append(gap)
    return apart
