"""Spool files, and acknowledged frames that are kept in pieces for some minutes. Touches: the files.

The server's host may be lost with all that it had on disk: one that lacks frames is sent them again. A piece is some
frames of one stream that one server acknowledged; what is not on disk yet is ``held``. Everything is called with the
spool's lock held.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from eagle_eye.agent.collector import Drops
from eagle_eye.schema.frame import FRAME_BYTES_MAX

# A spool file: frames of one stream in order, each with a checksum. Touches: that file.
#
# A record is the payload's length and a CRC-32 of all that follows (4 bytes each), the sequence (8), the Unix seconds
# at which it was kept (float64) and the payload; little-endian. The first record, with sequence 0, holds node and
# stream.
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


KEEP_S = 900.0  # as much of the past as detection looks at
SENDING_RATIO = 2.0  # what the server lacks is kept for so many times as long: a large fleet takes turns to send it
PIECE_FRAMES_MAX = 64  # one request
PIECE_BYTES_MAX = 1 << 20
OPEN_MAX = 4  # pieces of different streams that grow at a time
WRITE_FRAMES, WRITE_S = 16, 10.0  # held at most so many and for so long: what a killed agent loses of what is kept
HELD_BYTES_MAX = 4 << 20  # of all pieces, while the disk fails
PACKED_BYTES_MAX = 256 << 10  # of frames in one record
DEFLATE_LEVEL = 1  # frames of one node repeat themselves: a fifth of the bytes


class KeptPiece:
    """Frames of one stream in order, acknowledged by the server with ``journal``; ``journals``: all that have them."""

    def __init__(self, stream: str, journal: str, acknowledged_s: float) -> None:
        self.stream = stream
        self.journal = journal
        self.journals = {journal}
        self.held: list[SpooledFrame] = []
        self.held_since_s = acknowledged_s
        self.held_bytes = self.file_bytes = 0
        self.frames = 0
        self.last_s = 0.0  # when the newest frame was made
        self.acknowledged_s = acknowledged_s  # of the newest frame, by the monotonic clock
        self.file: SpoolFile | None = None

    def wrote(self, frames: Sequence[SpooledFrame], file_bytes: int) -> None:
        """Note that the first frames held are on disk, in a file of this size."""
        del self.held[: len(frames)]
        self.held_bytes = sum(RECORD_BYTES + len(kept.frame) for kept in self.held)
        self.file_bytes = file_bytes


class KeptFrames:
    """All pieces, in the order of their acknowledgement: at most ``keep_s`` old and ``bytes_max`` large.

    What is being sent again is kept for SENDING_RATIO times as long.

    ``write(piece)`` is called when what a piece holds is to be written, ``remove(piece)`` when its file is not needed
    any more. What is dropped before its time is counted as ``kept_full``, what cannot be read back as ``kept_damaged``.
    """

    def __init__(
        self,
        keep_s: float,
        bytes_max: int,
        drops: Drops,
        monotonic_s: Callable[[], float],
        write: Callable[[KeptPiece], None],
        remove: Callable[[KeptPiece], None],
    ) -> None:
        self._keep_s = keep_s
        self._bytes_max = bytes_max
        self._drops = drops
        self._monotonic_s = monotonic_s
        self._write = write
        self._remove = remove
        self._pieces: deque[KeptPiece] = deque()
        self._open: dict[str, KeptPiece] = {}  # by stream
        self._asking = ""  # the journal of the server that is asked about: it takes live frames
        self._again: deque[SpooledFrame] = deque()  # what is to be sent again next...
        self._again_of: tuple[KeptPiece, str] | None = None  # ...of this piece, to a server with this journal

    def __iter__(self) -> Iterator[KeptPiece]:
        """Yield the pieces, those acknowledged first before the others."""
        return iter(self._pieces)

    @property
    def bytes(self) -> int:
        """Size of what is kept, on disk and in memory."""
        return sum(piece.held_bytes + piece.file_bytes for piece in self._pieces)

    @property
    def frames(self) -> int:
        """Number of frames kept."""
        return sum(piece.frames for piece in self._pieces)

    def add(self, stream: str, journal: str, frames: Sequence[SpooledFrame]) -> None:
        """Keep frames of a stream that the server with this journal has acknowledged just now."""
        now_s = self._monotonic_s()
        for kept in frames if self._keep_s > 0.0 else ():
            piece = self._piece(stream, journal, now_s)
            if not piece.held:
                piece.held_since_s = now_s
            size = RECORD_BYTES + len(kept.frame)
            piece.held.append(kept)
            piece.held_bytes += size
            piece.frames += 1
            piece.last_s = kept.time_s
            piece.acknowledged_s = now_s
        for piece in self._open.values():
            if len(piece.held) >= WRITE_FRAMES or (piece.held and now_s - piece.held_since_s >= WRITE_S):
                self._write(piece)
        self.bound(now_s)

    def adopt(self, found: Sequence[KeptPiece]) -> None:
        """Take over the pieces that an earlier agent left, in the order of their acknowledgement."""
        self._pieces.extendleft(reversed(found))
        self.bound(self._monotonic_s())

    def bound(self, now_s: float) -> None:
        """Drop what is too old, and the oldest of what is too much."""
        while self._pieces and now_s - self._pieces[0].acknowledged_s > self._keep_s * (
            SENDING_RATIO if self._asking and self._asking not in self._pieces[0].journals else 1.0
        ):
            self._forget(self._pieces[0])
        while self._pieces and (
            self.bytes > self._bytes_max or sum(piece.held_bytes for piece in self._pieces) > HELD_BYTES_MAX
        ):
            self.drop_oldest()

    def drop_oldest(self) -> bool:
        """Make room by the oldest piece; return whether there was one."""
        if not self._pieces:
            return False
        self._drops.count("kept_full", self._pieces[0].frames)
        self._forget(self._pieces[0])
        return True

    def write_all(self) -> None:
        """Have everything that is held written: the agent stops."""
        for piece in self._pieces:
            if piece.held:
                self._write(piece)

    def ask_for(self, journal: str) -> None:
        """Note the journal of the server that takes live frames: what it lacks is kept for longer."""
        self._asking = journal

    def left(self, journal: str) -> int:
        """Return how many frames a server with this journal lacks."""
        lacking = sum(piece.frames for piece in self._pieces if journal not in piece.journals)
        if self._again_of is not None and self._again_of[1] == journal:
            return lacking - self._again_of[0].frames + len(self._again)
        return lacking

    def next_for(self, journal: str) -> KeptPiece | None:
        """Return the newest piece that a server with this journal lacks, the one begun first; None if there is none."""
        if self._again_of is not None and self._again_of[1] == journal:
            return self._again_of[0]
        lacking = [piece for piece in self._pieces if journal not in piece.journals]
        return max(lacking, key=lambda piece: piece.last_s, default=None)

    def is_loaded(self, piece: KeptPiece) -> bool:
        """Return whether ``batch`` has the piece's frames."""
        return self._again_of is not None and self._again_of[0] is piece

    def load(self, piece: KeptPiece, journal: str, written: Sequence[SpooledFrame]) -> None:
        """Prepare to send a piece again; ``written`` are its frames on disk, as far as they could be read."""
        if piece not in self._pieces:  # it was dropped meanwhile
            return
        frames = [*written, *piece.held]
        if self._open.get(piece.stream) is piece:
            self._close(piece.stream)  # what comes later is of another one
        self._drops.count("kept_damaged", piece.frames - len(frames))
        piece.frames = len(frames)
        self._again, self._again_of = deque(frames), (piece, journal)

    def batch(self, frames_max: int, bytes_max: int) -> SpoolBatch | None:
        """Return the first frames to send again, at least one; None when a server has all of the piece."""
        if self._again_of is None:
            return None
        chosen: list[tuple[int, bytes]] = []
        size = 0
        for kept in self._again:
            size += len(kept.frame)
            if chosen and (len(chosen) == frames_max or size > bytes_max):
                break
            chosen.append((kept.sequence, kept.frame))
        if chosen:
            return SpoolBatch(self._again_of[0].stream, chosen)
        self._whole()
        return None

    def resent(self, stream: str, sequence: int, journal: str) -> None:
        """Note that a server with this journal has the frames up to a sequence, or that they are unwanted there."""
        if self._again_of is None or (self._again_of[0].stream, self._again_of[1]) != (stream, journal):
            return  # another server answered than was meant: what that one lacks is sent anew
        while self._again and self._again[0].sequence <= sequence:
            self._again.popleft()
        if not self._again:
            self._whole()

    def _whole(self) -> None:
        """Note that a server has all of the piece that was sent again."""
        if self._again_of is not None:
            piece, journal = self._again_of
            piece.journals.add(journal)
            self._again_of = None

    def _piece(self, stream: str, journal: str, now_s: float) -> KeptPiece:
        piece = self._open.get(stream)
        if piece is not None and (
            piece.journals != {journal}
            or piece.frames >= PIECE_FRAMES_MAX
            or piece.held_bytes + piece.file_bytes >= PIECE_BYTES_MAX
        ):
            self._close(stream)
            piece = None
        if piece is None:
            if len(self._open) >= OPEN_MAX:
                self._close(min(self._open, key=lambda name: self._open[name].acknowledged_s))
            piece = self._open[stream] = KeptPiece(stream, journal, now_s)
            self._pieces.append(piece)
        return piece

    def _close(self, stream: str) -> None:
        piece = self._open.pop(stream)
        if piece.held:
            self._write(piece)

    def _forget(self, piece: KeptPiece) -> None:
        self._pieces.remove(piece)  # nearly always the first
        if self._open.get(piece.stream) is piece:
            del self._open[piece.stream]
        if self.is_loaded(piece):
            self._again_of = None
            self._again.clear()
        self._remove(piece)


def packed(frames: Sequence[SpooledFrame], now_s: float) -> list[SpooledFrame]:
    """Return frames as few records of a file, dated with the wall clock."""
    together: list[list[SpooledFrame]] = []
    size = 0
    for kept in frames:
        size += len(kept.frame)
        if not together or size > PACKED_BYTES_MAX:
            together.append([])
            size = len(kept.frame)
        together[-1].append(kept)
    found = [
        SpooledFrame(part[-1].sequence, now_s, zlib.compress(b"".join(map(record, part)), DEFLATE_LEVEL))
        for part in together
    ]
    return [one for one in found if len(one.frame) <= FRAME_BYTES_MAX]  # others would end the file as damaged ones do


def unpacked(contents: Contents) -> list[SpooledFrame]:
    """Return the frames of a file of packed records, up to the first that is damaged."""
    found: list[SpooledFrame] = []
    for one in contents.frames:
        inflater = zlib.decompressobj()
        try:
            raw = inflater.decompress(one.frame, FILE_BYTES_MAX)
        except zlib.error:
            break
        frames, rest = records(raw, 0)
        found += frames
        if rest or not inflater.eof:
            break
    return found
