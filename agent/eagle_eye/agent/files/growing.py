"""Follows a file that another process writes: each complete line once, at a bounded cost. Touches: one open file."""

from __future__ import annotations

import os

from eagle_eye.agent.files.foreign import Identity

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
