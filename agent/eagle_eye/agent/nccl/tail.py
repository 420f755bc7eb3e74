"""The end of a file that another process writes: each whole line once, at a bounded cost. Touches: files."""

from __future__ import annotations

import os
from pathlib import Path

from eagle_eye.agent.nccl.owned_file import open_owned


class Tail:
    """Reads what was added to a file since the last time.

    A file that was exchanged or cut short is read from its beginning. What is not read is counted in ``skipped_bytes``:
    everything but the newest ``bytes_max`` where more has come than that, the rest of a line that is longer.
    """

    def __init__(self, path: Path, uid: int | None, bytes_max: int) -> None:
        self.path = path
        self.skipped_bytes = 0  # since the last reading
        self._uid = uid
        self._bytes_max = bytes_max
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._in_line = False  # the offset is inside a line that is skipped

    def read(self) -> bytes:
        """Return whole lines; b"" where nothing whole is new. Raises OSError."""
        self.skipped_bytes = 0
        descriptor = open_owned(self.path, self._uid)
        try:
            found = os.fstat(descriptor)
            identity = (found.st_dev, found.st_ino)
            if identity != self._identity or found.st_size < self._offset:
                self._identity, self._offset, self._in_line = identity, 0, False
            behind = found.st_size - self._offset - self._bytes_max
            if behind > 0:
                self._skip(behind)
                self._in_line = True  # as likely as not; one whole line more is lost otherwise
            raw = os.pread(descriptor, self._bytes_max, self._offset)
        finally:
            os.close(descriptor)
        return self._whole_lines(raw)

    def _whole_lines(self, raw: bytes) -> bytes:
        if self._in_line and raw:
            end = raw.find(b"\n") + 1
            self._in_line = end == 0
            self._skip(end or len(raw))
            raw = raw[end:] if end else b""
        end = raw.rfind(b"\n") + 1
        if end == 0 and len(raw) >= self._bytes_max:
            self._in_line = True
            self._skip(len(raw))
        self._offset += end
        return raw[:end]

    def _skip(self, count: int) -> None:
        self._offset += count
        self.skipped_bytes += count
