"""One stream of the spool: which of its frames wait, and which of them the disk has. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from eagle_eye.agent.transport.spool_file import RECORD_BYTES, SpooledFrame, SpoolFile, opening


class Batch(NamedTuple):
    """Frames of one stream in order, each with its sequence: all that wait of it, or the first of them."""

    stream: str
    frames: list[tuple[int, bytes]]


class Stream:
    """Frames of one queue in order, used with the spool's lock held.

    ``frames`` are those that wait, as far as they are in memory (``loaded``: all of them); ``waiting`` counts all.
    ``written`` is the sequence up to which the disk needs nothing more. ``bytes`` is the length that its file has, or
    will have. ``keep`` is false once its frames may leave the memory for the disk.
    """

    def __init__(self, name: str, node: str) -> None:
        self.name = name
        self.frames: deque[SpooledFrame] = deque()
        self.loaded = True
        self.keep = True
        self.last = 0
        self.acknowledged = 0
        self.written = 0
        self.waiting = 0
        self.first_s = self.last_s = 0.0
        self.opening_bytes = self.bytes = len(opening(node, name))
        self.file: SpoolFile | None = None  # None: not made yet
        self.unsynced_since_s = 0.0  # when the oldest part of the file was written that a power cut may take

    def begin_anew(self) -> None:
        """Plan for a file without what the server has; only while nothing waits."""
        self.bytes = self.opening_bytes

    def add(self, kept: SpooledFrame) -> None:
        """Add the newest frame."""
        self.frames.append(kept)
        self.last = kept.sequence
        self.first_s = kept.time_s if not self.waiting else self.first_s
        self.last_s = kept.time_s
        self.waiting += 1
        self.bytes += record_bytes(kept.frame)

    def forget(self, sequence: int) -> None:
        """Forget what waits up to and with a sequence."""
        self.acknowledged = max(self.acknowledged, min(sequence, self.last))
        if not self.loaded:  # the numbers of a stream have no gaps
            self.waiting = min(self.waiting, self.last - self.acknowledged)
            return
        while self.frames and self.frames[0].sequence <= sequence:
            self.frames.popleft()
        self.waiting = len(self.frames)

    def batch(self, frames_max: int, bytes_max: int) -> Batch | None:
        """Return the first frames that wait in memory, at least one; None when there is none."""
        chosen: list[tuple[int, bytes]] = []
        size = 0
        for kept in self.frames:
            size += len(kept.frame)
            if chosen and (len(chosen) == frames_max or size > bytes_max):
                break
            chosen.append((kept.sequence, kept.frame))
        return Batch(self.name, chosen) if chosen else None

    def unwritten(self) -> tuple[SpooledFrame, ...]:
        """Return what waits and the disk does not have."""
        return tuple(kept for kept in self.frames if kept.sequence > self.written)

    def unload(self) -> None:
        """Leave what waits to the disk alone."""
        self.frames.clear()
        self.loaded = False

    def load(self, frames: Sequence[SpooledFrame]) -> None:
        """Take what waits back from the disk."""
        self.frames.extend(kept for kept in frames if kept.sequence > self.acknowledged)
        self.waiting = len(self.frames)
        self.loaded = True


def left_behind(name: str, node: str, frames: Sequence[SpooledFrame], file: SpoolFile) -> Stream:
    """Return a stream that an earlier agent wrote; ``frames`` are at least one."""
    stream = Stream(name, node)
    for kept in frames:
        stream.add(kept)
    stream.written = stream.last
    stream.file = file
    return stream


def record_bytes(frame: bytes) -> int:
    """Return how much room a frame takes."""
    return RECORD_BYTES + len(frame)
