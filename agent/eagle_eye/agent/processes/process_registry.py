"""Registry of this node's training processes and the GPU each one uses.

One collector publishes them; readers of sources that name a process or rank look up the row that the numbers belong to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingProcess:
    """One rank of a job on this node.

    ``device`` is the row of the GPU that the rank uses, NVML's index; the local rank where there is no GPU. ``attempt``
    counts the job's restarts from 0; ``role`` groups comparable ranks, empty when unknown. ``starting``: only its
    launcher says so far that it is a rank, and ``device`` is the GPU that it is expected to open.
    """

    pid: int
    job: str
    rank: int
    world_size: int
    device: int
    local_rank: int = 0
    attempt: int = 0
    role: str = ""
    starting: bool = False

    def who(self) -> dict[str, object]:
        """Return the attributes that identify the process in an event."""
        return {"rank": self.rank, "job": self.job, "attempt": self.attempt}


class TrainingProcesses:
    """The newest list of this node's training processes; thread-safe."""

    def __init__(self) -> None:
        self._all: tuple[TrainingProcess, ...] = ()

    def publish(self, processes: Sequence[TrainingProcess]) -> None:
        """Replace the list."""
        self._all = tuple(processes)  # one assignment: readers see either the old or the new list

    def all(self) -> tuple[TrainingProcess, ...]:
        """Return every process of the newest list; empty when none was found yet."""
        return self._all

    def by_pid(self, pid: int) -> TrainingProcess | None:
        """Return the process; None when it is not a training process of this node."""
        return next((process for process in self._all if process.pid == pid), None)
