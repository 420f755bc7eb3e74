"""The log state of this node's ranks, from when a rank is known until shortly after its exit. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from eagle_eye.agent.loop.drops import Drops
from eagle_eye.agent.processes.process_registry import TrainingProcess
from eagle_eye.agent.training_logs.rank_course import RankCourse

LINGER_S = 10.0  # how long after a process was last seen its last lines are still accepted

Key = tuple[str, int, int]  # job, attempt, pid


@dataclass
class _Known:
    process: TrainingProcess
    course: RankCourse
    listed_s: float


class RankCourses:
    """What logs say about each training process of this node. Times are of the agent's monotonic clock."""

    def __init__(self) -> None:
        self._known: dict[Key, _Known] = {}
        self._now_s = 0.0

    def note(self, listed: Sequence[TrainingProcess], now_s: float) -> None:
        """Update the running processes; those gone for a while are forgotten."""
        self._now_s = now_s
        for process in listed:
            known = self._known.get(key(process))
            if known is None:
                self._known[key(process)] = _Known(process, RankCourse(process.world_size), now_s)
            else:
                known.process, known.listed_s = process, now_s
        for name, known in list(self._known.items()):
            if now_s - known.listed_s > LINGER_S:
                del self._known[name]

    def processes(self) -> list[TrainingProcess]:
        """Return the running processes, and those that exited a moment ago."""
        return [known.process for known in self._known.values()]

    def of(self, process: TrainingProcess) -> RankCourse | None:
        """Return the process's course; None once it is forgotten."""
        known = self._known.get(key(process))
        return known.course if known is not None else None

    def pause(self, stamp_s: float | None) -> None:
        """Exclude the time until now from all ranks' steps; see ``RankCourse.pause``."""
        for known in self._known.values():
            known.course.pause(self._now_s, stamp_s)

    def rows(self, left_out: Collection[int], drops: Drops) -> dict[int, dict[str, float]]:
        """Return the rows for the interval ending now by device, except ``left_out``.

        An exited rank's last values are included once; where two ranks claim a device, the newest attempt's row is
        kept.
        """
        rows: dict[int, dict[str, float]] = {}
        for known in sorted(self._known.values(), key=lambda item: (item.listed_s, item.process.attempt)):
            device = known.process.device
            if known.process.starting or (known.listed_s != self._now_s and not known.course.fresh):
                continue
            row = known.course.row()
            if not row or device in left_out:
                continue
            if device in rows:
                drops.count("rank_device_conflicts")
            rows[device] = row
        return rows


def key(process: TrainingProcess) -> Key:
    """Return the process's unique key on this node."""
    return process.job, process.attempt, process.pid
