"""The log state of this node's ranks, from when a rank is known until shortly after its exit. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from eagle_eye.agent.collector import Drops
from eagle_eye.agent.processes.process_registry import TrainingProcess
from eagle_eye.agent.training_logs.lines import STEP_MAX, LogReading

SOURCES_MAX = 16  # logs about one rank: its two outputs, a shared one, structured lines, event files
ARRIVAL_S_MIN = 10.0  # lines arrive within a second of being written: over a shorter time the error would dominate
LOG_LINES = "train_log_lines_since_step"
STAMP_SLACK_S = 30.0  # buffers delay lines; a timestamp further ahead of our clock means that a clock was set


@dataclass
class _Source:
    """One log's progress: its last step, how many steps its newest line covers, and since when steps count."""

    step: int
    covers: int = 1
    since_step: int = 0
    since_stamp_s: float | None = None
    since_s: float = 0.0  # the agent's clock


class RankCourse:
    """One rank's course. Times are of the agent's monotonic clock.

    Values are means over the steps finished since the last row; while none finish they repeat. A line covers the steps
    since the line before it in the same log. Where no line gives the step duration, it is derived from the lines'
    timestamps, and without those from their arrival times.
    """

    def __init__(self, world_size: int) -> None:
        self.step: int | None = None
        self.warnings: set[str] = set()  # those of NCCL that were reported, without their numbers
        self._world_size = max(1, world_size)
        self._sources: dict[object, _Source] = {}
        self._leader: object = None  # the log that reported the step
        self._timed = False  # some line gives step durations
        self._sums: dict[str, tuple[float, int]] = {}
        self._odd: set[str] = set()
        self._row: dict[str, float] = {}

    def learn(self, reading: LogReading, source: object, now_s: float) -> None:
        """Take a line from before: it sets the position in its log and is not reported."""
        if reading.step is not None and 0 <= reading.step < STEP_MAX:
            self._source(reading.step, source, reading.stamp_s, now_s)

    def read_line(self, reading: LogReading, source: object, now_s: float) -> bool:
        """Take a line of the log ``source``; return whether it finished a step."""
        advanced, derived_s = False, None
        if reading.step is not None and 0 <= reading.step < STEP_MAX:
            advanced, derived_s = self._advance(reading.step, source, reading.stamp_s, now_s)
        known = self._sources.get(source)
        covers = known.covers if known is not None else 1
        self._timed = self._timed or reading.step_s is not None
        step_s = reading.step_s if self._timed else derived_s
        tokens = reading.tokens_per_second
        if tokens is None and reading.job_tokens_per_second is not None:
            tokens = reading.job_tokens_per_second / self._world_size
        self._add("train_loss", reading.loss, covers)
        self._add("train_grad_norm", reading.grad_norm, covers)
        for metric, value in (("train_step_seconds", step_s), ("train_tokens_per_second", tokens)):
            if value is not None and math.isfinite(value) and value > 0.0:
                self._add(metric, value, covers)
        return advanced

    def pause(self, now_s: float, stamp_s: float | None = None) -> None:
        """Exclude the time between the previous line and this one from steps: a checkpoint, an evaluation.

        ``stamp_s`` is the timestamp of the line that says so, None if it has none.
        """
        for known in self._sources.values():
            known.since_s, known.since_stamp_s, known.since_step = now_s, stamp_s, known.step

    def note_collectives(self, enqueued: int, completed: int | None) -> None:
        """Record the progress of the rank's widest process group."""
        if 0 <= enqueued < 1 << 53:
            self._row["nccl_sequence"] = float(enqueued)
            self._row["nccl_completed_sequence"] = float(max(0, min(enqueued, completed or 0)))

    def note_log(self, lines_since_step: int) -> None:
        """Record how many lines of the rank's log follow the last one with a step."""
        if lines_since_step or LOG_LINES in self._row:
            self._row[LOG_LINES] = float(lines_since_step)

    @property
    def fresh(self) -> bool:
        """Whether anything has not been in a row yet."""
        return bool(self._sums or self._odd)

    def row(self) -> dict[str, float]:
        """Return the row for the interval ending now and start the next; empty: nothing was observed."""
        for metric, (total, weight) in self._sums.items():
            self._row[metric] = total / weight
        for metric in self._odd:
            self._row[metric] = math.inf  # once is enough: a mean of the rest would hide it
        self._sums.clear()
        self._odd.clear()
        if self.step is not None:
            self._row["train_step"] = float(self.step)
        return dict(self._row)

    def _add(self, metric: str, value: float | None, covers: int) -> None:
        if value is None:
            return
        if not math.isfinite(value):
            self._odd.add(metric)
            return
        total, weight = self._sums.get(metric, (0.0, 0))
        self._sums[metric] = (total + value * covers, weight + covers)

    def _advance(self, step: int, source: object, stamp_s: float | None, now_s: float) -> tuple[bool, float | None]:
        """Record a finished step; return whether it is new, and the seconds per step as far as times show."""
        known = self._sources.get(source)
        if known is None or step < known.step:  # new, or the program restarted from an earlier step
            self._source(step, source, stamp_s, now_s)
            began_again = known is not None and source == self._leader
            if self.step is None or step > self.step or began_again:
                self.step, self._leader = step, source
                return True, None
            return False, None
        derived_s = None
        if step > known.step:
            known.covers, known.step = step - known.step, step
            derived_s = self._derived_s(known, stamp_s, now_s)
        if self.step is None or step > self.step:
            self.step, self._leader = step, source
            return True, derived_s
        return False, derived_s

    def _derived_s(self, known: _Source, stamp_s: float | None, now_s: float) -> float | None:
        """Return the seconds per step since times were last taken; None: not enough data yet."""
        steps, arrival_s = known.step - known.since_step, now_s - known.since_s
        elapsed_s = arrival_s
        if stamp_s is not None and known.since_stamp_s is not None:
            elapsed_s = stamp_s - known.since_stamp_s
            if elapsed_s > arrival_s + STAMP_SLACK_S:
                elapsed_s = -1.0
        elif arrival_s < ARRIVAL_S_MIN:
            if stamp_s is None:
                if arrival_s <= 0.0:  # the step ended a pause, or came with the line before: counting begins at it
                    known.since_step = known.step
                return None
            elapsed_s = -1.0
        known.since_step, known.since_stamp_s, known.since_s = known.step, stamp_s, now_s
        return elapsed_s / steps if steps > 0 and elapsed_s > 0.0 else None

    def _source(self, step: int, source: object, stamp_s: float | None, now_s: float) -> None:
        if source not in self._sources and len(self._sources) >= SOURCES_MAX:
            del self._sources[next(iter(self._sources))]
        self._sources[source] = _Source(step, 1, step, stamp_s, now_s)


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

    def update_processes(self, listed: Sequence[TrainingProcess], now_s: float) -> None:
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
