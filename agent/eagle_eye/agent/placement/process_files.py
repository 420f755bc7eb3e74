"""Reads of processes in /proc, each bounded. Touches: /proc.

Processes end at any moment, also between two reads: None means that it is gone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ENVIRON_BYTES_MAX = 1 << 20  # a shell with many functions exports some 100 KB
STAT_BYTES_MAX = 4_096
CGROUP_BYTES_MAX = 65_536
ARGUMENTS_BYTES_MAX = 4_096
MAPS_BYTES_MAX = 1 << 20  # a training process has 300 KB of them
_READ_BYTES = 16_384
_TORCH = b"/libtorch"  # libtorch_cpu.so, libtorch_cuda.so, libtorch_python.so
_PROGRAMS = frozenset({"torchrun", "deepspeed", "accelerate", "ft_launcher", "horovodrun", "mpirun", "mpiexec", "srun"})
_MODULES = (
    *("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed.launcher."),
    *("nvidia_resiliency_ext.fault_tolerance.launcher", "eagle_eye.orchestrators.launch."),
)
_OPTIONS_WITH_VALUE = ("-W", "-X")  # of the Python interpreter


class Stat(NamedTuple):
    """A process's state letter, its parent and its start, in clock ticks since boot."""

    state: str
    parent: int
    started: int

    @property
    def ended(self) -> bool:
        """Whether it is a zombie."""
        return self.state in ("Z", "X")


class ProcessFiles:
    """The processes below ``root``. What may not be read raises PermissionError, other errors OSError."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)

    def pids(self) -> set[int]:
        """Return the processes that there are."""
        return {int(name) for name in os.listdir(self._root) if name.isdecimal()}  # noqa: PTH208 - a third of the time

    def environment(self, pid: int) -> bytes | None:
        """Return the environment that it was started with; empty for a kernel thread; one byte too long if too long."""
        return self._read(pid, "environ", ENVIRON_BYTES_MAX + 1)

    def stat(self, pid: int) -> Stat | None:
        """Return its state, parent and start."""
        data = self._read(pid, "stat", STAT_BYTES_MAX)
        fields = data.rpartition(b")")[2].split() if data else []  # the name before may hold anything
        if len(fields) < 20 or not (fields[1].isdigit() and fields[19].isdigit()):
            return None
        return Stat(fields[0].decode("ascii", "replace"), int(fields[1]), int(fields[19]))

    def cgroup(self, pid: int) -> str:
        """Return its control groups' lines; empty where they cannot be read."""
        try:
            return (self._read(pid, "cgroup", CGROUP_BYTES_MAX) or b"").decode("utf-8", "replace")
        except OSError:
            return ""

    def has_torch(self, pid: int) -> bool:
        """Whether torch's libraries are mapped into it, as far as its first MAPS_BYTES_MAX of mappings tell."""
        try:
            return _TORCH in (self._read(pid, "maps", MAPS_BYTES_MAX) or b"")
        except OSError:
            return False

    def is_launcher(self, pid: int) -> bool:
        """Whether its command line is that of a launcher, which may have torch mapped and is no rank."""
        try:
            data = self._read(pid, "cmdline", ARGUMENTS_BYTES_MAX) or b""
        except OSError:
            return False
        return is_launcher([item.decode("utf-8", "replace") for item in data.split(b"\0")])

    def _read(self, pid: int, name: str, most: int) -> bytes | None:
        try:
            descriptor = os.open(f"{self._root}/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError):
            return None
        try:
            parts: list[bytes] = []
            left = most
            while left > 0 and (part := os.read(descriptor, min(left, _READ_BYTES))):
                parts.append(part)
                left -= len(part)
            return b"".join(parts)
        except ProcessLookupError:
            return None
        finally:
            os.close(descriptor)


def is_launcher(arguments: Sequence[str]) -> bool:
    """Whether a command line starts a launcher: by itself, or as a Python script or module."""
    rest = iter(arguments)
    program = next(rest, "").rpartition("/")[2]
    if not program.startswith("python"):
        return program in _PROGRAMS
    for argument in rest:
        if argument == "-m":
            return next(rest, "").startswith(_MODULES)
        if argument in _OPTIONS_WITH_VALUE:
            next(rest, "")
        elif not argument.startswith("-"):
            return argument.rpartition("/")[2] in _PROGRAMS
        elif argument == "-c":
            return False
    return False
