"""Reads how much memory this process's cgroups leave it. Reads /proc/self/cgroup and /sys/fs/cgroup.

Shared memory is charged to the cgroup that touches a page first: the store's, which reserves all of it. Beyond the
limit the kernel does not refuse memory but kills.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import NamedTuple

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
