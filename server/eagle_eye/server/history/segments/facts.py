"""Metadata of segments beside their tables; readable without the Parquet library."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import msgspec

FORMAT = "eagle-eye-segment/1"
MINUTES_FORMAT = "eagle-eye-minutes/1"
WINDOW_FORMAT = "eagle-eye-downsampled/1"  # of earlier versions: an hour of minutes, a day of hours
FACTS_FILE = "segment.json"
RAW_FOLDER = "raw"
MINUTES_FOLDER, HOURS_FOLDER = "1m", "1h"
MINUTE_S, HOUR_S = 60, 3_600
BUCKET_S = {MINUTES_FOLDER: MINUTE_S, HOURS_FOLDER: HOUR_S}  # of the levels
STRETCH_BYTES_MAX = 128 << 20  # of encoded frames that are sorted in memory at once and become one segment
PARTIAL = ".partial-"  # name prefix of a folder that is still being written

Step = Callable[[str], None]


def no_step(_name: str) -> None:
    """Do nothing between two steps; a test may end the process there."""


def shard_of(name: str) -> int:
    """Return the node group of a segment of this name; -1 where the name does not say."""
    parts = name.split("-")
    return int(parts[-2]) if len(parts) > 2 and parts[-2].isdecimal() else -1


def any_between(names: Sequence[str], first: str, last: str) -> bool:
    """Return whether any of the sorted names is between ``first`` and ``last``, inclusive."""
    place = bisect_left(names, first)
    return place < len(names) and names[place] <= last


class Facts(msgspec.Struct, frozen=True):
    """``segment.json``, and the segment's row in the manifest. Times are corrected Unix seconds.

    ``journal`` names the journal that the frames came from: chunks ``first_chunk`` to ``last_chunk`` of ``shard``.
    ``received_s`` is when the last of them arrived, ``bytes`` the size of the tables. ``sources`` are the segments that
    it was merged from.
    """

    name: str
    journal: str
    shard: int
    first_chunk: int
    last_chunk: int
    late: bool
    first_node: str
    last_node: str
    first_s: float
    last_s: float
    received_s: float
    frames: int
    bytes: int
    format: str = FORMAT
    sources: tuple[str, ...] = ()


class MinutesFacts(msgspec.Struct, frozen=True):
    """``segment.json`` of the minutes of the raw segment of this name; of earlier versions, of an hour or a day.

    ``start_s`` and ``end_s`` are where its first bucket begins and its last one ends. ``frames`` counts the node
    buckets, ``rows`` those of the table, ``bytes`` its size. The journal is the one whose frames it summarizes.
    """

    name: str
    journal: str
    shard: int
    first_node: str
    last_node: str
    start_s: float
    end_s: float
    frames: int
    rows: int
    bytes: int
    last_chunk: int = 0
    level: str = MINUTES_FOLDER
    format: str = MINUTES_FORMAT


class Sealed(msgspec.Struct, frozen=True):
    """The compactor's report on a stretch: the chunks of ``shard`` up to ``through`` are on disk in ``segments``.

    ``minutes`` are those of these segments.
    """

    shard: int
    through: int
    segments: list[Facts]
    minutes: list[MinutesFacts] = []


class Remade(msgspec.Struct, frozen=True):
    """The report on a raw segment without minutes: they are on disk now, or (None) the segment is broken."""

    name: str
    minutes: MinutesFacts | None
    reason: str = ""
