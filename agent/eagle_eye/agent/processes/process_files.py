"""Reads of processes in /proc, each bounded. Touches: /proc.

Processes end at any moment, also between two reads: None means that it is gone.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eagle_eye.agent.files.bounded import content

ENVIRON_BYTES_MAX = 1 << 20  # a shell with many functions exports some 100 KB; the kernel allows about 2 MB
STAT_BYTES_MAX = 4_096
STATUS_BYTES_MAX = 16_384  # the kernel writes about 1,500
CGROUP_BYTES_MAX = 65_536
ARGUMENTS_BYTES_MAX = 4_096
IO_BYTES_MAX = 4_096
MAPS_BYTES_MAX = 1 << 20  # a training process has 300 KB of them
_USER = re.compile(rb"^Uid:[ \t]+([0-9]{1,10})[ \t]", re.MULTILINE)
_OWN_PID = re.compile(rb"^NSpid:(?:[ \t]+[0-9]{1,10}){0,32}?[ \t]+([0-9]{1,10})$", re.MULTILINE)
_MOVED = re.compile(rb"^[rw]char:[ \t]+([0-9]{1,20})$", re.MULTILINE)
_TORCH = b"/libtorch"  # libtorch_cpu.so, libtorch_cuda.so, libtorch_python.so
_PROGRAMS = frozenset({"torchrun", "deepspeed", "accelerate", "ft_launcher", "horovodrun", "mpirun", "mpiexec", "srun"})
_MODULES = (
    *("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed.launcher."),
    *("nvidia_resiliency_ext.fault_tolerance.launcher", "eagle_eye.orchestrators.launch."),
)
_OPTIONS_WITH_VALUE = ("-W", "-X")  # of the Python interpreter


class Stat(NamedTuple):
    """A process's state letter, its parent and its start, in clock ticks since boot.

    ``cpu_ticks`` is the processor time of its threads, and of its children that have ended and were waited for.
    """

    state: str
    parent: int
    started: int
    cpu_ticks: int = 0

    @property
    def ended(self) -> bool:
        """Whether it is a zombie."""
        return self.state in ("Z", "X")


class ProcessStatus(NamedTuple):
    """Who a process is: the user that started it, and its number in its innermost namespace, its container's own.

    The user is the real one: a program with the set-user-ID bit runs as root and does what its user says.
    """

    user: int
    own_pid: int


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
        spent = [field for field in fields[11:15] if field.isdigit()]
        return Stat(fields[0].decode("ascii", "replace"), int(fields[1]), int(fields[19]), sum(map(int, spent)))

    def io_bytes(self, pid: int) -> int:
        """Return how much its system calls have read and written, from whatever; 0 when it is gone."""
        data = self._read(pid, "io", IO_BYTES_MAX)
        return sum(int(number) for number in _MOVED.findall(data or b""))

    def status(self, pid: int) -> ProcessStatus | None:
        """Return whose process it is, and its own number."""
        data = self._read(pid, "status", STATUS_BYTES_MAX)
        if data is None:
            return None
        user, own_pid = _USER.search(data), _OWN_PID.search(data)
        if user is None:
            raise OSError(errno.EINVAL, "its status names no user", f"{self._root}/{pid}/status")
        return ProcessStatus(int(user[1]), int(own_pid[1]) if own_pid is not None else pid)

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
            return content(f"{self._root}/{pid}/{name}", most)
        except (FileNotFoundError, ProcessLookupError):
            return None


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
