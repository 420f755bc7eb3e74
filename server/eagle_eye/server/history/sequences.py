"""The stored sequences of a stream, as ranges: detects duplicates even after their frames moved to segments."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import msgspec

# A stream has one range, and one more for each gap that the agent's bounded queue left. Beyond this many the two lowest
# are merged: sequences between them then count as stored, but streams are sent in order, so they no longer arrive.
RANGES_MAX = 256

_Ranges = tuple[tuple[int, int], ...]
_decoder = msgspec.json.Decoder(list[tuple[int, int]])


class Sequences:
    """A set of sequences starting at 1. Adding in ascending order, the common case, needs no search.

    ``highest`` is 0 for an empty set. Setting it to ``highest + 1`` is the same as adding that.
    """

    __slots__ = ("_earlier", "_first", "highest")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._earlier: list[tuple[int, int]] = []
        self._first, self.highest = 1, 0  # in an empty set 1 comes next
        self._take(list(ranges))

    @classmethod
    def decode(cls, text: bytes) -> Sequences:
        """Return the set that ``encode`` returned."""
        return cls(_decoder.decode(text))

    def encode(self) -> bytes:
        """Return the ranges (first and last of each) as JSON."""
        return msgspec.json.encode(self._ranges())

    def snapshot(self) -> _Ranges:
        """Return a snapshot for ``restore``."""
        return tuple(self._ranges())

    def restore(self, snapshot: _Ranges) -> None:
        """Restore the set to the snapshot."""
        self._take(list(snapshot))

    def add(self, sequence: int) -> bool:
        """Add the sequence to the set; return whether it is new."""
        if sequence > self.highest:
            if sequence > self.highest + 1:
                if self.highest:
                    self._earlier.append((self._first, self.highest))
                    self._bound()
                self._first = sequence
            self.highest = sequence
            return True
        if sequence >= self._first:
            return False
        ranges = self._ranges()
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
        self._take(ranges)
        self._bound()
        return True

    def _ranges(self) -> list[tuple[int, int]]:
        return [*self._earlier, (self._first, self.highest)] if self.highest else []

    def _take(self, ranges: list[tuple[int, int]]) -> None:
        self._first, self.highest = ranges.pop() if ranges else (1, 0)
        self._earlier = ranges

    def _bound(self) -> None:
        if len(self._earlier) >= RANGES_MAX:
            self._earlier[:2] = [(self._earlier[0][0], self._earlier[1][1])]
