"""What evidence is gathered of: the suspects, their files in /proc, and the interface of its sources."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from eagle_eye.agent.evidence.bundle import Bundle
from eagle_eye.agent.files.foreign import NotTheirs, content, follow, open_file
from eagle_eye.agent.processes.process_files import ENVIRON_BYTES_MAX, ProcessFiles
from eagle_eye.agent.processes.process_registry import TrainingProcess

PROCESSES_MAX = 64  # ranks first, then their children: data loaders and the like
PIDS_MAX = 65_536  # of the whole host, scanned for children


@dataclass(frozen=True)
class Suspect:
    """A process to examine; ``rank`` None: a rank's descendant.

    ``started``, in the kernel's ticks since boot, distinguishes it from a later owner of its pid.
    """

    pid: int
    started: int
    label: str
    rank: TrainingProcess | None

    def is_still(self, proc: Path) -> bool:
        """Whether the pid still belongs to this process; False also when the pid is free."""
        return _parent_and_start(proc, self.pid)[1] == self.started

    def started_s(self, proc: Path) -> float:
        """Return when the process started, Unix seconds by the current wall clock. Raises OSError, ValueError."""
        up_s = float((proc / "uptime").read_text(encoding="ascii").split()[0])
        return time.time() - up_s + self.started / os.sysconf("SC_CLK_TCK")


def suspects(training: Iterable[TrainingProcess], proc: Path = Path("/proc")) -> tuple[list[Suspect], int]:
    """Return the processes to examine, and how many more were left out."""
    found: dict[int, Suspect] = {}
    for process in training:
        started = _parent_and_start(proc, process.pid)[1]
        if started >= 0:
            label = f"rank-{process.rank}-pid-{process.pid}"
            found.setdefault(process.pid, Suspect(process.pid, started, label, process))
    children = _descendants(list(found.values()), proc) if found else []
    everybody = [*found.values(), *children]
    return everybody[:PROCESSES_MAX], max(0, len(everybody) - PROCESSES_MAX)


def _descendants(roots: Sequence[Suspect], proc: Path) -> list[Suspect]:
    """Return the descendants of ranks that are not ranks themselves, nearest first."""
    children: dict[int, list[tuple[int, int]]] = {}
    for pid in _pids(proc):
        parent, started = _parent_and_start(proc, pid)
        if parent > 0:
            children.setdefault(parent, []).append((pid, started))
    known = {root.pid for root in roots}
    found: list[Suspect] = []
    generation = [(root.pid, root.label) for root in roots]
    while generation:
        below = []
        for parent, label in generation:
            for pid, started in sorted(children.get(parent, ())):
                if pid not in known:
                    known.add(pid)
                    rank = label.partition("-pid-")[0].partition("-child")[0]
                    found.append(Suspect(pid, started, f"{rank}-child-pid-{pid}", None))
                    below.append((pid, rank))
        generation = below
    return found


def _pids(proc: Path) -> list[int]:
    try:
        return sorted(ProcessFiles(proc).pids())[:PIDS_MAX]
    except OSError:
        return []


def _parent_and_start(proc: Path, pid: int) -> tuple[int, int]:
    """Return a process's parent and start time, in the kernel's ticks since boot; (-1, -1) when it is gone."""
    try:
        stat = ProcessFiles(proc).stat(pid)
    except OSError:
        stat = None
    return (-1, -1) if stat is None else (stat.parent, stat.started)


READ_BYTES = 1 << 16


def read(path: Path, bytes_max: int) -> tuple[bytes, bool]:
    """Return a file's first bytes, and whether there was more. Raises OSError."""
    found = content(str(path), bytes_max + 1)
    return found[:bytes_max], len(found) > bytes_max


def read_open(descriptor: int, bytes_max: int) -> tuple[bytes, bool]:
    """Return an open file's first bytes, and whether there was more. Raises OSError.

    Reads no more than the file's reported size: files of /proc report 0, and some never end.
    """
    size = os.fstat(descriptor).st_size
    wanted = min(size, bytes_max)
    found = bytearray()
    while len(found) < wanted:
        data = os.read(descriptor, min(READ_BYTES, wanted - len(found)))
        if not data:
            break
        found += data
    return bytes(found), size > bytes_max


def environment(proc: Path, pid: int) -> tuple[dict[str, str], bool]:
    """Return a process's initial environment, and whether there was more. Raises OSError."""
    raw = ProcessFiles(proc).environment(pid)
    if raw is None:
        raise _gone(pid)
    variables: dict[str, str] = {}
    for entry in raw[:ENVIRON_BYTES_MAX].split(b"\0"):
        name, found, value = entry.partition(b"=")
        if found and name:
            variables[name.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
    return variables, len(raw) > ENVIRON_BYTES_MAX


def open_inside(proc: Path, pid: int, path: str) -> int:
    """Return a descriptor of what the process sees at the absolute ``path``, which cannot be read (O_PATH).

    Raises OSError, NotTheirs as ``foreign_file.follow`` does.
    """
    return follow(*_inside(proc, pid, path))[0]


def open_file_of(proc: Path, pid: int, path: str) -> int:
    """Return a descriptor to read the regular file that the process sees at ``path`` and its user owns.

    Raises OSError, NotTheirs.
    """
    status = ProcessFiles(proc).status(pid)
    if status is None:
        raise _gone(pid)
    return open_file(*_inside(proc, pid, path), status.user)


def _inside(proc: Path, pid: int, path: str) -> tuple[Path, Path]:
    """Return the process's path as this agent sees it, and the process's root folder."""
    if not path.startswith("/"):
        raise NotTheirs(f"{path[:80]!r}: expected an absolute path")
    root = proc / str(pid) / "root"
    return root / path.lstrip("/"), root


def _gone(pid: int) -> OSError:
    return ProcessLookupError(errno.ESRCH, f"process {pid} has ended")


def why(error: Exception) -> str:
    """Return what went wrong as a few words."""
    if isinstance(error, NotTheirs):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"


TOOLS_EARLIER_S = 0.25  # tools are killed this long before the deadline, so that their output can still be included


@dataclass(frozen=True)
class Scene:
    """What a source may examine, where it puts its findings, and its deadline, by ``monotonic_s``."""

    suspects: Sequence[Suspect]
    bundle: Bundle
    until_s: float
    proc: Path = Path("/proc")
    monotonic_s: Callable[[], float] = time.monotonic

    def left_s(self) -> float:
        """Return the seconds left; 0 when there are none."""
        return max(0.0, self.until_s - self.monotonic_s())

    @property
    def tools_until_s(self) -> float:
        """Deadline for host programs."""
        return self.until_s - TOOLS_EARLIER_S


class Task(NamedTuple):
    """One thing to find out. ``run`` has a thread of its own, may hang forever, and may raise anything."""

    what: str
    run: Callable[[], None]


class EvidenceSource(Protocol):
    """One kind of evidence."""

    @property
    def name(self) -> str:
        """The source's name in the manifest."""
        ...

    def tasks(self, scene: Scene) -> list[Task]:
        """Return the tasks; must not block."""
        ...
