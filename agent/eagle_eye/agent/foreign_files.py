"""Bounded reads of files, also of those that others name: a training process, or who may write to a folder.

An agent running as root reads paths given by a user's process. It resolves them component by component inside one root
folder, as the process itself would: no link leads out of a container, and links in /proc are not followed. The target
must be a regular file (opening a device can have side effects, opening a pipe may block forever), or a pipe where one
is to be written to, and the process's user must own it. Where the path comes from a folder in the configuration and not
from a process, a link counts only if it belongs to root or to the owner of its target.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

CHUNK_BYTES = 1 << 16


def content(path: str, bytes_max: int) -> bytes:
    """Return the file's first bytes, at most ``bytes_max``. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Files of /proc report no size and arrive in pieces; a buffer of the limit's size would cost more than the
        # reading.
        found = chunk = os.read(descriptor, min(CHUNK_BYTES, bytes_max))
        while chunk and len(found) < bytes_max:
            chunk = os.read(descriptor, min(CHUNK_BYTES, bytes_max - len(found)))
            found += chunk
    finally:
        os.close(descriptor)
    return found


LINKS_MAX = 40  # symbolic links per path: the kernel's own limit
PARTS_MAX = 256  # components per path
SHOWN_CHARS_MAX = 200  # of a path in a message
FDINFO_BYTES_MAX = 4_096  # the kernel writes about 100
OWN_ROOT = Path("/")

Identity = tuple[int, int]  # device and inode: one file under any name

_KINDS = {stat.S_IFREG: "regular file", stat.S_IFIFO: "named pipe"}
_O_PATH = os.O_PATH | os.O_CLOEXEC


class NotTheirs(OSError):
    """A file of the wrong type, or owned by another user; the text names it."""


def shown(path: Path | str) -> str:
    """Return a path for messages: non-printable characters escaped, length bounded."""
    text = str(path)[:SHOWN_CHARS_MAX]
    return text if text.isprintable() else ascii(text)


def follow(path: Path, root: Path = OWN_ROOT) -> tuple[int, set[int]]:
    """Return an O_PATH descriptor (not readable) of what is at ``path``, and the owners of the links on the way.

    ``path`` is below ``root``, the folder that its author sees as /. Raises OSError, NotTheirs.
    """
    if "\0" in str(path) or not path.is_relative_to(root):
        raise NotTheirs(f"{shown(path)}: expected a path below {root}")
    way = [os.open(root, _O_PATH)]
    parts = list(path.relative_to(root).parts)[::-1]
    owners: set[int] = set()
    links = 0
    try:
        while parts:
            if len(way) + len(parts) > PARTS_MAX or links > LINKS_MAX:
                raise NotTheirs(f"{shown(path)}: more than {PARTS_MAX} parts or {LINKS_MAX} symbolic links")
            target = _step(way, parts.pop(), owners)
            if target is not None:
                links += 1
                parts += target.split("/")[::-1]
                if target.startswith("/"):
                    _close(way, 1)
        return way.pop(), owners
    finally:
        _close(way, 0)


def stat_of(path: Path, root: Path = OWN_ROOT) -> os.stat_result:
    """Return the stat of what is at ``path``, without opening it. Raises OSError, NotTheirs as ``follow`` does."""
    named, _ = follow(path, root)
    try:
        return os.fstat(named)
    finally:
        os.close(named)


def open_file(path: Path, root: Path = OWN_ROOT, user: int | None = None, *, identity: Identity | None = None) -> int:
    """Return a descriptor to read the regular file at ``path`` below ``root``.

    With ``user`` the file must belong to that user; without it, every link on the way must belong to root, to this
    agent's user or to the file's owner. With ``identity`` it must be that file. Raises OSError, NotTheirs.
    """
    return _open(path, root, user, stat.S_IFREG, os.O_RDONLY, identity)


def open_pipe(path: Path, root: Path = OWN_ROOT, user: int | None = None) -> int:
    """Return a non-blocking descriptor to write to a named pipe; ownership rules are those of ``open_file``.

    Raises NotTheirs, OSError: ENXIO where it has no reader.
    """
    return _open(path, root, user, stat.S_IFIFO, os.O_WRONLY, None)


def open_output(link: Path, user: int, *, identity: Identity | None = None) -> int:
    """Return a descriptor to read the regular file that a process of ``user`` has open: /proc/<pid>/fd/<number>.

    The file must belong to the user, or the process must have it open for writing: a descriptor alone does not prove
    that its process may read the file. Raises OSError, NotTheirs.
    """
    named = os.open(link, _O_PATH)
    try:
        found = os.fstat(named)
        if found.st_uid != user and not _is_written(link, named):
            raise NotTheirs(_of_another(link, found, user))
        return _reopened(named, found, link, stat.S_IFREG, os.O_RDONLY, identity)
    finally:
        os.close(named)


def _open(path: Path, root: Path, user: int | None, kind: int, mode: int, identity: Identity | None) -> int:
    named, owners = follow(path, root)
    try:
        found = os.fstat(named)
        if user is not None and found.st_uid != user:
            raise NotTheirs(_of_another(path, found, user))
        other_owners = owners - {0, os.geteuid(), found.st_uid} if user is None else set()
        if other_owners:
            raise NotTheirs(
                f"{shown(path)}: a link on the way belongs to user {min(other_owners)}, the file to"
                f" user {found.st_uid}; name the file without that link"
            )
        return _reopened(named, found, path, kind, mode, identity)
    finally:
        os.close(named)


def _of_another(path: Path, found: os.stat_result, user: int) -> str:
    return f"{shown(path)}: belongs to user {found.st_uid}, the process to user {user}"


def _reopened(named: int, found: os.stat_result, path: Path, kind: int, mode: int, identity: Identity | None) -> int:
    if stat.S_IFMT(found.st_mode) != kind:
        raise NotTheirs(f"{shown(path)}: not a {_KINDS[kind]}")
    if identity not in (None, (found.st_dev, found.st_ino)):
        raise OSError(errno.ESTALE, "exchanged while it was opened", str(path))
    return os.open(f"/proc/self/fd/{named}", mode | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)


def _step(way: list[int], part: str, owners: set[int]) -> str | None:
    """Resolve one path component; return the target of a symbolic link, which is not followed. Raises OSError."""
    if part == "..":
        _close(way, max(1, len(way) - 1))
    elif part not in ("", "."):
        here = os.open(part, _O_PATH | os.O_NOFOLLOW, dir_fd=way[-1])
        found = os.fstat(here)
        if stat.S_ISLNK(found.st_mode):
            owners.add(found.st_uid)
            try:
                return os.readlink("", dir_fd=here)
            finally:
                os.close(here)
        way.append(here)
    return None


def _close(way: list[int], keep: int) -> None:
    while len(way) > keep:
        os.close(way.pop())


def _is_written(link: Path, named: int) -> bool:
    """Whether the process has this very file open for writing; False also where the kernel does not say (before 5.14).

    The kernel reports one descriptor at one moment: mode and file cannot be swapped between two reads.
    """
    theirs, ours = _fdinfo(link.parent.parent / "fdinfo" / link.name), _fdinfo(Path(f"/proc/self/fdinfo/{named}"))
    flags = theirs.get(b"flags", b"")
    if b"ino" not in theirs or any(theirs.get(key) != ours.get(key) for key in (b"ino", b"mnt_id")):
        return False
    opened = int(flags, 8) if flags.isdigit() else os.O_PATH
    return not opened & os.O_PATH and opened & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR)


def _fdinfo(path: Path) -> dict[bytes, bytes]:
    try:
        lines = content(str(path), FDINFO_BYTES_MAX).split(b"\n")
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(b":") for line in lines)}


LINE_BYTES_MAX = 1 << 16  # structured log lines are below 2 KB, NCCL Inspector's with traces 25 KB


class GrowingFile:
    """The lines added to an open file since the last read.

    It stays on the file that was opened: a renamed or removed file is read to its end, and the caller finds its
    replacement. A truncated file is read from its beginning. Carriage returns end lines too, as progress bars use them.
    An incomplete line waits for its end. If more than the limit is new, only the newest part is read; a line longer
    than LINE_BYTES_MAX is left out. ``skipped_bytes`` and ``long_lines`` count these for the last read.
    """

    def __init__(self, descriptor: int) -> None:
        """Take over the descriptor; reading starts at the beginning of the file."""
        self._descriptor = descriptor
        found = os.fstat(descriptor)
        self.identity: Identity = (found.st_dev, found.st_ino)
        self.size = found.st_size  # when last checked
        self.skipped_bytes = self.long_lines = 0
        self._at = 0
        self._rest = b""
        self._in_line = False  # the position is inside a line that is left out

    def begin_at(self, place: int) -> None:
        """Continue from this byte; 0 is the beginning. The line that the position falls in is left out."""
        self._at, self._rest, self._in_line = place, b"", place > 0

    def read(self, bytes_max: int) -> bytes:
        """Return complete lines, each with its end, of the newest ``bytes_max``; b"" if none is new. Raises OSError."""
        self.skipped_bytes = self.long_lines = 0
        self.size = os.fstat(self._descriptor).st_size
        if self.size < self._at:
            self.begin_at(0)
        behind = self.size - self._at - bytes_max
        if behind > 0:
            self.skipped_bytes += len(self._rest) + behind
            self.begin_at(self._at + behind)
        raw = os.pread(self._descriptor, min(bytes_max, self.size - self._at), self._at)
        self._at += len(raw)
        return self._whole_lines(raw.replace(b"\r", b"\n"))

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _whole_lines(self, raw: bytes) -> bytes:
        if self._in_line:
            begin = raw.find(b"\n") + 1
            self._in_line = begin == 0
            self.skipped_bytes += begin or len(raw)
            raw = raw[begin:] if begin else b""
        end = raw.rfind(b"\n") + 1
        whole = self._rest + raw[:end] if end else b""
        self._rest = raw[end:] if end else self._rest + raw
        if len(self._rest) > LINE_BYTES_MAX:
            self.long_lines += 1
            self.skipped_bytes += len(self._rest)
            self._rest, self._in_line = b"", True
        return whole
