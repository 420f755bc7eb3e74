"""What is said of a segment beside its tables; read without the library for these."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import msgspec

FORMAT = "eagle-eye-segment/1"
DOWNSAMPLED_FORMAT = "eagle-eye-downsampled/1"
FACTS_FILE = "segment.json"
RAW_FOLDER = "raw"
STRETCH_BYTES_MAX = 128 << 20  # of encoded frames that are sorted in memory at once, and become one segment
PARTIAL = ".partial-"  # how the name of a folder begins that is still being written

Step = Callable[[str], None]


def no_step(_name: str) -> None:
    """Do nothing between two steps; a test may end the process there."""


def shard_of(name: str) -> int:
    """Return which group of nodes a segment of this name holds; -1 where the name does not say."""
    parts = name.split("-")
    return int(parts[-2]) if len(parts) > 2 and parts[-2].isdecimal() else -1


def any_between(names: Sequence[str], first: str, last: str) -> bool:
    """Return whether any of the names, which are sorted, lies between the two, these included."""
    place = bisect_left(names, first)
    return place < len(names) and names[place] <= last


class Facts(msgspec.Struct, frozen=True):
    """``segment.json``, and the segment's row in the manifest. Times are corrected Unix seconds.

    ``journal`` names the journal that the frames came from: chunks ``first_chunk`` to ``last_chunk`` of ``shard``.
    ``received_s`` is when the last of them came, ``bytes`` the size of the tables. ``sources`` are the segments that it
    was merged of.
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


class Sealed(msgspec.Struct, frozen=True):
    """The compactor's word on a stretch: the chunks of ``shard`` up to ``through`` are in ``segments``, on the disk."""

    shard: int
    through: int
    segments: list[Facts]
