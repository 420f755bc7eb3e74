"""Slots as files in shared memory: fully reserved before any write, mapped, freed.

Touching a page that a full tmpfs cannot provide raises SIGBUS; posix_fallocate allocates all pages first.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path

from eagle_eye.checkpoint import cgroup_memory
from eagle_eye.checkpoint.memory_plan import DoesNotFit

MARGIN_BYTES = 1 << 26  # left free for the host's other processes


class SlotFile:
    """One slot: a file in shared memory, mapped while this object lives."""

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        self.path = path
        self.capacity_bytes = capacity_bytes
        self._map = mapped(path, capacity_bytes)
        self.view = memoryview(self._map)

    def close(self, *, remove: bool) -> None:
        """Unmap it; with ``remove`` its memory is free once no other process maps it."""
        if remove:
            self.path.unlink(missing_ok=True)
        self.view.release()
        with contextlib.suppress(BufferError):  # remaining views release it in the end
            self._map.close()


def reserve(path: Path, capacity_bytes: int) -> SlotFile:
    """Return a new slot with all its memory allocated. Raises DoesNotFit, and leaves nothing behind."""
    try:
        free_bytes, whose = free(path.parent)
        if capacity_bytes + MARGIN_BYTES > free_bytes:
            raise DoesNotFit(
                f"{capacity_bytes:,} bytes for {path.name} do not fit: {whose} has {free_bytes:,} bytes free"
                f" (and {MARGIN_BYTES:,} stay so); keep fewer steps or copies, or give it more"
            )
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(handle, 0, capacity_bytes)
        finally:
            os.close(handle)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno in {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT}:
            raise DoesNotFit(f"{capacity_bytes:,} bytes for {path.name} do not fit: {error.strerror}") from error
        raise
    return SlotFile(path, capacity_bytes)


def mapped(path: str | Path, capacity_bytes: int, *, writable: bool = True) -> mmap.mmap:
    """Return the file mapped, its pages present: to touch one first costs more than to copy it.

    Pages that are only read cost half of that. Raises OSError.
    """
    handle = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        if os.fstat(handle).st_size < capacity_bytes:
            raise OSError(errno.EINVAL, f"shorter than {capacity_bytes:,} bytes", str(path))
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return mmap.mmap(handle, capacity_bytes, flags=flags, prot=access)
    finally:
        os.close(handle)


def free(folder: Path) -> tuple[int, str]:
    """Return how many bytes may still be reserved, and what limits it: filesystem, host, or cgroup."""
    space = os.statvfs(folder)
    found = [(space.f_bavail * space.f_frsize, str(folder)), (_available_bytes(), "the host's memory")]
    allowed_bytes = cgroup_memory.left_bytes()
    if allowed_bytes is not None:
        found.append((allowed_bytes, "the store's control group"))
    return min(found)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62
