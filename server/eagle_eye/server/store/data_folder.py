"""Locks the server's data folder for one server at a time. Touches: a lock file in it.

The lock is the kernel's (flock), on a file that is never deleted: it is released when its process ends, for whatever
reason, so leftovers of a killed server or another host never block a start. Child processes do not inherit it.
``eagle-eye tokens`` and ``eagle-eye backup`` do not take it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from eagle_eye.server.model.errors import StoreUnavailable

LOCK_FILE = "server.lock"
ASIDE = "set-aside-"  # name prefix of a folder that keeps damaged or replaced files
NOTE_BYTES_MAX = 4_096


class Note(msgspec.Struct, frozen=True):
    """The contents of the lock file: the current or last holder of the folder, and its databases so far."""

    pid: int = 0
    host: str = ""
    listen: str = ""
    databases: tuple[str, ...] = ()


class FolderLock:
    """A folder that this process holds; ``before`` is the lock file's content from before."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder = folder
        self.before = _note_in(descriptor)
        self._descriptor = descriptor

    def note(self, listen: str, databases: Sequence[str]) -> None:
        """Write this process, its address and the folder's databases to the lock file. Raises StoreUnavailable."""
        note = Note(os.getpid(), socket.gethostname(), listen, tuple(databases))
        try:
            content = msgspec.json.encode(note) + b"\n"
            os.pwrite(self._descriptor, content, 0)
            os.ftruncate(self._descriptor, len(content))
        except OSError as error:
            raise StoreUnavailable(f"{self.folder / LOCK_FILE} cannot be written: {error}") from error


@contextmanager
def held(folder: Path, listen: str = "") -> Iterator[FolderLock]:
    """Hold the folder while the block runs. Raises StoreUnavailable, naming the holder, if another process does."""
    path = folder / LOCK_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = _locked(path)
    except OSError as error:
        raise StoreUnavailable(
            f"{path} cannot be locked: {error}; data_dir must be a folder on a local disk that this user can write"
        ) from error
    try:
        hold = FolderLock(folder, descriptor)
        hold.note(listen, hold.before.databases)
        yield hold
    finally:
        os.close(descriptor)


def new_aside(folder: Path) -> Path:
    """Return the name of a set-aside folder in ``folder`` that does not exist yet."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    names = (f"{ASIDE}{stamp}{f'-{number}' if number else ''}" for number in range(1_000))
    return next(path for name in names if not (path := folder / name).exists())


def set_aside(aside: Path, paths: Iterable[Path]) -> None:
    """Move those of the paths that exist into ``aside``, keeping their names. Raises OSError."""
    for path in paths:
        if path.exists():
            to = aside / path.relative_to(aside.parent)
            to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.rename(to)


def had(folder: Path) -> tuple[str, ...]:
    """Return the databases that the folder is known to have had, whoever holds it."""
    try:
        with (folder / LOCK_FILE).open("rb") as file:
            return _note_in(file.fileno()).databases
    except OSError:
        return ()


def _locked(path: Path) -> int:
    """Return a descriptor of the file now at this path, locked. Raises OSError, StoreUnavailable."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            message = _refusal(path.parent, _note_in(descriptor))
            os.close(descriptor)
            raise StoreUnavailable(message) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # deleted between the two calls: lock the next one instead


def _refusal(folder: Path, holder: Note) -> str:
    who = f"process {holder.pid} on host {holder.host}" if holder.pid else "another process"
    where = f", which listens on {holder.listen}" if holder.listen else ""
    return f"{folder} is in use by {who}{where}: stop it first, or name another folder (--data)"


def _note_in(descriptor: int) -> Note:
    try:
        return msgspec.json.decode(os.pread(descriptor, NOTE_BYTES_MAX, 0), type=Note)
    except msgspec.MsgspecError:
        return Note()  # empty, or not written by us: it names no holder
