"""Selects the processes to examine: a job's training processes on this node and their descendants. Reads /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_eye.agent.processes.process_files import ProcessFiles
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
