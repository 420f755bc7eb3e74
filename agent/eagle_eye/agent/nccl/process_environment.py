"""What training processes were told about NCCL and PyTorch's recorder, and where their files are. Touches: /proc.

A process's environment says which sources are switched on and where they write, so that nothing needs to be
configured twice. What a program sets by ``os.environ`` after its start is not in /proc and has to be configured.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from eagle_eye.agent.bounded_file import content
from eagle_eye.agent.training_processes import TrainingProcess

ENVIRON_BYTES_MAX = 2 << 20  # the kernel's limit for arguments and environment under the usual stack limit
STATUS_BYTES_MAX = 16_384  # the kernel writes about 1,500
VALUE_BYTES_MAX = 4_096  # PATH_MAX: a longer one is no path
PROCESSES_MAX = 64  # ranks of one node; nodes have 8 or 16 GPUs

# Everything else is not kept: environments hold secrets.
_KEPT = frozenset(
    {
        *("HOME", "XDG_CACHE_HOME", "HOSTNAME", "SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID", "LSB_JOBID"),
        *("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"),
        *("NCCL_INSPECTOR_ENABLE", "NCCL_INSPECTOR_DUMP_DIR", "NCCL_INSPECTOR_PROM_DUMP"),
        *("NCCL_RAS_ENABLE", "NCCL_RAS_ADDR"),
    }
)


@dataclass(frozen=True)
class ProcessEnvironment:
    """One process's own view: ``own_pid`` is its number in its container, ``uid`` the user it runs as.

    ``root`` and ``folder`` are where its absolute and relative paths begin, as this agent sees them.
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
        """Return where a path of the process lies as this agent sees it."""
        return self.root / text.lstrip("/") if text.startswith("/") else self.folder / text


class Environments:
    """The environments of training processes, each read once; ``unreadable`` says of whom and why not."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self.unreadable: dict[int, str] = {}
        self._proc = proc
        self._known: dict[TrainingProcess, ProcessEnvironment] = {}

    def of(self, processes: Iterable[TrainingProcess]) -> dict[TrainingProcess, ProcessEnvironment]:
        """Return the environments of those whose environment may be read; others are forgotten."""
        self.unreadable = {}
        found: dict[TrainingProcess, ProcessEnvironment] = {}
        for process in processes:
            if len(found) >= PROCESSES_MAX:
                self.unreadable[process.pid] = f"more than {PROCESSES_MAX} training processes"
                continue
            known = self._known.get(process)
            try:
                found[process] = known or self._read(process.pid)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended since it was found
            except (OSError, ValueError) as error:
                reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
                self.unreadable[process.pid] = reason
        self._known = found
        return found

    def problem(self) -> str:
        """Return why some environment could not be read, in words; "" where all could."""
        if not self.unreadable:
            return ""
        pid, reason = next(iter(self.unreadable.items()))
        more = f" and {len(self.unreadable) - 1} more" if len(self.unreadable) > 1 else ""
        return f"environment of process {pid}{more}: {reason}; run the agent as root or as the job's user"

    def _read(self, pid: int) -> ProcessEnvironment:
        folder = self._proc / str(pid)
        own_pid, uid = _who(content(str(folder / "status"), STATUS_BYTES_MAX), pid)
        values = _kept(content(str(folder / "environ"), ENVIRON_BYTES_MAX))
        # A process that has gone takes its /proc folder along; what it left is found by plain paths where root is ours.
        shares_root = _same(folder / "root", Path("/"))
        return ProcessEnvironment(
            own_pid=own_pid,
            uid=uid,
            root=Path("/") if shares_root else folder / "root",
            folder=(folder / "cwd").readlink() if shares_root else folder / "cwd",
            values=values,
        )


def _kept(raw: bytes) -> dict[str, str]:
    values = {}
    for item in raw.split(b"\0"):
        name, _, value = item.partition(b"=")
        if len(value) <= VALUE_BYTES_MAX and len(name) <= 64:
            text = os.fsdecode(name)
            if text in _KEPT:
                values[text] = os.fsdecode(value)
    return values


def _who(status: bytes, pid: int) -> tuple[int, int]:
    """Return the process's number in its innermost namespace and its effective user. Raises ValueError."""
    own_pid, uid = pid, -1
    for line in status.decode("ascii", errors="replace").splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if key == "Uid" and len(words) == 4 and words[1].isdecimal():
            uid = int(words[1])
        elif key == "NSpid" and words and words[-1].isdecimal():
            own_pid = int(words[-1])
    if uid < 0:
        raise ValueError("its status names no user")
    return own_pid, uid


def _same(one: Path, other: Path) -> bool:
    a, b = one.stat(), other.stat()
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
