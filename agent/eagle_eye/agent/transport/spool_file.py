"""A spool file: frames of one stream in order, each with a checksum. Touches: that file.

A record is the payload's length and a CRC-32 of all that follows (4 bytes each), the sequence (8), the Unix seconds at
which it was kept (float64) and the payload; little-endian. The first record, with sequence 0, holds node and stream.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from eagle_eye.schema.frame import FRAME_BYTES_MAX

# A file is closed at 1 MiB, and the last frame may add another: larger files are not ours.
FILE_BYTES_MAX = 4 << 20
_HEAD = struct.Struct("<IIQd")
_CHECKED_FROM = 8  # the checksum covers everything from here
RECORD_BYTES = _HEAD.size  # overhead per frame


class NoSpoolFile(ValueError):
    """The file does not start like a spool file."""


class SpooledFrame(NamedTuple):
    """One frame of a stream; ``time_s`` is when it was kept, Unix seconds."""

    sequence: int
    time_s: float
    frame: bytes


class Contents(NamedTuple):
    """A file's contents: the frames up to the first incomplete record.

    ``torn_bytes`` is the length of a truncated last record, as after a kill during a write; ``damaged_bytes`` the
    length from the first corrupt record on.
    """

    node: str
    stream: str
    frames: tuple[SpooledFrame, ...]
    torn_bytes: int
    damaged_bytes: int


class _Opening(msgspec.Struct, array_like=True):
    node: str
    stream: str


def opening(node: str, stream: str) -> bytes:
    """Return the record at the start of a file."""
    return record(SpooledFrame(0, 0.0, msgspec.msgpack.encode(_Opening(node, stream))))


def record(kept: SpooledFrame) -> bytes:
    """Return a frame as one record."""
    bare = _HEAD.pack(len(kept.frame), 0, kept.sequence, kept.time_s)
    checksum = zlib.crc32(kept.frame, zlib.crc32(bare[_CHECKED_FROM:]))
    return _HEAD.pack(len(kept.frame), checksum, kept.sequence, kept.time_s) + kept.frame


def parse(content: bytes) -> Contents:
    """Parse a file's content. Raises NoSpoolFile."""
    first, at = _record(content, 0)
    if first is None or first.sequence != 0:
        raise NoSpoolFile("it does not begin with the record that names node and stream")
    try:
        names = msgspec.msgpack.decode(first.frame, type=_Opening)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NoSpoolFile(f"its first record names no node and stream: {error}") from None
    frames, rest = records(content, at)
    torn = rest > 0 and _record(content, len(content) - rest)[1] > len(content)
    return Contents(names.node, names.stream, tuple(frames), rest if torn else 0, 0 if torn else rest)


def records(content: bytes, at: int) -> tuple[list[SpooledFrame], int]:
    """Return the frames of the records from a place on, in ascending order, and how many bytes are none of these."""
    frames: list[SpooledFrame] = []
    last = 0
    while at < len(content):
        kept, end = _record(content, at)
        if kept is None or kept.sequence <= last:
            break
        frames.append(kept)
        last, at = kept.sequence, end
    return frames, len(content) - at


def _record(content: bytes, at: int) -> tuple[SpooledFrame | None, int]:
    """Return the record at a place, None if it is incomplete, and where it ends or would have ended."""
    if at + _HEAD.size > len(content):
        return None, at + _HEAD.size
    length, checksum, sequence, time_s = _HEAD.unpack_from(content, at)
    if length > FRAME_BYTES_MAX:
        return None, at
    end = at + _HEAD.size + length
    if end > len(content) or zlib.crc32(content[at + _CHECKED_FROM : end]) != checksum:
        return None, end
    return SpooledFrame(sequence, time_s, content[at + _HEAD.size : end]), end


class SpoolFile:
    """A file being written; each method raises OSError and may hang as long as the disk does."""

    def __init__(self, path: Path, node: str, stream: str) -> None:
        """Name a file that does not exist yet; it is created with the first frame."""
        self.path = path
        self._opening = opening(node, stream)
        self._size = 0  # of its complete records
        self._descriptor: int | None = None

    def write(self, frames: Sequence[SpooledFrame], *, anew: bool) -> int:
        """Append frames; ``anew``: replace all others; return the file's size. They do not yet survive a power cut.

        A failed write leaves the earlier content intact.
        """
        descriptor = self._open()
        if anew and self._size > len(self._opening):
            os.ftruncate(descriptor, len(self._opening))
            self._size = len(self._opening)
        content = b"".join([b"" if self._size else self._opening, *map(record, frames)])
        done = 0
        try:
            while done < len(content):
                done += os.pwrite(descriptor, memoryview(content)[done:], self._size + done)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, self._size)
            raise
        self._size += len(content)
        return self._size

    def sync(self) -> None:
        """Make the data and the file's name survive a power cut."""
        os.fsync(self._open())
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        """Close the descriptor; the file can be written to again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._descriptor


def read(path: Path) -> Contents:
    """Return a file's contents, leaving none of it in the page cache. Raises NoSpoolFile, OSError."""
    with path.open("rb") as file:
        content = file.read(FILE_BYTES_MAX)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return parse(content)
