"""Following one growing file: each whole line once, at a bounded cost. Touches: one file, read only."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from eagle_eye.agent.drops import Drops

LINE_BYTES_MAX = 1 << 16  # structured lines have below 2 KB; what is longer is no line of ours


class Tail:
    """The lines that were added to a file since the last reading.

    The file is known by its inode: renamed or removed it is read to its end. One that was cut short is read from its
    beginning. Carriage returns end lines too: progress bars are rewritten with them. Of more than is asked for the
    newest is read; what is left out is counted in bytes as ``training_log_bytes_skipped``, a line beyond
    LINE_BYTES_MAX as ``training_log_long_lines``.
    """

    def __init__(self, path: Path, drops: Drops, identity: tuple[int, int] | None = None) -> None:
        """Open the file; reading begins at its beginning. Raises OSError as ``open_regular`` does."""
        self._descriptor = open_regular(path, identity)
        self.size = os.fstat(self._descriptor).st_size  # when it was last looked at
        self._drops = drops
        self._at = 0
        self._rest = b""
        self._in_line = False  # the place is inside a line that is left out

    def begin_at(self, place: int) -> None:
        """Read on from this byte; 0 is the beginning."""
        self._at, self._rest, self._in_line = place, b"", place > 0

    def read(self, bytes_max: int) -> bytes:
        """Return whole lines, each with its end, of the newest ``bytes_max``; b"" where none is new. Raises OSError."""
        self.size = os.fstat(self._descriptor).st_size
        if self.size < self._at:
            self.begin_at(0)
        if self.size == self._at:
            return b""
        behind = self.size - self._at - bytes_max
        if behind > 0:
            self._drops.count("training_log_bytes_skipped", behind)
            self.begin_at(self._at + behind)
        raw = os.pread(self._descriptor, min(bytes_max, self.size - self._at), self._at)
        self._at += len(raw)
        if b"\r" in raw:
            raw = raw.replace(b"\r", b"\n")
        return self._whole_lines(raw)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)

    def _whole_lines(self, raw: bytes) -> bytes:
        if self._in_line:
            end = raw.find(b"\n")
            if end < 0:
                return b""
            self._in_line = False
            raw = raw[end + 1 :]
        end = raw.rfind(b"\n") + 1
        whole, rest = raw[:end], raw[end:]
        if end:
            whole, self._rest = self._rest + whole, rest
        else:
            self._rest += rest
        if len(self._rest) > LINE_BYTES_MAX:
            self._drops.count("training_log_long_lines")
            self._rest, self._in_line = b"", True
        return whole


def open_regular(path: Path, identity: tuple[int, int] | None = None) -> int:
    """Return a descriptor of a regular file for reading; with ``identity``, device and inode, of no other one.

    Raises OSError, also where it is no such file.
    """
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe or a device can have effects
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or identity not in (None, (found.st_dev, found.st_ino)):
        os.close(descriptor)
        raise OSError(errno.ESTALE, "exchanged while it was opened", str(path))
    return descriptor
