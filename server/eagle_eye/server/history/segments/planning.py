"""The windows that a segment has frames in. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from eagle_eye.server.history.segments.levels import Level


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
