"""Bounded reads of process files in /proc, and the settings that a training process was started with. Touches: /proc.

Processes may exit at any moment, also between two reads: None means that the process is gone.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from eagle_eye.agent.foreign_files import OWN_ROOT, content
from eagle_eye.agent.processes.process_registry import TrainingProcess

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


# Reads training processes' NCCL, flight-recorder and store settings, and locates their files. Touches: /proc.
#
# A process's environment says which sources are enabled and where they write, so that nothing needs to be configured
# twice. What a program sets through ``os.environ`` after its start is not in /proc and has to be configured.

SETTING_BYTES_MAX = 4_096  # PATH_MAX: a longer value is not a path
ENVIRONMENTS_MAX = 64  # ranks of one node; nodes have 8 or 16 GPUs

# Nothing else is kept: environments hold secrets.
_SETTINGS = frozenset(
    {
        *("HOME", "XDG_CACHE_HOME", "HOSTNAME", "SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID", "LSB_JOBID"),
        *("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"),
        *("NCCL_INSPECTOR_ENABLE", "NCCL_INSPECTOR_DUMP_DIR", "NCCL_INSPECTOR_PROM_DUMP"),
        *("NCCL_RAS_ENABLE", "NCCL_RAS_ADDR"),
        *("EAGLE_EYE_NODE", "EAGLE_EYE_CHECKPOINT_STORE"),
    }
)


@dataclass(frozen=True)
class ProcessEnvironment:
    """One process's own view: ``own_pid`` is its pid in its container, ``uid`` the user that started it.

    ``root`` and ``folder`` are where its absolute and relative paths begin, as this agent sees them; ``folder`` lies
    below ``root``.
    """

    own_pid: int
    uid: int
    root: Path
    folder: Path
    values: Mapping[str, str]

    def first(self, *names: str) -> str:
        """Return the first of the variables that is set and not empty; "" where none is."""
        return next((self.values[name] for name in names if self.values.get(name)), "")

    def path(self, text: str) -> Path:
        """Return a path of the process as this agent sees it."""
        return self.root / text.lstrip("/") if text.startswith("/") else self.folder / text


def root_of(path: Path, environment: ProcessEnvironment | None) -> Path:
    """Return the folder that no link on the way may lead out of: / for a path from the configuration."""
    return environment.root if environment is not None and path.is_relative_to(environment.root) else OWN_ROOT


class Environments:
    """The environments of training processes, each read once; ``unreadable`` says which could not be read and why."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self.unreadable: dict[int, str] = {}
        self._proc = proc
        self._files = ProcessFiles(proc)
        self._known: dict[TrainingProcess, ProcessEnvironment] = {}

    def of(self, processes: Iterable[TrainingProcess]) -> dict[TrainingProcess, ProcessEnvironment]:
        """Return the environments that are readable, and forget those of other processes."""
        self.unreadable = {}
        found: dict[TrainingProcess, ProcessEnvironment] = {}
        for process in processes:
            if len(found) >= ENVIRONMENTS_MAX:
                self.unreadable[process.pid] = f"more than {ENVIRONMENTS_MAX} training processes"
                continue
            known = self._known.get(process)
            try:
                found[process] = known or self._read(process.pid)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has exited since it was found
            except PermissionError as error:
                self.unreadable[process.pid] = f"{error.strerror}; run the agent as root or as the job's user"
            except OSError as error:
                self.unreadable[process.pid] = error.strerror or str(error)
        self._known = found
        return found

    def problem(self) -> str:
        """Return why some environment could not be read, in words; "" where all could."""
        if not self.unreadable:
            return ""
        pid, reason = next(iter(self.unreadable.items()))
        more = f" and {len(self.unreadable) - 1} more" if len(self.unreadable) > 1 else ""
        return f"environment of process {pid}{more}: {reason}"

    def _read(self, pid: int) -> ProcessEnvironment:
        status, environ = self._files.status(pid), self._files.environment(pid)
        if status is None or environ is None:
            raise ProcessLookupError
        if len(environ) > ENVIRON_BYTES_MAX:
            raise OSError(errno.E2BIG, f"more than {ENVIRON_BYTES_MAX} bytes")
        at = self._proc / str(pid)
        # An exited process's /proc folder is gone; its files are found by plain paths where these mean the same to it
        # and to this agent: Slurm gives jobs their own /tmp by mounts, below the host's root.
        same = _same(at / "root", OWN_ROOT) and _same(at / "ns/mnt", Path("/proc/self/ns/mnt"))
        root = OWN_ROOT if same else at / "root"
        folder, below = (at / "cwd").readlink(), (at / "root").readlink()
        return ProcessEnvironment(
            own_pid=status.own_pid,
            uid=status.user,
            root=root,
            # The kernel gives both links as seen from this agent's own root, which may be above the process's.
            folder=root / (folder.relative_to(below) if folder.is_relative_to(below) else ""),
            values=_kept(environ),
        )


def _kept(raw: bytes) -> dict[str, str]:
    values = {}
    for item in raw.split(b"\0"):
        name, _, value = item.partition(b"=")
        if len(value) <= SETTING_BYTES_MAX and len(name) <= 64:
            text = os.fsdecode(name)
            if text in _SETTINGS:
                values[text] = os.fsdecode(value)
    return values


def _same(one: Path, other: Path) -> bool:
    a, b = one.stat(), other.stat()
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
