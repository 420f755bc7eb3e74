"""Which sequences of a stream are here, as ranges: what tells a duplicate once the frame itself has moved on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import msgspec

# A stream has one range, and one more for each gap that the agent's bounded queue left. Beyond this many the two lowest
# are joined: what lay between them would count as here, and a stream is sent in order, so it no longer comes.
RANGES_MAX = 256

_Ranges = tuple[tuple[int, int], ...]
_decoder = msgspec.json.Decoder(list[tuple[int, int]])


class Sequences:
    """A set of sequences from 1 on. Adding in ascending order, the common case, costs no search.

    ``highest`` is 0 where there is none. Whoever adds ``highest + 1`` may as well set it.
    """

    __slots__ = ("_earlier", "_first", "highest")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._earlier: list[tuple[int, int]] = []
        self._first, self.highest = 1, 0  # of nothing 1 is the next
        self._take(list(ranges))

    @classmethod
    def decode(cls, text: bytes) -> Sequences:
        """Return what ``encode`` gave."""
        return cls(_decoder.decode(text))

    def encode(self) -> bytes:
        """Return the ranges, first and last each, as JSON."""
        return msgspec.json.encode(self._ranges())

    def snapshot(self) -> _Ranges:
        """Return what ``restore`` takes the set back to."""
        return tuple(self._ranges())

    def restore(self, snapshot: _Ranges) -> None:
        """Have what was there when the snapshot was taken."""
        self._take(list(snapshot))

    def add(self, sequence: int) -> bool:
        """Have the sequence in the set; return whether it is new."""
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
