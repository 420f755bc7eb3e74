"""Keeps frames on disk until the server has them: a SQLite file, bounded, oldest first out.

Touches: one folder. It survives SIGKILL; after a power cut the last frames may be missing, and nothing else.
A disk that fails or is full costs the frames it already holds until the next start, not the agent's voice: frames
go on in memory, as a stream of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

from eagle_eye.agent.drops import Drops

BYTES_MAX = 512 << 20
MEMORY_BYTES_MAX = 32 << 20
FILE_NAME = "spool.sqlite"

_log = logging.getLogger("eagle_eye.agent")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS stream (id TEXT NOT NULL, node TEXT NOT NULL, last_sequence INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS frames (sequence INTEGER PRIMARY KEY, frame BLOB NOT NULL);
"""


class SpoolTaken(OSError):  # noqa: N818 - named for what happened
    """Another agent uses the folder."""


class Spool:
    """An ordered queue of encoded frames; used from every thread.

    ``stream`` names this sequence of frames for ever: it is made with the file, and a new file is a new
    stream. Sequences count from 1 and are never used twice, also not after their frames were deleted.
    """

    def __init__(self, folder: Path, node: str, drops: Drops, bytes_max: int = BYTES_MAX) -> None:
        """Open or make the spool. Raises SpoolTaken; any other trouble with the disk leads to memory.

        Frames that wait there under another node's name are dropped, counted as ``spool_other_node``: a server
        takes them only from that node, and would never acknowledge them.
        """
        self.stream = ""
        self.in_memory = False
        self._node = node
        self._drops = drops
        self._bytes_max = bytes_max
        self._bytes = 0
        self._last = 0
        self._lock = threading.Lock()
        self._file = folder / FILE_NAME
        self._held: int | None = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._held = _hold(folder / "lock")
            self._database = self._open_file()
        except SpoolTaken:
            raise
        except (OSError, sqlite3.Error) as error:
            self._database = self._open_memory(error)

    def append(self, make: Callable[[str, int], bytes]) -> int | None:
        """Store the frame that ``make(stream, sequence)`` returns; return its sequence, None if it was dropped.

        When the bound is reached the oldest frames go, counted as ``spool_full``.
        """
        with self._lock:
            for _ in range(2):  # the second time in memory
                frame = make(self.stream, self._last + 1)
                try:
                    with self._database:
                        self._make_room(len(frame))
                        self._database.execute("INSERT INTO frames VALUES (?, ?)", (self._last + 1, frame))
                        self._database.execute("UPDATE stream SET last_sequence = ?", (self._last + 1,))
                except sqlite3.Error as error:
                    self._fall_back(error)
                    continue
                self._last += 1
                self._bytes += len(frame)
                return self._last
        self._drops.count("spool_failed")
        return None

    def oldest(self, frames_max: int, bytes_max: int) -> list[tuple[int, bytes]]:
        """Return the oldest frames not yet acknowledged with their sequences; at least one if there is any."""
        with self._lock:
            try:
                found: list[tuple[int, bytes]] = []
                size = 0
                rows = self._database.execute(
                    "SELECT sequence, frame FROM frames ORDER BY sequence LIMIT ?", (frames_max,)
                )
                for sequence, frame in rows:
                    size += len(frame)
                    if found and size > bytes_max:
                        break
                    found.append((sequence, frame))
            except sqlite3.Error as error:
                self._fall_back(error)
                return []
            return found

    def acknowledge(self, sequence: int) -> None:
        """Forget every frame up to and with ``sequence``: the server has it."""
        self._delete("sequence <= ?", sequence)

    def discard(self, sequence: int) -> None:
        """Forget one frame that nobody wants."""
        self._delete("sequence = ?", sequence)

    def waiting(self) -> int:
        """Return how many frames wait."""
        with self._lock:
            try:
                return int(self._database.execute("SELECT count(*) FROM frames").fetchone()[0])
            except sqlite3.Error as error:
                self._fall_back(error)
                return 0

    def close(self) -> None:
        """Close the file; the frames in it are sent after the next start."""
        with self._lock:
            with contextlib.suppress(sqlite3.Error):
                self._database.close()
            if self._held is not None:
                os.close(self._held)
                self._held = None

    def _delete(self, where: str, sequence: int) -> None:
        with self._lock:
            try:
                with self._database:
                    self._bytes -= self._remove(where, sequence)
            except sqlite3.Error as error:
                self._fall_back(error)

    def _remove(self, where: str, sequence: int) -> int:
        query = f"SELECT coalesce(sum(length(frame)), 0) FROM frames WHERE {where}"  # noqa: S608 - our own text
        size = int(self._database.execute(query, (sequence,)).fetchone()[0])
        self._database.execute(f"DELETE FROM frames WHERE {where}", (sequence,))  # noqa: S608 - our own text
        return size

    def _make_room(self, frame_bytes: int) -> None:
        bytes_max = min(self._bytes_max, MEMORY_BYTES_MAX) if self.in_memory else self._bytes_max
        if self._bytes + frame_bytes <= bytes_max:
            return
        rows = self._database.execute("SELECT sequence, length(frame) FROM frames ORDER BY sequence")
        last, dropped = 0, 0
        freed = 0
        # A little more than needed, so that a full spool does not do this for each frame.
        for sequence, size in rows:
            if self._bytes - freed + frame_bytes <= bytes_max - bytes_max // 64:
                break
            last, dropped, freed = sequence, dropped + 1, freed + size
        rows.close()
        self._database.execute("DELETE FROM frames WHERE sequence <= ?", (last,))
        self._bytes -= freed
        self._drops.count("spool_full", dropped)

    def _open_file(self) -> sqlite3.Connection:
        try:
            return self._open(str(self._file))
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:  # not a database, or a damaged one
            _log.warning("spool %s is damaged and set aside as *.damaged: %s", self._file, error)
            self._set_aside()
            return self._open(str(self._file))

    def _open(self, name: str) -> sqlite3.Connection:
        database = sqlite3.connect(name, timeout=1.0, check_same_thread=False)
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=NORMAL")
            database.executescript(_SCHEMA)
            with database:
                row = database.execute("SELECT id, node, last_sequence FROM stream").fetchone()
                if row is None or row[1] != self._node:
                    self._drops.count("spool_other_node", database.execute("DELETE FROM frames").rowcount)
                    database.execute("DELETE FROM stream")
                    row = (str(uuid.uuid4()), self._node, 0)
                    database.execute("INSERT INTO stream VALUES (?, ?, ?)", row)
            size, newest = database.execute(
                "SELECT coalesce(sum(length(frame)), 0), coalesce(max(sequence), 0) FROM frames"
            ).fetchone()
        except BaseException:
            database.close()
            raise
        self.stream, self._last, self._bytes = str(row[0]), max(int(row[2]), int(newest)), int(size)
        return database

    def _set_aside(self) -> None:
        self._drops.count("spool_damaged")
        for suffix in ("", "-wal", "-shm"):
            file = self._file.with_name(FILE_NAME + suffix)
            with contextlib.suppress(FileNotFoundError):
                file.replace(file.with_name(file.name + ".damaged"))  # one is kept: the newest

    def _open_memory(self, error: Exception) -> sqlite3.Connection:
        _log.warning("spool %s cannot be used, frames wait in memory until the next start: %s", self._file, error)
        self._drops.count("spool_in_memory")
        self.in_memory = True
        return self._open(":memory:")

    def _fall_back(self, error: sqlite3.Error) -> None:
        """Go on after the database failed: in a new file where it was damaged, else in memory."""
        if self.in_memory:
            return
        with contextlib.suppress(sqlite3.Error):
            self._database.close()
        damaged = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
        if damaged:
            try:
                self._set_aside()
                self._database = self._open(str(self._file))
            except (OSError, sqlite3.Error) as another:
                self._database = self._open_memory(another)
        else:
            self._database = self._open_memory(error)


def _hold(lock: Path) -> int:
    """Return a descriptor that holds the folder for as long as it is open."""
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
