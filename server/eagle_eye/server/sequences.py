"""Which sequences of a stream are here, as ranges: what tells a duplicate once the frame itself has moved on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import msgspec

# A stream has one range, and one more for each gap that the agent's bounded queue left. Beyond this many the two lowest
# are joined: what lay between them would count as here, and a stream is sent in order, so it no longer comes.
RANGES_MAX = 256

_decoder = msgspec.json.Decoder(list[tuple[int, int]])


class Sequences:
    """A set of sequences. Adding in ascending order, the common case, costs no search."""

    __slots__ = ("_ranges",)

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._ranges = list(ranges)

    @classmethod
    def decode(cls, text: bytes) -> Sequences:
        """Return what ``encode`` gave."""
        return cls(_decoder.decode(text))

    def encode(self) -> bytes:
        """Return the ranges, first and last each, as JSON."""
        return msgspec.json.encode(self._ranges)

    def snapshot(self) -> tuple[tuple[int, int], ...]:
        """Return what ``restore`` takes the set back to."""
        return tuple(self._ranges)

    def restore(self, snapshot: tuple[tuple[int, int], ...]) -> None:
        """Have what was there when the snapshot was taken."""
        self._ranges = list(snapshot)

    @property
    def highest(self) -> int:
        """The highest sequence; 0 where there is none."""
        return self._ranges[-1][1] if self._ranges else 0

    def add(self, sequence: int) -> bool:
        """Have the sequence in the set; return whether it is new."""
        ranges = self._ranges
        if not ranges or sequence > ranges[-1][1]:
            if ranges and sequence == ranges[-1][1] + 1:
                ranges[-1] = (ranges[-1][0], sequence)
            else:
                ranges.append((sequence, sequence))
                self._bound()
            return True
        after = bisect_right(ranges, (sequence, 1 << 62))  # the first range that begins later
        if after and sequence <= ranges[after - 1][1]:
            return False
        low = high = sequence
        begin = end = after
        if after and ranges[after - 1][1] == sequence - 1:
            begin, low = after - 1, ranges[after - 1][0]
        if after < len(ranges) and ranges[after][0] == sequence + 1:
            end, high = after + 1, ranges[after][1]
        ranges[begin:end] = [(low, high)]
        self._bound()
        return True

    def _bound(self) -> None:
        if len(self._ranges) > RANGES_MAX:
            self._ranges[:2] = [(self._ranges[0][0], self._ranges[1][1])]
