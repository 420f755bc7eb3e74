"""Reads how much memory the agent's cgroup leaves for its child processes. Reads /proc and /sys/fs/cgroup."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from eagle_eye.agent.files.bounded import content

LINES_BYTES_MAX = 1 << 14
NUMBER_BYTES_MAX = 64
DEPTH_MAX = 32
_UNLIMITED_BYTES = 1 << 60  # version 1 writes a number of pages near the largest there is


def memory_limit_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the lowest limit of our cgroup and its ancestors; None: there is none, or it is unknown.

    ``memory.high`` counts: processes beyond it are throttled to a standstill.
    """
    try:
        text = content(str(proc / "self/cgroup"), LINES_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return None
    limits: list[int] = []
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":  # version 2
            for place in ("", "unified"):
                limits += _limits(cgroups / place, path, ("memory.max", "memory.high"))
        elif "memory" in controllers.split(","):
            limits += _limits(cgroups / "memory", path, ("memory.limit_in_bytes",))
    return min(limits, default=None)


def _limits(root: Path, path: str, names: tuple[str, ...]) -> list[int]:
    """Return the limits from the root down to ``path``; inside a container the root is its own cgroup."""
    found: list[int] = []
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")][:DEPTH_MAX]
    for depth in range(len(parts) + 1):
        for name in names:
            try:
                text = content(str(root.joinpath(*parts[:depth], name)), NUMBER_BYTES_MAX).strip()
            except OSError:
                continue
            if text.isdigit() and int(text) < _UNLIMITED_BYTES:
                found.append(int(text))
    return found
