"""State of one spool stream: which of its frames wait, and which are on disk. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from eagle_eye.agent.transport.spool_file import RECORD_BYTES, SpooledFrame, SpoolFile, opening


class SpoolBatch(NamedTuple):
    """Frames of one stream in order, each with its sequence: all that wait, or the first of them."""

    stream: str
    frames: list[tuple[int, bytes]]


class SpoolStream:
    """Frames of one queue in order, used with the spool's lock held.

    ``frames`` are the waiting frames that are in memory (``loaded``: all of them); ``waiting`` counts all. Frames up to
    the sequence ``written`` need no more disk writes. ``bytes`` is its file's current or planned length. ``keep`` is
    false once its frames may be dropped from memory.
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
        self.file: SpoolFile | None = None  # None: not created yet
        self.unsynced_since_s = 0.0  # when the oldest unsynced part of the file was written

    def begin_anew(self) -> None:
        """Plan a new file without the acknowledged frames; only while nothing waits."""
        self.bytes = self.opening_bytes

    def add(self, kept: SpooledFrame) -> None:
        """Add the newest frame."""
        self.frames.append(kept)
        self.last = kept.sequence
        self.first_s = kept.time_s if not self.waiting else self.first_s
        self.last_s = kept.time_s
        self.waiting += 1
        self.bytes += RECORD_BYTES + len(kept.frame)

    def forget(self, sequence: int) -> list[SpooledFrame]:
        """Drop waiting frames up to and including a sequence; return those that were in memory."""
        self.acknowledged = max(self.acknowledged, min(sequence, self.last))
        gone: list[SpooledFrame] = []
        if not self.loaded:  # a stream's sequences have no gaps
            self.waiting = min(self.waiting, self.last - self.acknowledged)
            return gone
        while self.frames and self.frames[0].sequence <= sequence:
            gone.append(self.frames.popleft())
        self.waiting = len(self.frames)
        return gone

    def batch(self, frames_max: int, bytes_max: int) -> SpoolBatch | None:
        """Return the first frames that wait in memory, at least one; None when there is none."""
        chosen: list[tuple[int, bytes]] = []
        size = 0
        for kept in self.frames:
            size += len(kept.frame)
            if chosen and (len(chosen) == frames_max or size > bytes_max):
                break
            chosen.append((kept.sequence, kept.frame))
        return SpoolBatch(self.name, chosen) if chosen else None

    def unwritten(self) -> tuple[SpooledFrame, ...]:
        """Return waiting frames that are not on disk."""
        return tuple(kept for kept in self.frames if kept.sequence > self.written)

    def unload(self) -> None:
        """Drop waiting frames from memory; they are on disk."""
        self.frames.clear()
        self.loaded = False

    def load(self, frames: Sequence[SpooledFrame]) -> None:
        """Restore waiting frames from disk."""
        self.frames.extend(kept for kept in frames if kept.sequence > self.acknowledged)
        self.waiting = len(self.frames)
        self.loaded = True


def left_behind(name: str, node: str, frames: Sequence[SpooledFrame], file: SpoolFile) -> SpoolStream:
    """Return a stream written by an earlier agent; ``frames`` is not empty."""
    stream = SpoolStream(name, node)
    for kept in frames:
        stream.add(kept)
    stream.written = stream.last
    stream.file = file
    return stream
