"""Reads files of /proc and files as another process sees them; never more than asked for. May block for ever.

An agent of root reads paths that a training process chose. It follows them inside that process's own root folder, as
the process would, opens no device and no pipe, and hands out no file that the process's user does not own.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from eagle_eye.agent.bounded_file import content

READ_BYTES = 1 << 16
ENVIRONMENT_BYTES_MAX = 1 << 20  # the kernel lets a process have a quarter of its stack's limit: 2 MB usually
LINKS_MAX = 40  # symbolic links on the way to one file: the kernel's own limit
PARTS_MAX = 256  # of one path


class NotTheirs(OSError):  # noqa: N818 - it says what the file is
    """A file that is not what it should be, or that the process's user does not own."""


def read(path: Path, bytes_max: int) -> tuple[bytes, bool]:
    """Return a file's first bytes, and whether there was more. Raises OSError."""
    found = content(str(path), bytes_max + 1)
    return found[:bytes_max], len(found) > bytes_max


def read_open(descriptor: int, bytes_max: int) -> tuple[bytes, bool]:
    """Return what is left of an open file up to ``bytes_max``, and whether there was more. Raises OSError."""
    found = bytearray()
    while len(found) <= bytes_max:
        data = os.read(descriptor, min(READ_BYTES, bytes_max + 1 - len(found)))
        if not data:
            break
        found += data
    return bytes(found[:bytes_max]), len(found) > bytes_max


def environment(proc: Path, pid: int) -> tuple[dict[str, str], bool]:
    """Return a process's environment as it was started, and whether there was more. Raises OSError."""
    raw, more = read(proc / str(pid) / "environ", ENVIRONMENT_BYTES_MAX)
    variables: dict[str, str] = {}
    for entry in raw.split(b"\0"):
        name, found, value = entry.partition(b"=")
        if found and name:
            variables[name.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
    return variables, more


def open_inside(proc: Path, pid: int, path: str) -> int:
    """Return a descriptor of what the process sees at the absolute ``path``, which cannot be read (O_PATH).

    Symbolic links are followed inside the process's root folder: none leads out of a container. Raises OSError.
    """
    if not path.startswith("/") or "\0" in path:
        raise NotTheirs(f"{path[:80]!r}: expected an absolute path")
    way = [os.open(proc / str(pid) / "root", os.O_PATH | os.O_CLOEXEC)]
    parts = path.split("/")[::-1]
    links = 0
    try:
        while parts:
            if len(way) + len(parts) > PARTS_MAX or links > LINKS_MAX:
                raise NotTheirs(f"{path[:80]!r}: more than {PARTS_MAX} parts or {LINKS_MAX} symbolic links")
            target = _step(way, parts.pop())
            if target is not None:
                links += 1
                parts += target.split("/")[::-1]
                if target.startswith("/"):
                    _close(way, 1)
        return way.pop()
    finally:
        _close(way, 0)


def _step(way: list[int], part: str) -> str | None:
    """Go one part of a path further; return where a symbolic link leads, which is not followed. Raises OSError."""
    if part == "..":
        _close(way, max(1, len(way) - 1))
    elif part not in ("", "."):
        here = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=way[-1])
        if stat.S_ISLNK(os.fstat(here).st_mode):
            try:
                return os.readlink("", dir_fd=here)
            finally:
                os.close(here)
        way.append(here)
    return None


def _close(way: list[int], keep: int) -> None:
    while len(way) > keep:
        os.close(way.pop())


def open_file_of(proc: Path, pid: int, path: str) -> int:
    """Return a descriptor to read the regular file that the process sees at ``path`` and its user owns.

    Raises OSError, NotTheirs.
    """
    named = open_inside(proc, pid, path)
    try:
        found = os.fstat(named)
        if not stat.S_ISREG(found.st_mode):
            raise NotTheirs(f"{path[:80]!r} is no regular file")
        owner = (proc / str(pid)).stat().st_uid
        if found.st_uid != owner:
            raise NotTheirs(f"{path[:80]!r} belongs to user {found.st_uid}, the process to user {owner}")
        return os.open(f"/proc/self/fd/{named}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(named)


def why(error: Exception) -> str:
    """Return what went wrong as a few words."""
    if isinstance(error, NotTheirs):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"
