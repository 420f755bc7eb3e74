"""Finds the parts of a query's range that cannot be read because a damaged segment was set aside. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from eagle_eye.server.history.history import UnreadableRange
from eagle_eye.server.history.segments.facts import HOURS_FOLDER, shard_of
from eagle_eye.server.history.segments.level_table import LevelRow
from eagle_eye.server.history.segments.resolution import Cover, left_of

GAPS_MAX = 50  # in an answer; beyond this, the last one covers the rest


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


def gaps(
    raw: Iterable[SetAsideSegment], rows: Iterable[LevelRow], start_s: float, end_s: float
) -> list[UnreadableRange]:
    """Return the gaps in the range, in order and disjoint; ``rows`` are those that may answer in place of frames."""
    found: list[UnreadableRange] = []
    levels = list(rows)
    for one in raw:
        # Minutes made while it was readable include its data; those made since do not.
        having = _covers([row for row in levels if row.alone and row.problem is None], shard_of(one.name))
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
            parts = left_of(row.start_s, row.end_s, row.through_id, _covers(hours, row.shard))
            found += [UnreadableRange(low_s, high_s, problem) for low_s, high_s in parts]
    clipped = (UnreadableRange(max(one.start_s, start_s), min(one.end_s, end_s), one.problem) for one in found)
    return _apart([one for one in clipped if one.start_s <= one.end_s])


def _covers(rows: Iterable[LevelRow], shard: int) -> list[Cover]:
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
