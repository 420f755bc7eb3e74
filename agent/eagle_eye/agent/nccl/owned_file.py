"""Opening files that a training process has named, without being led elsewhere. Touches: files.

An agent often runs as root and reads where a user's process says. Links are not followed, nothing but what is expected
is opened, and the file must be the process's own user's: a name cannot make the agent read what its user may not.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


class NotOwned(OSError):  # noqa: N818 - it says what the file is
    """The file is not what may be opened: of another user, or of another kind."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(0, why, str(path))


def open_owned(path: Path, uid: int | None) -> int:
    """Return a descriptor of a regular file of the user ``uid`` (None: of anyone) for reading. Raises OSError."""
    return _open(path, os.O_RDONLY, stat.S_IFREG, uid)


def open_owned_pipe(path: Path, uid: int | None) -> int:
    """Return a descriptor of a named pipe for writing; OSError with ENXIO where nobody reads it."""
    return _open(path, os.O_WRONLY, stat.S_IFIFO, uid)


def _open(path: Path, mode: int, kind: int, uid: int | None) -> int:
    _check(path, os.lstat(path), kind, uid)  # opening a device can have effects
    descriptor = os.open(path, mode | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _check(path, os.fstat(descriptor), kind, uid)  # it may have been exchanged meanwhile
    except NotOwned:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: Path, found: os.stat_result, kind: int, uid: int | None) -> None:
    if stat.S_IFMT(found.st_mode) != kind:
        raise NotOwned(path, f"not a {'regular file' if kind == stat.S_IFREG else 'named pipe'}")
    if uid is not None and found.st_uid != uid:
        raise NotOwned(path, f"belongs to user {found.st_uid}, the process to user {uid}")
