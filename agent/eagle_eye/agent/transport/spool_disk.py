"""The spool's disk I/O: only one thread touches the folder, so that a hung disk blocks no other thread.

It works from the state of the streams, not from a queue of orders: frames that the server has by the time the disk is
ready are not written, and a disk that hangs for a day leaves only the waiting frames behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from eagle_eye.agent.collector import Drops
from eagle_eye.agent.transport.spool_files import (
    Contents,
    KeptPiece,
    NoSpoolFile,
    SpooledFrame,
    SpoolFile,
    SpoolStream,
    left_behind,
    packed,
    read,
    unpacked,
)

SYNC_S = 1.0  # the most a power cut may lose
RETRY_S = 10.0  # how long a failed disk is left alone
SUFFIX = ".frames"
KEPT_SUFFIX = ".kept"  # of a piece's file, whose name ends with the journal that has it
ASIDE = "no-spool-file"  # new name of a file with our suffix that is not ours: only the newest is kept
EARLIER = "spool.sqlite"  # where agents kept frames before there was one file per stream

_log = logging.getLogger("eagle_eye.agent")

Work = Callable[[], Callable[[], None]]  # runs without the lock; returns a function to run with the lock


class SpoolTaken(OSError):
    """Another agent uses the folder."""


class Disk:
    """Writes, syncs, reads and removes the streams' files.

    Every method but ``close`` is called with ``lock`` held. So are ``adopt``, with what an earlier agent left, oldest
    first: streams, the last with its frames in memory, and acknowledged pieces; and ``lost``, with a stream that cannot
    be read back.
    """

    def __init__(
        self,
        folder: Path,
        node: str,
        drops: Drops,
        lock: threading.Lock,
        monotonic_s: Callable[[], float],
        now_s: Callable[[], float],
        adopt: Callable[[list[SpoolStream], list[KeptPiece]], None],
        lost: Callable[[SpoolStream], None],
    ) -> None:
        self._folder = folder
        self._node = node
        self._drops = drops
        self._lock = lock
        self._monotonic_s = monotonic_s
        self._now_s = now_s
        self._adopt = adopt
        self._lost = lost
        self._work = threading.Condition(lock)
        self._done = threading.Condition(lock)
        self._unwritten: dict[SpoolStream, None] = {}  # oldest first
        self._unsynced: dict[SpoolStream, None] = {}
        self._removed: list[SpoolFile] = []
        self._wanted: SpoolStream | None = None
        self._unkept: dict[KeptPiece, None] = {}  # with frames to write
        self._wanted_piece: tuple[KeptPiece, Callable[[Sequence[SpooledFrame]], None]] | None = None
        self._held: int | None = None
        self._next_number = 1
        self._starting = True
        self._closing = False
        self._busy = True
        self._took_s = 0.0
        self._retry_at_s = 0.0
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="spool", daemon=True)

    @property
    def failing(self) -> bool:
        """Whether the last attempt to use the disk failed."""
        return self._problem is not None

    def start(self, wait_s: float) -> None:
        """Start; wait until the folder is open, has failed to open, or ``wait_s`` is over. Raises SpoolTaken."""
        self._thread.start()
        self._done.wait_for(lambda: self._held is not None or self.failing, wait_s)
        self._starting = False
        if isinstance(self._problem, SpoolTaken):
            self._closing = True
            self._work.notify()
            raise self._problem

    def write(self, stream: SpoolStream) -> None:
        """Schedule a stream's new frames for writing."""
        self._unwritten[stream] = None
        self._work.notify()

    def wait_written(self, stream: SpoolStream, sequence: int, timeout_s: float) -> bool:
        """Return whether within the timeout the frame is on disk, is no longer needed there, or writing has failed."""
        return self._done.wait_for(
            lambda: max(stream.written, stream.acknowledged) >= sequence or self.failing, timeout_s
        )

    def load(self, stream: SpoolStream, timeout_s: float) -> bool:
        """Return whether within the timeout a stream was read back into memory, or given up."""
        self._wanted = stream
        self._work.notify()
        return self._done.wait_for(lambda: self._wanted is not stream, timeout_s)

    def keep(self, piece: KeptPiece) -> None:
        """Schedule what a piece holds for writing."""
        self._unkept[piece] = None
        self._work.notify()

    def drop_piece(self, piece: KeptPiece) -> None:
        """Forget a piece and its file."""
        self._unkept.pop(piece, None)
        file, piece.file = piece.file, None
        if file is not None:
            self._removed.append(file)
            self._work.notify()

    def load_piece(self, piece: KeptPiece, loaded: Callable[[Sequence[SpooledFrame]], None], timeout_s: float) -> bool:
        """Return whether within the timeout ``loaded`` was called with the piece's frames that are on disk."""
        wanted = self._wanted_piece = (piece, loaded)
        self._work.notify()
        if self._done.wait_for(lambda: self._wanted_piece is not wanted, timeout_s):
            return True
        self._wanted_piece = None
        return False

    def unload(self, stream: SpoolStream) -> None:
        """Release a stream's frames from memory and close its file, once they are safe on disk."""
        stream.keep = False
        if stream not in self._unwritten:
            stream.unload()
            self._sync_later(stream)

    def remove(self, stream: SpoolStream) -> None:
        """Forget a stream and its file."""
        self._unwritten.pop(stream, None)
        if self._wanted is stream:
            self._wanted = None
        self.forget_file(stream)

    def forget_file(self, stream: SpoolStream) -> None:
        """Remove a stream's file; another is created if it is written again."""
        self._unsynced.pop(stream, None)
        file, stream.file = stream.file, None
        if file is not None:
            self._removed.append(file)
            self._work.notify()

    def unwritten_bytes(self) -> int:
        """Return how many bytes at most wait for the disk."""
        return sum(stream.bytes for stream in self._unwritten)

    def oldest_unwritten(self) -> SpoolStream | None:
        """Return the oldest stream with data waiting for the disk."""
        return next(iter(self._unwritten), None)

    def is_prompt(self, within_s: float) -> bool:
        """Whether the disk is idle and its last operation took less than ``within_s``."""
        return not self._busy and self._took_s < within_s

    def close(self, wait_s: float) -> None:
        """Write and sync pending data and release the folder, within ``wait_s``; a hung disk keeps its thread."""
        with self._lock:
            self._closing = True
            self._work.notify()
        self._thread.join(wait_s)

    # The thread: choosing the next work, most urgent first

    def _run(self) -> None:
        while True:
            with self._lock:
                self._busy = False
                while (work := self._next()) is None and not self._closing:
                    self._work.wait(self._until_due_s())
                if work is None:
                    break
                self._busy = True
                begin_s = self._monotonic_s()
            try:
                note = work()
            except Exception as error:  # noqa: BLE001 - this thread must not end; a disk's errors are OSError
                note = partial(self._failed, error)
            with self._lock:
                self._took_s = self._monotonic_s() - begin_s
                note()
                self._done.notify_all()
        if self._held is not None:
            os.close(self._held)

    def _next(self) -> Work | None:
        now_s = self._monotonic_s()
        if self.failing and (self._closing or now_s < self._retry_at_s):
            return self._next_reading()
        if self._held is None:
            return None if self._closing else self._open
        urgent = self._next_writing() or self._next_removal() or self._next_reading() or self._next_sync(now_s)
        return urgent or self._next_keeping()

    def _next_writing(self) -> Work | None:
        for stream in tuple(self._unwritten):
            frames = stream.unwritten()
            if frames:
                if stream.file is None:
                    path = self._folder / f"{self._next_number:010d}{SUFFIX}"
                    stream.file = SpoolFile(path, self._node, stream.name)
                    self._next_number += 1
                anew = len(frames) == len(stream.frames)  # the server has everything in the file
                return partial(self._write, stream, stream.file, frames, anew)
            self._settle(stream)
        return None

    def _next_removal(self) -> Work | None:
        return partial(self._remove, self._removed.pop()) if self._removed else None

    def _next_reading(self) -> Work | None:
        stream = self._wanted
        if stream is not None and stream.file is not None:
            return partial(self._load, stream, stream.file)
        if self._wanted_piece is not None:
            return partial(self._load_piece, *self._wanted_piece)
        return None

    def _next_keeping(self) -> Work | None:
        for piece in tuple(self._unkept):
            if piece.held:
                if piece.file is None:
                    path = self._folder / f"{self._next_number:010d}-{piece.journal}{KEPT_SUFFIX}"
                    piece.file = SpoolFile(path, self._node, piece.stream)
                    self._next_number += 1
                return partial(self._write_piece, piece, piece.file, tuple(piece.held))
            del self._unkept[piece]
        return None

    def _next_sync(self, now_s: float) -> Work | None:
        for stream in tuple(self._unsynced):
            if not stream.waiting or stream.file is None:
                del self._unsynced[stream]
            elif self._closing or now_s >= stream.unsynced_since_s + SYNC_S:
                return partial(self._sync, stream, stream.file)
        return None

    def _until_due_s(self) -> float | None:
        now_s = self._monotonic_s()
        if self.failing or self._held is None:
            return max(0.0, self._retry_at_s - now_s)
        due_s = (stream.unsynced_since_s + SYNC_S for stream in self._unsynced)
        return max(0.0, min(due_s) - now_s) if self._unsynced else None

    # The thread: touching the disk, without the lock; applying the result, with the lock

    def _open(self) -> Callable[[], None]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = _hold(self._folder / "lock")
        try:
            found, kept = self._scan(), self._scan_kept()
        except OSError:
            os.close(held)
            raise
        return partial(self._opened, held, found, kept)

    def _opened(self, held: int, found: list[SpoolStream], kept: list[KeptPiece]) -> None:
        self._held = held
        self._well()
        self._adopt(found, kept)

    def _write(
        self, stream: SpoolStream, file: SpoolFile, frames: Sequence[SpooledFrame], anew: bool
    ) -> Callable[[], None]:
        file.write(frames, anew=anew)
        return partial(self._wrote, stream, frames[-1].sequence, anew)

    def _wrote(self, stream: SpoolStream, sequence: int, anew: bool) -> None:
        self._well()
        stream.written = sequence
        if stream.file is None:  # removed meanwhile
            return
        if anew:
            self._unsynced.pop(stream, None)
        self._sync_later(stream)
        if stream.written == stream.last:
            self._settle(stream)

    def _settle(self, stream: SpoolStream) -> None:
        """Record that nothing of a stream waits for the disk."""
        stream.written = stream.last
        self._unwritten.pop(stream, None)
        if not stream.keep:
            stream.unload()

    def _sync(self, stream: SpoolStream, file: SpoolFile) -> Callable[[], None]:
        file.sync()
        if not stream.keep:
            file.close()
        return partial(self._synced, stream)

    def _synced(self, stream: SpoolStream) -> None:
        self._well()
        self._unsynced.pop(stream, None)

    def _sync_later(self, stream: SpoolStream) -> None:
        if stream not in self._unsynced:
            self._unsynced[stream] = None
            stream.unsynced_since_s = self._monotonic_s()

    def _load(self, stream: SpoolStream, file: SpoolFile) -> Callable[[], None]:
        try:
            contents = read(file.path)
        except (OSError, NoSpoolFile) as error:
            _log.warning("spool file %s cannot be read back: %s", file.path, error)
            contents = None
        return partial(self._loaded, stream, contents)

    def _loaded(self, stream: SpoolStream, contents: Contents | None) -> None:
        if self._wanted is not stream:
            return
        self._wanted = None
        if contents is None or contents.stream != stream.name:
            self._lost(stream)
            return
        expected = stream.waiting
        stream.load(contents.frames)
        self._drops.count("spool_damaged", expected - stream.waiting)

    def _write_piece(self, piece: KeptPiece, file: SpoolFile, frames: Sequence[SpooledFrame]) -> Callable[[], None]:
        size = file.write(packed(frames, self._now_s()), anew=False)
        file.close()
        return partial(self._wrote_piece, piece, frames, size)

    def _wrote_piece(self, piece: KeptPiece, frames: Sequence[SpooledFrame], size: int) -> None:
        self._well()
        piece.wrote(frames, size)
        if not piece.held:
            self._unkept.pop(piece, None)

    def _load_piece(self, piece: KeptPiece, loaded: Callable[[Sequence[SpooledFrame]], None]) -> Callable[[], None]:
        frames: list[SpooledFrame] = []
        file = piece.file
        if file is not None and piece.file_bytes:
            try:
                frames = unpacked(read(file.path))
            except (OSError, NoSpoolFile) as error:
                _log.warning("what is kept in %s cannot be read back: %s", file.path, error)
        return partial(self._loaded_piece, (piece, loaded), frames)

    def _loaded_piece(
        self, wanted: tuple[KeptPiece, Callable[[Sequence[SpooledFrame]], None]], frames: Sequence[SpooledFrame]
    ) -> None:
        if self._wanted_piece is not None and self._wanted_piece[0] is wanted[0]:
            self._wanted_piece = None
            wanted[1](frames)

    def _remove(self, file: SpoolFile) -> Callable[[], None]:
        file.close()
        with contextlib.suppress(OSError):  # if it stays, its frames are sent again after the next start
            file.path.unlink()
        return lambda: None

    def _well(self) -> None:
        if self._problem is not None:
            self._problem = None
            _log.info("spool %s can be used again", self._folder)

    def _failed(self, error: Exception) -> None:
        self._retry_at_s = self._monotonic_s() + RETRY_S
        raised = self._starting and isinstance(error, SpoolTaken)  # by ``start``
        if self._problem is None and not raised:
            self._drops.count("spool_in_memory")
            details = None if isinstance(error, OSError) else error  # a traceback for a bug of ours
            text = "spool %s cannot be used, frames wait in memory until it can: %s"
            _log.warning(text, self._folder, error, exc_info=details)
        self._problem = error

    # The thread: an earlier agent's files

    def _scan(self) -> list[SpoolStream]:
        """Return the streams that wait in the folder, oldest first; only the last keeps its frames in memory."""
        found: dict[str, SpoolStream] = {}
        newest: SpoolStream | None = None
        earlier = self._folder / EARLIER
        if earlier.exists():
            self._drops.count("spool_earlier_format")
            _log.warning("%s is of an earlier agent and is set aside as %s: its frames are not sent", earlier, ASIDE)
            earlier.replace(earlier.with_name(ASIDE))
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            contents = self._read_left(path, found)
            if contents is None:
                continue
            if newest is not None:
                newest.unload()
            newest = left_behind(contents.stream, self._node, contents.frames, SpoolFile(path, self._node, ""))
            found[newest.name] = newest
        return list(found.values())

    def _scan_kept(self) -> list[KeptPiece]:
        """Return the pieces that are kept in the folder, in the order of their acknowledgement."""
        found: list[KeptPiece] = []
        for path in sorted(self._folder.glob(f"*{KEPT_SUFFIX}")):
            number, _, journal = path.stem.partition("-")
            if not number.isdecimal() or not journal:
                continue
            self._next_number = max(self._next_number, int(number) + 1)
            try:
                contents = read(path)
            except NoSpoolFile:
                contents = None
            frames = [] if contents is None else unpacked(contents)
            if contents is None or contents.damaged_bytes:  # a torn end is what a killed agent leaves
                self._drops.count("kept_damaged")
            if contents is None or not frames or contents.node != self._node:
                path.unlink()
                continue
            age_s = max(self._now_s() - contents.frames[-1].time_s, 0.0)
            piece = KeptPiece(contents.stream, journal, self._monotonic_s() - age_s)
            piece.file = SpoolFile(path, self._node, contents.stream)
            piece.frames, piece.file_bytes, piece.last_s = len(frames), path.stat().st_size, frames[-1].time_s
            found.append(piece)
        return found

    def _read_left(self, path: Path, found: dict[str, SpoolStream]) -> Contents | None:
        """Return the frames in a file that are still to be sent; None if there are none, and the file is removed."""
        if path.stem.isdecimal():
            self._next_number = max(self._next_number, int(path.stem) + 1)
        try:
            contents = read(path)
        except NoSpoolFile as error:
            self._drops.count("spool_damaged")
            _log.warning("%s is no spool file and is set aside as %s: %s", path, ASIDE, error)
            path.replace(path.with_name(ASIDE))
            return None
        if contents.torn_bytes:
            self._drops.count("spool_torn")
            _log.info("%s ends in the midst of a frame: the agent was killed while it wrote", path)
        if contents.damaged_bytes:
            self._drops.count("spool_damaged")
            _log.warning("%s is damaged: its last %d bytes are lost", path, contents.damaged_bytes)
        if contents.node != self._node:
            self._drops.count("spool_other_node", len(contents.frames))
        elif contents.frames and contents.stream not in found:
            return contents
        path.unlink()
        return None


def _hold(lock: Path) -> int:
    """Return a descriptor that locks the folder while it is open."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise SpoolTaken(f"{lock.parent} is in use by another agent") from None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
