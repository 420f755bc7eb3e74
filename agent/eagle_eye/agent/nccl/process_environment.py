"""Reads training processes' NCCL, flight-recorder and store settings, and locates their files. Touches: /proc.

A process's environment says which sources are enabled and where they write, so that nothing needs to be configured
twice. What a program sets through ``os.environ`` after its start is not in /proc and has to be configured.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from eagle_eye.agent.files.foreign import OWN_ROOT
from eagle_eye.agent.processes.process_files import ENVIRON_BYTES_MAX, ProcessFiles
from eagle_eye.agent.processes.process_registry import TrainingProcess

VALUE_BYTES_MAX = 4_096  # PATH_MAX: a longer value is not a path
PROCESSES_MAX = 64  # ranks of one node; nodes have 8 or 16 GPUs

# Nothing else is kept: environments hold secrets.
_KEPT = frozenset(
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
            if len(found) >= PROCESSES_MAX:
                self.unreadable[process.pid] = f"more than {PROCESSES_MAX} training processes"
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
        if len(value) <= VALUE_BYTES_MAX and len(name) <= 64:
            text = os.fsdecode(name)
            if text in _KEPT:
                values[text] = os.fsdecode(value)
    return values


def _same(one: Path, other: Path) -> bool:
    a, b = one.stat(), other.stat()
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
