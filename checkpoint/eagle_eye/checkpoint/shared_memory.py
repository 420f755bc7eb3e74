"""A node's memory for checkpoints: sizes, plans, and slots as files, fully reserved before any write, mapped, freed.

Touching a page that a full tmpfs cannot provide raises SIGBUS; posix_fallocate allocates all pages first.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

# Sizes as people write them.
_KINDS = "KMGT"
_WRITTEN = re.compile(rf"(\d{{1,18}}(?:\.\d{{1,9}})?) ?(?:([{_KINDS}])(iB|B)?|B)?", re.ASCII)


def size_bytes(text: str) -> int:
    """Return the bytes of 3GiB (or 3G, as Slurm has it), 500MB or 1048576. Raises ValueError."""
    found = _WRITTEN.fullmatch(text)
    if found is None:
        raise ValueError(f"expected a size such as 3GiB, 500MB or 1048576, got {text[:80]!r}")
    number, kind, unit = found.groups()
    base = 1_000 if unit == "B" else 1_024
    return round(float(number) * base ** (_KINDS.index(kind) + 1)) if kind else round(float(number))


def reported(size: int) -> str:
    """Return so many bytes in the largest unit of which there is one: 3.0 GiB."""
    power = min(max(size.bit_length() - 1, 0) // 10, len(_KINDS))
    return f"{size / 1_024**power:.1f} {_KINDS[power - 1]}iB" if power else f"{size} bytes"


# Reads how much memory this process's cgroups leave it. Reads /proc/self/cgroup and /sys/fs/cgroup.
#
# Shared memory is charged to the cgroup that touches a page first: the store's, which reserves all of it. Beyond the
# limit the kernel does not refuse memory but kills.
_UNLIMITED_BYTES = 1 << 60  # version 1 writes a number of pages near the largest there is
_DEPTH_MAX = 32


class _Names(NamedTuple):
    """A version's files, and the memory.stat lines that count reclaimable memory."""

    limit: str
    used: str
    file_pages: tuple[bytes, bytes]


_VERSION_1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", (b"total_inactive_file", b"total_active_file"))
_VERSION_2 = _Names("memory.max", "memory.current", (b"inactive_file", b"active_file"))


def left_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return what the tightest of our cgroups leaves, page cache counted as free; None: there is no limit."""
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    left: list[int] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            left += _left(cgroups, path, _VERSION_2)
        elif "memory" in controllers.split(","):
            left += _left(cgroups / "memory", path, _VERSION_1)
    return min(left, default=None)


def _left(root: Path, path: str, names: _Names) -> list[int]:
    """Return it for each cgroup with a limit, from the root down; in a container the root is its own cgroup."""
    found: list[int] = []
    parts = [part for part in PurePosixPath(path).parts if part not in {"/", ".."}][:_DEPTH_MAX]
    for depth in range(len(parts) + 1):
        group = root.joinpath(*parts[:depth])
        try:
            limit = (group / names.limit).read_bytes().strip()
            if not limit.isdigit() or int(limit) >= _UNLIMITED_BYTES:
                continue
            used_bytes = int((group / names.used).read_bytes())
            statistics = dict(line.split(b" ", 1) for line in (group / "memory.stat").read_bytes().splitlines())
            file_bytes = sum(int(statistics.get(name, 0)) for name in names.file_pages)
        except (OSError, ValueError):
            continue
        found.append(max(0, int(limit) - used_bytes + file_bytes))
    return found


KEPT_MAX = 100  # checkpoints per node: more is a typo
SPACED = 2  # the one that is old enough, and the one that takes its place: with one alone there would be a gap


class DoesNotFit(ValueError):
    """The copies need more memory than is free; the message has the arithmetic and what to do."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What one node holds: shards of ``shard_bytes``, its own and those of ``replicas`` - 1 others.

    Of each, the ``kept`` newest checkpoints that are whole, ``spaced`` older ones that reach further back, the one that
    is ``arriving``, and the one that is ``persisting`` (0 or 1), which must stay as it is until it is on disk.
    """

    shard_bytes: int
    replicas: int
    kept: int
    spaced: int
    arriving: int
    persisting: int

    @property
    def total_bytes(self) -> int:
        """The total memory."""
        return self.replicas * (self.kept + self.spaced + self.arriving + self.persisting) * self.shard_bytes

    def __str__(self) -> str:
        copies = f"{self.replicas} {'copy' if self.replicas == 1 else 'copies'}"
        parts = {"kept": self.kept, "spaced": self.spaced, "arriving": self.arriving, "persisting": self.persisting}
        held = " + ".join(f"{count} {name}" for name, count in parts.items() if count)
        return f"{copies} x ({held}) x {reported(self.shard_bytes)} = {reported(self.total_bytes)}"


def spaced_of(reach_s: float) -> int:
    """Return how many older checkpoints are needed so that one of them is always ``reach_s`` old; 0: none."""
    return SPACED if reach_s > 0 else 0


def plan_memory(shard_bytes: int, replicas: int, kept: int, *, persists: bool, reach_s: float = 0.0) -> MemoryPlan:
    """Return what a node with so many bytes of shards holds; ``persists``: some checkpoints go to disk, too.

    ``reach_s`` is how far back checkpoints reach; 0: no further than the newest. Raises ValueError.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes: expected 1 or more, got {shard_bytes}; it is what one node has of the state")
    if replicas < 1:
        raise ValueError(f"replicas: expected 1 or more, got {replicas}; 2 survive the loss of any one node")
    if not 1 <= kept <= KEPT_MAX:
        raise ValueError(f"kept: expected 1 to {KEPT_MAX}, got {kept}; with 1 the last whole checkpoint stays")
    if not 0 <= reach_s < math.inf:
        raise ValueError(f"reach: expected seconds, 0 or more, got {reach_s}; 0 keeps the newest alone")
    return MemoryPlan(shard_bytes, replicas, kept, spaced_of(reach_s), 1, int(persists))


def check_fits(plan: MemoryPlan, free_bytes: int) -> None:
    """Raise DoesNotFit if the free memory does not suffice."""
    if plan.total_bytes > free_bytes:
        raise DoesNotFit(
            f"{plan}, but {reported(free_bytes)} are free: keep fewer checkpoints, hold fewer copies,"
            " or spread the job's state over more nodes"
        )


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
    allowed_bytes = left_bytes()
    if allowed_bytes is not None:
        found.append((allowed_bytes, "the store's control group"))
    return min(found)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62
