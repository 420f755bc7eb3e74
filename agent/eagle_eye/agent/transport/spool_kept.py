"""Acknowledged frames, kept for some minutes in pieces: a server that lacks them is sent them again. Pure.

The server's host may be lost with all that it had on disk. A piece is some frames of one stream that one server
acknowledged; what is not on disk yet is ``held``. Everything is called with the spool's lock held.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from eagle_eye.agent.loop.drops import Drops
from eagle_eye.agent.transport.spool_file import (
    FILE_BYTES_MAX,
    RECORD_BYTES,
    Contents,
    SpooledFrame,
    SpoolFile,
    record,
    records,
)
from eagle_eye.agent.transport.spool_stream import SpoolBatch
from eagle_eye.schema.frame import FRAME_BYTES_MAX

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
