"""Keeps frames until the server has them: in memory, and on disk in one file per stream; bounded, drops oldest first.

A frame outlives this process (SIGKILL) once ``append`` has returned: the server has it, or the disk. It outlives the
machine (a power cut) a second later, when the file has been synced. Frames that the server takes at once are not
written before that; what it acknowledged is kept for some minutes, for a server that lacks it (``spool_files.py``).
Nothing here waits long for the disk: only ``spool_disk.py`` touches it, in a thread of its own. While the disk is full,
read-only, broken or hung, frames wait in memory and are written when it works again.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from eagle_eye.agent.collector import Drops
from eagle_eye.agent.transport.spool_disk import Disk, SpoolTaken
from eagle_eye.agent.transport.spool_files import (
    KEEP_S,
    RECORD_BYTES,
    KeptFrames,
    KeptPiece,
    SpoolBatch,
    SpooledFrame,
    SpoolStream,
)

BYTES_MAX = 512 << 20
MEMORY_BYTES_MAX = 32 << 20  # frames waiting for a failed disk: an hour of a node with eight GPUs
STREAM_FRAMES_MAX = 64  # about a minute: few enough to send before live frames, enough to limit the number of files
STREAM_BYTES_MAX = 1 << 20  # fits easily into one request
STREAM_SHARE = 8  # no stream takes more than this fraction of the spool: streams are dropped whole
KEPT_SHARE = 8  # what is kept of acknowledged frames takes no more than this fraction, and gives way to those that wait
STREAMS_MAX = 4_096  # files: an agent that is restarted repeatedly creates many small ones
# How long a new frame waits for the server if it took the previous one within this time; then it goes to disk.
ANSWER_WAIT_S = 0.05
WRITE_WAIT_S = 0.25  # how long the agent's loop waits for a hung disk, once
LOAD_WAIT_S = 5.0  # how long the sender of old frames waits for the disk
OPEN_WAIT_S = 5.0  # how long the agent's start waits for the disk
CLOSE_WAIT_S = 2.0
SAY_EVERY_S = 60.0  # a full spool drops frames every minute: one log line for all of them

__all__ = ["BYTES_MAX", "Spool", "SpoolBatch", "SpoolTaken"]

_log = logging.getLogger("eagle_eye.agent")


class Spool:
    """A queue of encoded frames in streams; thread-safe, with a single appender.

    Frames are appended to the *live* stream. When too many of them wait, because the server is unreachable, a new
    stream starts: the previous one is *recent*, earlier ones are the *backlog*. So the newest frames can be sent before
    older ones, although each stream is sent in order. Each start of the agent creates a new stream with sequences from
    1: none is ever used twice, even if a power cut lost the newest frames.
    """

    def __init__(
        self,
        folder: Path,
        node: str,
        drops: Drops,
        bytes_max: int = BYTES_MAX,
        monotonic_s: Callable[[], float] = time.monotonic,
        now_s: Callable[[], float] = time.time,
        keep_s: float = KEEP_S,
    ) -> None:
        """Open or create the spool. Raises SpoolTaken; on any other disk error frames stay in memory.

        What a server acknowledged is kept for ``keep_s``; 0: not.

        Frames that wait there under another node's name are dropped, counted as ``spool_other_node``: a server
        takes them only from that node, and would never acknowledge them.
        """
        self._node = node
        self._drops = drops
        self._bytes_max = bytes_max
        self._stream_bytes_max = min(STREAM_BYTES_MAX, bytes_max // STREAM_SHARE)
        self._monotonic_s = monotonic_s
        self._now_s = now_s
        self._backlog: deque[SpoolStream] = deque()
        self._recent: SpoolStream | None = None
        self._live = SpoolStream(str(uuid.uuid4()), node)
        self._streams: dict[str, SpoolStream] = {self._live.name: self._live}
        self._bytes = self._live.bytes
        self._stalled = False
        self._prompt = False  # whether the server took the newest frame within ANSWER_WAIT_S
        self._appended_s = 0.0
        self._tell: Callable[[], None] = lambda: None
        self._dropped = _Dropped()
        self._said_s = monotonic_s() - SAY_EVERY_S
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)
        self._disk = Disk(folder, node, drops, self._lock, monotonic_s, now_s, self._adopt, self._lose)
        self._kept = KeptFrames(
            keep_s, bytes_max // KEPT_SHARE, drops, monotonic_s, self._disk.keep, self._disk.drop_piece
        )
        with self._lock:
            self._disk.start(OPEN_WAIT_S)

    @property
    def in_memory(self) -> bool:
        """Whether new frames are only in memory because the disk fails or hangs."""
        return self._stalled or self._disk.failing

    def append(self, make: Callable[[str, int], bytes]) -> int | None:
        """Keep the frame that ``make(stream, sequence)`` returns; return its sequence, None if it was dropped.

        When a limit is reached the oldest frames are dropped, counted as ``spool_full``.
        """
        with self._lock:
            if len(self._live.frames) >= STREAM_FRAMES_MAX or (
                self._live.frames and self._live.bytes >= self._stream_bytes_max
            ):
                self._rotate()
            live = self._live
            frame = make(live.name, live.last + 1)
            before = live.bytes
            if not live.frames:
                live.begin_anew()
            self._bytes += live.bytes - before
            size = RECORD_BYTES + len(frame)
            if not self._make_room(size):
                self._drops.count("spool_full")
                return None
            sequence = live.last + 1
            live.add(SpooledFrame(sequence, self._now_s(), frame))
            self._bytes += size
            self._appended_s = self._monotonic_s()
            if self._prompt:
                self._tell()
                self._prompt = self._answered.wait_for(lambda: live.acknowledged >= sequence, ANSWER_WAIT_S)
            if not self._prompt:
                self._disk.write(live)
                self._await_disk(live, sequence)
            return sequence

    @property
    def node(self) -> str:
        """The node whose frames wait here."""
        return self._node

    def listen(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` before ``append`` returns for each frame to send; it must return at once."""
        self._tell = tell

    def has_new(self) -> bool:
        """Whether there are frames that ``newest`` returns."""
        return self._recent is not None or bool(self._live.frames)

    def newest(self, frames_max: int, bytes_max: int) -> SpoolBatch | None:
        """Return the next frames to send at once: from the recent stream while it has any, then from the live one."""
        with self._lock:
            return (self._recent or self._live).batch(frames_max, bytes_max)

    def backlog(self, frames_max: int, bytes_max: int) -> SpoolBatch | None:
        """Return the oldest frames of the backlog; None when there are none, or the disk does not return them now."""
        with self._lock:
            while self._backlog:
                oldest = self._backlog[0]
                if oldest.loaded and not oldest.frames:
                    self._remove(oldest)
                elif oldest.loaded:
                    return oldest.batch(frames_max, bytes_max)
                elif not self._disk.load(oldest, LOAD_WAIT_S):
                    return None
            return None

    def has_backlog(self) -> bool:
        """Whether there are frames that ``newest`` does not return."""
        return bool(self._backlog)

    def acknowledge(
        self, stream: str, sequence: int, journal: str | None = None, sent: Sequence[tuple[int, bytes]] = ()
    ) -> None:
        """Let a stream's frames up to and including ``sequence`` go: the server has them, or they are unwanted.

        Those that are durable in the server's ``journal`` are kept for a while; ``sent`` are the ones that it was sent.
        """
        with self._lock:
            known = self._streams.get(stream)
            if known is None:  # dropped meanwhile
                return
            gone = known.forget(sequence)
            if journal:
                if not gone and not known.loaded:  # unloaded between sending and answer
                    gone = [SpooledFrame(number, known.last_s, raw) for number, raw in sent if number <= sequence]
                self._kept.add(stream, journal, gone)
            if known is self._live and known.acknowledged == known.last:
                self._prompt = self._monotonic_s() - self._appended_s < ANSWER_WAIT_S
                self._answered.notify_all()
                if self._prompt:  # nothing overwrites the file's frames, which the server has too
                    self._disk.forget_file(known)
            if known is not self._live and known.acknowledged >= known.last:
                self._remove(known)

    def lacking(self, journal: str, frames_max: int, bytes_max: int) -> SpoolBatch | None:
        """Return acknowledged frames that the server with this journal lacks, the newest minute of them first.

        None when there are none, or the disk does not return them now.
        """
        with self._lock:
            while (piece := self._kept.next_for(journal)) is not None:
                if not self._kept.is_loaded(piece):
                    loaded = partial(self._kept.load, piece, journal)
                    if not self._disk.load_piece(piece, loaded, LOAD_WAIT_S):
                        return None
                elif (batch := self._kept.batch(frames_max, bytes_max)) is not None:
                    return batch
            return None

    def resent(self, stream: str, sequence: int, journal: str) -> None:
        """Note that a server has the frames that ``lacking`` returned up to a sequence, or that they are unwanted."""
        with self._lock:
            self._kept.resent(stream, sequence, journal)

    def lacking_count(self, journal: str) -> int:
        """Return how many kept frames the server with this journal lacks."""
        with self._lock:
            self._kept.ask_for(journal)
            self._kept.bound(self._monotonic_s())
            return self._kept.left(journal)

    def kept(self) -> tuple[int, int]:
        """Return how many acknowledged frames are kept, and their size in bytes."""
        with self._lock:
            return self._kept.frames, self._kept.bytes

    def waiting(self) -> int:
        """Return how many frames wait."""
        with self._lock:
            return sum(stream.waiting for stream in self._streams.values())

    def waiting_bytes(self) -> int:
        """Return the size of the waiting frames, on disk or in memory."""
        with self._lock:
            return self._bytes - (0 if self._live.frames else self._live.bytes)

    def close(self) -> None:
        """Write what is not on disk yet and release the folder; waiting frames are sent after the next start."""
        with self._lock:
            self._say_dropped()
            self._kept.write_all()
            if not self._live.frames:
                self._remove(self._live)
        self._disk.close(CLOSE_WAIT_S)

    # Everything below is called with the lock held.

    def _rotate(self) -> None:
        """Start a new live stream; the previous one becomes recent, the recent one backlog."""
        if self._recent is not None:
            self._backlog.append(self._recent)
            self._disk.unload(self._recent)
        self._recent = self._live
        self._live = SpoolStream(str(uuid.uuid4()), self._node)
        self._take(self._live)

    def _take(self, stream: SpoolStream) -> None:
        self._streams[stream.name] = stream
        self._bytes += stream.bytes

    def _remove(self, stream: SpoolStream) -> None:
        if stream is self._recent:
            self._recent = None
        elif stream is not self._live:
            self._backlog.remove(stream)  # nearly always the first
        del self._streams[stream.name]
        self._bytes -= stream.bytes
        self._disk.remove(stream)

    def _adopt(self, found: list[SpoolStream], kept: list[KeptPiece]) -> None:
        """Take over an earlier agent's streams, oldest first, the last with its frames in memory, and what it kept."""
        self._kept.adopt(kept)
        for stream in found:
            self._take(stream)
        if found and self._live.last == 0:
            self._recent = found.pop()
        for stream in found:
            stream.unload()
        self._backlog.extendleft(reversed(found))
        self._make_room(0)

    def _lose(self, stream: SpoolStream) -> None:
        self._drops.count("spool_damaged", stream.waiting)
        self._remove(stream)

    def _make_room(self, size: int) -> bool:
        """Drop the oldest streams until there is room for ``size`` more bytes; return whether there is."""
        while self._bytes + self._kept.bytes + size > self._bytes_max and self._kept.drop_oldest():
            pass
        while self._bytes + size > self._bytes_max or len(self._streams) > STREAMS_MAX:
            oldest = self._backlog[0] if self._backlog else self._recent
            if oldest is None:
                return False
            self._drop(oldest)
        while self._disk.unwritten_bytes() + size > MEMORY_BYTES_MAX:
            oldest = self._disk.oldest_unwritten()
            if oldest is None or oldest is self._live:
                break
            self._drop(oldest)
        return True

    def _drop(self, stream: SpoolStream) -> None:
        self._drops.count("spool_full", stream.waiting)
        self._dropped.add(stream)
        self._remove(stream)
        if self._monotonic_s() - self._said_s >= SAY_EVERY_S:
            self._say_dropped()

    def _say_dropped(self) -> None:
        if self._dropped.frames:
            self._said_s = self._monotonic_s()
            _log.warning(
                "the spool is full (%d bytes, %d of what the disk did not take): the oldest are dropped, %s",
                self._bytes_max,
                min(self._bytes_max, MEMORY_BYTES_MAX),
                self._dropped,
            )
            self._dropped = _Dropped()

    def _await_disk(self, stream: SpoolStream, sequence: int) -> None:
        """Wait until a frame is on disk: only once for a hung disk, never for a failing one."""
        if self._stalled and self._disk.is_prompt(WRITE_WAIT_S):
            self._stalled = False
            _log.info("the spool's disk answers again")
        if not self._stalled and not self._disk.wait_written(stream, sequence, WRITE_WAIT_S):
            self._stalled = True
            self._drops.count("spool_stalled")
            _log.warning("the spool's disk has not answered for %g s: frames wait in memory", WRITE_WAIT_S)


class _Dropped:
    """How much was dropped since it was last logged."""

    def __init__(self) -> None:
        self.frames = 0
        self._bytes = 0
        self._first_s = self._last_s = 0.0

    def add(self, stream: SpoolStream) -> None:
        if not self.frames:
            self._first_s = stream.first_s
        self._last_s = stream.last_s
        self.frames += stream.waiting
        self._bytes += stream.bytes

    def __str__(self) -> str:
        return f"{self.frames} frames, {self._bytes} bytes, of {_utc(self._first_s)} to {_utc(self._last_s)}"


def _utc(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
