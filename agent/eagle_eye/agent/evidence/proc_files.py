"""Reads files of /proc, and files as another process sees them; size-bounded. May block forever."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from eagle_eye.agent.files.bounded import content
from eagle_eye.agent.files.foreign import NotTheirs, follow, open_file
from eagle_eye.agent.processes.process_files import ENVIRON_BYTES_MAX, ProcessFiles

READ_BYTES = 1 << 16


def read(path: Path, bytes_max: int) -> tuple[bytes, bool]:
    """Return a file's first bytes, and whether there was more. Raises OSError."""
    found = content(str(path), bytes_max + 1)
    return found[:bytes_max], len(found) > bytes_max


def read_open(descriptor: int, bytes_max: int) -> tuple[bytes, bool]:
    """Return an open file's first bytes, and whether there was more. Raises OSError.

    Reads no more than the file's reported size: files of /proc report 0, and some never end.
    """
    size = os.fstat(descriptor).st_size
    wanted = min(size, bytes_max)
    found = bytearray()
    while len(found) < wanted:
        data = os.read(descriptor, min(READ_BYTES, wanted - len(found)))
        if not data:
            break
        found += data
    return bytes(found), size > bytes_max


def environment(proc: Path, pid: int) -> tuple[dict[str, str], bool]:
    """Return a process's initial environment, and whether there was more. Raises OSError."""
    raw = ProcessFiles(proc).environment(pid)
    if raw is None:
        raise _gone(pid)
    variables: dict[str, str] = {}
    for entry in raw[:ENVIRON_BYTES_MAX].split(b"\0"):
        name, found, value = entry.partition(b"=")
        if found and name:
            variables[name.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
    return variables, len(raw) > ENVIRON_BYTES_MAX


def open_inside(proc: Path, pid: int, path: str) -> int:
    """Return a descriptor of what the process sees at the absolute ``path``, which cannot be read (O_PATH).

    Raises OSError, NotTheirs as ``foreign_file.follow`` does.
    """
    return follow(*_inside(proc, pid, path))[0]


def open_file_of(proc: Path, pid: int, path: str) -> int:
    """Return a descriptor to read the regular file that the process sees at ``path`` and its user owns.

    Raises OSError, NotTheirs.
    """
    status = ProcessFiles(proc).status(pid)
    if status is None:
        raise _gone(pid)
    return open_file(*_inside(proc, pid, path), status.user)


def _inside(proc: Path, pid: int, path: str) -> tuple[Path, Path]:
    """Return the process's path as this agent sees it, and the process's root folder."""
    if not path.startswith("/"):
        raise NotTheirs(f"{path[:80]!r}: expected an absolute path")
    root = proc / str(pid) / "root"
    return root / path.lstrip("/"), root


def _gone(pid: int) -> OSError:
    return ProcessLookupError(errno.ESRCH, f"process {pid} has ended")


def why(error: Exception) -> str:
    """Return what went wrong as a few words."""
    if isinstance(error, NotTheirs):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"
