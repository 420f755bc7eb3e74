"""Reads the logs of training processes. Touches: log files, read only; /proc/<pid>/fd, /proc/<pid>/environ."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from eagle_eye.agent.collector import Drops, Observed
from eagle_eye.agent.processes.exit_watcher import is_running
from eagle_eye.agent.processes.process_registry import TrainingProcess, TrainingProcesses
from eagle_eye.agent.redact import redact
from eagle_eye.agent.training_logs.followed_logs import (
    FollowedLog,
    FollowedLogs,
    LogTrouble,
    Missing,
    Pattern,
    Said,
    writer_of,
)
from eagle_eye.agent.training_logs.frameworks import FRAMEWORKS
from eagle_eye.agent.training_logs.last_words import EndedByError, LastWords, RankFailure, text_of
from eagle_eye.agent.training_logs.lines import Framework, LineWriter, LogLine, LogReading, Quiet
from eagle_eye.agent.training_logs.rank_courses import Key, RankCourses, key
from eagle_eye.schema.events import Event

EVENTS_MAX = 256  # reported per collection
WARNINGS_MAX, WARNING_CHARS_MAX = 16, 500  # of NCCL, different ones of one process
_VARIES = re.compile(r"0x[0-9a-f]+|[0-9]+")

_ENDS = {Quiet.CHECKPOINT_END: Quiet.CHECKPOINT_BEGIN, Quiet.EVAL_END: Quiet.EVAL_BEGIN}


class TrainingLogCollector:
    """Steps, losses, checkpoints and errors of ranks from their logs, without changes to the program.

    Follows the files that ``patterns`` match and, automatically, regular files that are the stdout or stderr of a
    training process. A row goes to the device of the rank that wrote the line; lines of a rank on another node are left
    to that node. Lines that cannot be attributed are counted as ``training_log_unattributed`` and named. Rows and
    events of devices in ``hooked_devices`` are left out: their ranks report themselves. A file not owned by the
    process's user, or reached through another user's link, is counted as ``training_log_refused`` and named.

    Cannot see: output to pipes and terminals; which rank wrote a line without a rank into a file that several ranks
    share, unless the framework has a rule; output still in a writer's buffer.
    """

    name = "training_log"

    def __init__(
        self,
        processes: TrainingProcesses,
        drops: Drops,
        patterns: Sequence[Pattern] = (),
        hooked_devices: Callable[[], set[int]] = set,
        *,
        frameworks: Sequence[Framework] = FRAMEWORKS,
        proc: Path = Path("/proc"),
        monotonic_s: Callable[[], float] = time.monotonic,
        running: Callable[[int], bool] = is_running,
    ) -> None:
        """``frameworks`` are those whose lines are parsed.

        ``running`` says whether a pid belongs to a live process.
        """
        self.steps: Mapping[int, float] = {}  # the last collection's train_step by device
        self._processes = processes
        self._drops = drops
        self._hooked_devices = hooked_devices
        self._monotonic_s = monotonic_s
        self._logs = FollowedLogs(patterns, drops, proc, frameworks)
        self._ranks = RankCourses()
        self._errors = EndedByError(running)
        self._unattributed = LogTrouble()
        self._unreadable = LogTrouble()
        self._events: list[Event] = []
        self._host = socket.gethostname().partition(".")[0]
        self._now_s = self._at_s = 0.0  # of the collection in progress: Unix seconds, the monotonic clock

    def collect(self, now_s: float) -> Observed:
        """Return the rows for the interval ending now and the events of the new lines."""
        self._now_s, self._at_s = now_s, self._monotonic_s()
        listed = self._processes.all()
        self._ranks.update_processes(listed, self._at_s)
        for log, said in self._logs.find_logs(listed, now_s, self._at_s):
            self._learn(log, said)
        for log in self._logs.all():
            try:
                for said in log.new(self._logs.share_bytes, self._logs.share_lines):
                    self._take(log, said)
            except OSError as error:
                self._unreadable.set_text(f"{log.name}: {error.strerror or error}", self._at_s)
                self._logs.forget(log)
        self._note_lines()
        self._events += self._errors.ended(self._ranks.processes(), self._at_s)
        hooked = self._hooked_devices()
        events, self._events = [event for event in self._events if event.device not in hooked], []
        self._drops.count("training_log_events_over_limit", len(events) - EVENTS_MAX)
        rows = self._ranks.rows(hooked, self._drops)
        self.steps = {device: row["train_step"] for device, row in rows.items() if "train_step" in row}
        return Observed(devices=rows, events=events[:EVENTS_MAX], problem=self._problem())

    def close(self) -> None:
        """Close the logs."""
        self._logs.close()

    def _whose(self, log: FollowedLog, said: Said) -> TrainingProcess | Missing:
        reading, watchdog, words, line = said.reading, said.watchdog, said.words, said.line
        rank = reading.rank if reading is not None else watchdog.rank if watchdog is not None else None
        writer = reading.writer if reading is not None else LineWriter.ANY
        processes = self._ranks.processes()
        ours = words is not None and words.host.partition(".")[0] == self._host  # else another's, or a container's
        if words is not None and ours and words.pid in {process.pid for process in processes}:
            line = replace(line, pid=words.pid)
        return writer_of(line, rank, writer, log.origin, processes, self._logs.tasks)

    def _note_lines(self) -> None:
        """Record for each rank how far its log has gone on since a step was read in it.

        Of a rank's several logs those count that have named a step, if any has; the one that has done so last.
        """
        lines: dict[Key, list[tuple[bool, int]]] = {}
        for log in self._logs.all():
            process = log.steps_of
            if process is None and log.step is None:  # otherwise they are those of a rank elsewhere
                found = writer_of(
                    LogLine(""), None, LineWriter.FIRST, log.origin, self._ranks.processes(), self._logs.tasks
                )
                process = found if isinstance(found, TrainingProcess) else None
            if process is not None:
                lines.setdefault(key(process), []).append((log.steps_of is None, log.lines_since_step))
        for process in self._ranks.processes():
            course, counted = self._ranks.of(process), lines.get(key(process))
            if course is not None and counted:
                course.note_log(min(counted)[1])

    def _learn(self, log: FollowedLog, said: Said) -> None:
        """Take a line from before the agent started: a running job continues from it, an earlier job's is ignored."""
        process = self._whose(log, said)
        course = None if isinstance(process, Missing) else self._ranks.of(process)
        if course is not None and said.reading is not None:
            course.learn(said.reading, log.identity, self._at_s)

    def _take(self, log: FollowedLog, said: Said) -> None:
        if said.reading is not None and said.reading.step is not None:
            self._end_quiet(log, list(log.program.quiet), said.reading.stamp_s)
        process = self._whose(log, said)
        if said.failure is not None and isinstance(process, Missing):
            self._take_failure(log, said.failure)
        elif process is Missing.UNKNOWN:
            self._drops.count("training_log_unattributed")
            text = f"{log.name}: nothing says which rank wrote a line; name the rank with {{rank}} in training_logs"
            self._unattributed.set_text(text, self._at_s)
        elif isinstance(process, TrainingProcess):
            if said.reading is not None:
                self._take_reading(process, log, said.reading)
            elif said.words is not None:
                self._take_words(process, said.words)
            elif said.failure is not None and said.failure.traceback is not None:
                self._take_words(process, said.failure.traceback)
            elif said.watchdog is not None and said.watchdog.enqueued is not None:
                course = self._ranks.of(process)
                # Other process groups count their own collectives.
                if course is not None and (not said.watchdog.group or "default_pg" in said.watchdog.group):
                    course.note_collectives(said.watchdog.enqueued, said.watchdog.completed)

    def _take_words(self, process: TrainingProcess, words: LastWords) -> None:
        if words.kind == "warning":
            self._warn(process, words.text)
        else:
            uncaught = words.line.rank is not None  # PyTorch's hook for uncaught exceptions prefixes the rank
            self._errors.record_error(process, words, self._now_s, self._at_s, uncaught=uncaught)

    def _warn(self, process: TrainingProcess, text: str) -> None:
        """Report a warning of NCCL, each only once: some come again for every operation."""
        course, alike = self._ranks.of(process), _VARIES.sub("#", text)
        if course is None or alike in course.warnings or len(course.warnings) >= WARNINGS_MAX:
            self._drops.count("nccl_warnings_repeated")
            return
        course.warnings.add(alike)
        attributes = {"text": redact(text)[:WARNING_CHARS_MAX], **process.who()}
        self._events.append(Event(self._now_s, "nccl_warning", process.device, attributes))

    def _take_failure(self, log: FollowedLog, failure: RankFailure) -> None:
        """Report the end of a rank of this host that was gone before it was found; its launcher saw it."""
        jobs = {(one.job, one.attempt) for one in log.origin.owners or self._ranks.processes()}
        if failure.host.partition(".")[0] != self._host or len(jobs) != 1:
            return
        (job, attempt), code = jobs.pop(), failure.exit_code
        who = {"rank": failure.rank, "job": job, "attempt": attempt}
        ended = {"exit_code": code, "pid": failure.pid, "goodbye": False, **who}
        self._events.append(Event(self._now_s, "process_exit", failure.local_rank, ended))
        if failure.traceback is not None:
            said = {"text": text_of([failure.traceback]), **who}
            self._events.append(Event(self._now_s, "training_error", failure.local_rank, said))

    def _take_reading(self, process: TrainingProcess, log: FollowedLog, reading: LogReading) -> None:
        course = self._ranks.of(process)
        if reading.step is not None:
            log.steps_of = process
        if course is not None and course.read_line(reading, log.identity, self._at_s):
            self._errors.note_step(process)
        if reading.quiet in _ENDS:
            self._end_quiet(log, [_ENDS[reading.quiet]], reading.stamp_s)
        elif reading.quiet is not None and reading.quiet not in log.program.quiet:
            log.program.quiet[reading.quiet] = (process, reading.quiet_step)
            self._ranks.pause(reading.stamp_s)
            self._tell_quiet(reading.quiet, process, reading.quiet_step, begins=True)

    def _end_quiet(self, log: FollowedLog, begun: list[Quiet], stamp_s: float | None) -> None:
        """Note that what this program began has ended: by its own line, or by a step finished since."""
        for quiet in begun:
            process, step = log.program.quiet.pop(quiet, (None, None))
            if process is not None:
                self._ranks.pause(stamp_s)
                self._tell_quiet(quiet, process, step, begins=False)

    def _tell_quiet(self, quiet: Quiet, process: TrainingProcess, step: int | None, *, begins: bool) -> None:
        kind, attributes = "phase", process.who()
        if quiet is Quiet.CHECKPOINT_BEGIN:
            kind, attributes = "checkpoint_begin" if begins else "checkpoint_end", {"step": step}
        else:
            attributes = {"name": "eval" if begins else "train", **attributes}
        self._events.append(Event(self._now_s, kind, process.device, attributes))

    def _problem(self) -> str:
        problems = [self._logs.problem, self._unattributed.text(self._at_s), self._unreadable.text(self._at_s)]
        followed = [log.unread for log in self._logs.all() if log.configured or log.step is not None]
        problems += [text for text in followed if text][:1]
        return "; ".join(text for text in problems if text)
