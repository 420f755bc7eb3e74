"""Which parts of a range cannot be read, since what held them was found damaged and set aside. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from eagle_eye.server.history.history import Gap
from eagle_eye.server.history.segments.facts import shard_of
from eagle_eye.server.history.segments.level_table import Window
from eagle_eye.server.history.segments.levels import HOURS, LEVEL_OF_NAME, MINUTES
from eagle_eye.server.history.segments.resolution import left_of

GAPS_MAX = 50  # in an answer; the last of more covers the rest
_HOUR_S = MINUTES.window_s


class Broken(NamedTuple):
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
    raw: Iterable[Broken],
    windows: Iterable[Window],
    held: Iterable[tuple[int, float, float]],
    start_s: float,
    end_s: float,
) -> list[Gap]:
    """Return the gaps in the range, in order and apart.

    ``windows`` are those that may answer in the place of frames; ``held`` are the raw segments that can be read: their
    group of nodes, first and last time.
    """
    rows = list(windows)
    found = [
        *_of_frames(raw, rows, start_s, end_s),
        *_of_windows([one for one in rows if one.lost and one.name is None], rows, list(held)),
    ]
    clipped = (Gap(max(one.start_s, start_s), min(one.end_s, end_s), one.problem) for one in found)
    return _apart([one for one in clipped if one.start_s <= one.end_s])


def _of_frames(raw: Iterable[Broken], windows: Sequence[Window], start_s: float, end_s: float) -> Iterator[Gap]:
    for one in raw:
        # Minutes that were made while it could be read have what it held; those made since do not.
        having = [
            (row.start_s, row.through_id)
            for row in windows
            if row.level == MINUTES.name and row.shard == shard_of(one.name) and row.name is not None and row.partial
        ]
        who = f"{one.frames} frames of {one.first_node} to {one.last_node}"
        problem = f"segment {one.name} is damaged and set aside, with {who}: {one.problem}"
        for low_s, high_s in left_of(max(one.first_s, start_s), min(one.last_s, end_s), one.id, having):
            yield Gap(low_s, high_s, problem)


def _of_windows(
    lost: Iterable[Window], windows: Sequence[Window], held: Sequence[tuple[int, float, float]]
) -> Iterator[Gap]:
    """Yield the hours of lost windows that neither another level nor frames answer for."""
    others = [one for one in windows if one.name is not None]
    for one in lost:
        bucket_s = LEVEL_OF_NAME[one.level].bucket_s
        for at in range(int((one.end_s - one.start_s) // _HOUR_S)):
            hour_s = one.start_s + at * _HOUR_S
            held_it = any(one.has(begin_s) for begin_s in range(int(hour_s), int(hour_s + _HOUR_S), bucket_s))
            levels = any(other.shard == one.shard and _answers(other, hour_s) for other in others)
            frames = any(
                shard == one.shard and low_s < hour_s + _HOUR_S and high_s >= hour_s for shard, low_s, high_s in held
            )
            if held_it and not levels and not frames:
                who = f"{one.first_node} to {one.last_node}"
                yield Gap(hour_s, hour_s + _HOUR_S, f"a segment of level {one.level} is damaged and set aside: {who}")


def _answers(window: Window, hour_s: float) -> bool:
    return window.start_s <= hour_s < window.end_s and (window.level != HOURS.name or window.has(hour_s))


def _apart(found: list[Gap]) -> list[Gap]:
    apart: list[Gap] = []
    for gap in sorted(found):
        if apart and (gap.start_s <= apart[-1].end_s or len(apart) == GAPS_MAX):
            last = apart[-1]
            more = last.problem if gap.problem in last.problem else f"{last.problem}; {gap.problem}"[:2_000]
            apart[-1] = Gap(last.start_s, max(last.end_s, gap.end_s), more)
        else:
            apart.append(gap)
    return apart
