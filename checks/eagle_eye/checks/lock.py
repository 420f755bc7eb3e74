"""Allows one check at a time on a host. Touches: a lock file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

PATH = Path("/tmp/eagle-eye-check.lock")  # noqa: S108 - the same for all users; nothing is written into it


class LockTaken(Exception):
    """Another check runs, or the lock is unavailable; the message says which."""


@contextlib.contextmanager
def held(path: Path = PATH) -> Iterator[None]:
    """Hold the host's lock; the kernel releases it when the process exits in any way. Raises Taken."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        try:
            descriptor = os.open(path, flags | os.O_CREAT, 0o644)
        except PermissionError:
            # Another user's file in a sticky folder may be opened, but not as if to make it (fs.protected_regular).
            descriptor = os.open(path, flags)
    except OSError as error:
        raise LockTaken(f"{path} cannot be opened: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise LockTaken(f"{path} is no file; remove it")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LockTaken(f"another check runs on this host (it holds {path})") from None
        yield
    finally:
        os.close(descriptor)
