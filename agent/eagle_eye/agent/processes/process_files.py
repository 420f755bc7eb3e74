"""Bounded reads of process files in /proc. Touches: /proc.

Processes may exit at any moment, also between two reads: None means that the process is gone.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eagle_eye.agent.files.foreign import content

ENVIRON_BYTES_MAX = 1 << 20  # a shell with many functions exports some 100 KB; the kernel allows about 2 MB
STAT_BYTES_MAX = 4_096
STATUS_BYTES_MAX = 16_384  # the kernel writes about 1,500
CGROUP_BYTES_MAX = 65_536
ARGUMENTS_BYTES_MAX = 4_096
IO_BYTES_MAX = 4_096
MAPS_BYTES_MAX = 1 << 20  # a training process has 300 KB
_USER = re.compile(rb"^Uid:[ \t]+([0-9]{1,10})[ \t]", re.MULTILINE)
_OWN_PID = re.compile(rb"^NSpid:(?:[ \t]+[0-9]{1,10}){0,32}?[ \t]+([0-9]{1,10})$", re.MULTILINE)
_TRACER = re.compile(rb"^TracerPid:[ \t]+([0-9]{1,10})$", re.MULTILINE)
_MOVED = re.compile(rb"^[rw]char:[ \t]+([0-9]{1,20})$", re.MULTILINE)
_TORCH = b"/libtorch"  # libtorch_cpu.so, libtorch_cuda.so, libtorch_python.so
_PROGRAMS = frozenset({"torchrun", "deepspeed", "accelerate", "ft_launcher", "horovodrun", "mpirun", "mpiexec", "srun"})
_MODULES = (
    *("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed.launcher."),
    *("nvidia_resiliency_ext.fault_tolerance.launcher", "eagle_eye.orchestrators.launch."),
)
STOPPED = "T"  # by SIGSTOP or its like; a debugger's stop is a "t"
_OPTIONS_WITH_VALUE = ("-W", "-X")  # of the Python interpreter


class Stat(NamedTuple):
    """A process's state letter, parent pid and start time in clock ticks since boot.

    ``cpu_ticks`` is the CPU time of its threads and of its reaped children.
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
    """A process's owner, and its pid in its innermost namespace, that of its container.

    The user is the real one: a setuid program runs as root but on its user's behalf.
    """

    user: int
    own_pid: int


class ProcessFiles:
    """The processes below ``root``. A permission error raises PermissionError, other errors OSError."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)

    def pids(self) -> set[int]:
        """Return all pids."""
        return {int(name) for name in os.listdir(self._root) if name.isdecimal()}  # noqa: PTH208 - a third of the time

    def environment(self, pid: int) -> bytes | None:
        """Return its initial environment; empty for a kernel thread; one byte over the limit if too long."""
        return self._read(pid, "environ", ENVIRON_BYTES_MAX + 1)

    def stat(self, pid: int) -> Stat | None:
        """Return its state, parent and start time."""
        data = self._read(pid, "stat", STAT_BYTES_MAX)
        fields = data.rpartition(b")")[2].split() if data else []  # the name before may hold anything
        if len(fields) < 20 or not (fields[1].isdigit() and fields[19].isdigit()):
            return None
        spent = [field for field in fields[11:15] if field.isdigit()]
        return Stat(fields[0].decode("ascii", "replace"), int(fields[1]), int(fields[19]), sum(map(int, spent)))

    def io_bytes(self, pid: int) -> int:
        """Return the bytes its system calls have read and written, of any kind; 0 when it is gone."""
        data = self._read(pid, "io", IO_BYTES_MAX)
        return sum(int(number) for number in _MOVED.findall(data or b""))

    def status(self, pid: int) -> ProcessStatus | None:
        """Return its owner and its own pid."""
        data = self._read(pid, "status", STATUS_BYTES_MAX)
        if data is None:
            return None
        user, own_pid = _USER.search(data), _OWN_PID.search(data)
        if user is None:
            raise OSError(errno.EINVAL, "its status names no user", f"{self._root}/{pid}/status")
        return ProcessStatus(int(user[1]), int(own_pid[1]) if own_pid is not None else pid)

    def is_stopped(self, pid: int) -> bool | None:
        """Return whether a signal has stopped it and no debugger is attached; None if that cannot be read."""
        try:
            stat = self.stat(pid)
            if stat is None or stat.state != STOPPED:
                return None if stat is None else False
            tracer = _TRACER.search(self._read(pid, "status", STATUS_BYTES_MAX) or b"")
        except OSError:
            return None
        return None if tracer is None else int(tracer[1]) == 0

    def cgroup(self, pid: int) -> str:
        """Return the lines of its cgroup file; empty where unreadable."""
        try:
            return (self._read(pid, "cgroup", CGROUP_BYTES_MAX) or b"").decode("utf-8", "replace")
        except OSError:
            return ""

    def has_torch(self, pid: int) -> bool:
        """Whether torch's libraries are among the first MAPS_BYTES_MAX of its mappings."""
        try:
            return _TORCH in (self._read(pid, "maps", MAPS_BYTES_MAX) or b"")
        except OSError:
            return False

    def is_launcher(self, pid: int) -> bool:
        """Whether its command line is a launcher's, which may have torch mapped but is not a rank."""
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
    """Whether a command line starts a launcher, directly or as a Python script or module."""
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
