"""A record in shared memory: rewritten atomically, even when no memory is left.

Each write overwrites the older of two files in place: a process killed midway leaves the other one intact.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import xxhash

FILES = ("record.0", "record.1")
_HEAD = struct.Struct("<8sQQ")  # checksum of what follows, number of the writing, length
_SPARE_BYTES = 1 << 16


class Record:
    """The record of a folder. Memory for one of so many bytes, and some more, is reserved with the first writing."""

    def __init__(self, folder: Path) -> None:
        self._paths = [folder / name for name in FILES]
        self._number = max((number for number, _ in map(_read, self._paths)), default=0)

    def read(self) -> bytes | None:
        """Return what was written last, as a whole; None where nothing was."""
        return max(map(_read, self._paths), key=lambda found: found[0])[1]

    def write(self, data: bytes) -> None:
        """Write it. Raises OSError where it is larger than what is reserved, and no more is left: all is as it was."""
        self._number += 1
        body = _HEAD.pack(b"", self._number, len(data))[8:] + data
        whole = memoryview(xxhash.xxh3_64_digest(body) + body)
        handles = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for path in self._paths]
        try:
            for handle in handles:
                if os.fstat(handle).st_size < len(whole):
                    os.posix_fallocate(handle, 0, 2 * len(whole) + _SPARE_BYTES)
            written = 0
            while written < len(whole):
                written += os.pwrite(handles[self._number % 2], whole[written:], written)
        except OSError:
            self._number -= 1
            raise
        finally:
            for handle in handles:
                os.close(handle)


def _read(path: Path) -> tuple[int, bytes | None]:
    """Return the number of the writing, and what was written; 0 and None where that is not whole."""
    try:
        found = path.read_bytes()
    except OSError:
        return 0, None
    if len(found) < _HEAD.size:
        return 0, None
    checksum, number, length = _HEAD.unpack_from(found)
    body = found[8 : _HEAD.size + length]
    if len(body) != _HEAD.size - 8 + length or xxhash.xxh3_64_digest(body) != checksum:
        return 0, None
    return number, body[_HEAD.size - 8 :]
