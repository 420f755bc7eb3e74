"""Reads the beginning of a file, up to a limit. Touches: the file."""

from __future__ import annotations

import os

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
