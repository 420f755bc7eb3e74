"""What is due: windows to be downsampled, small segments to be merged. Pure: what there is goes in, tasks come out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from eagle_eye.server.history.segments.facts import shard_of
from eagle_eye.server.history.segments.levels import Level

DAY_S = 86_400
MERGE_BYTES_MAX = 32 << 20  # of the segments that become one
MERGE_FRAMES_MAX = 100_000
MERGE_COUNT_MAX = 64
MERGE_COUNT = 12  # so many are merged before their day is over; then, two


class SourceSegment(NamedTuple):
    """A segment that something may be made of; times are corrected Unix seconds."""

    id: int
    name: str
    first_s: float
    last_s: float
    received_s: float
    frames: int
    bytes: int


class WindowKey(NamedTuple):
    """A window of a group of nodes."""

    shard: int
    start_s: float


def windows_of(level: Level, first_s: float, last_s: float) -> Iterator[float]:
    """Yield where the level's windows begin that the range, ends included, lies in."""
    start_s = first_s // level.window_s * level.window_s
    while start_s <= last_s:
        yield start_s
        start_s += level.window_s


def merges(
    segments: Iterable[SourceSegment], small_bytes: int, settle_s: float, now_s: float
) -> Iterator[tuple[SourceSegment, ...]]:
    """Yield the small segments that are to become one: of one group of nodes and one day (UTC).

    While a day is not over, they wait until they are MERGE_COUNT.
    """

    def place(one: SourceSegment) -> tuple[int, float]:
        return shard_of(one.name), one.first_s // DAY_S

    small = [one for one in segments if one.bytes < small_bytes]
    for (_, day), group in groupby(sorted(small, key=lambda one: (*place(one), one.first_s, one.id)), key=place):
        over = now_s >= (day + 1) * DAY_S + settle_s
        for batch in _batches(group):
            # Those that grow are merged again when they have doubled: each frame is written a few times, not for ever.
            doubled = sum(one.bytes for one in batch) >= 2 * max(one.bytes for one in batch)
            if len(batch) >= (2 if over else MERGE_COUNT) and (over or doubled):
                yield tuple(batch)


def _batches(segments: Iterable[SourceSegment]) -> Iterator[list[SourceSegment]]:
    batch: list[SourceSegment] = []
    for one in segments:
        size = sum(other.bytes for other in batch) + one.bytes
        frames = sum(other.frames for other in batch) + one.frames
        if batch and (size > MERGE_BYTES_MAX or frames > MERGE_FRAMES_MAX or len(batch) >= MERGE_COUNT_MAX):
            yield batch
            batch = []
        batch.append(one)
    if batch:
        yield batch
