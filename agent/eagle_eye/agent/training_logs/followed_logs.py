"""The set of followed logs: searches periodically, opens and closes them. Touches: log files, /proc."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_eye.agent.files.foreign import Identity, NotTheirs, open_file, shown
from eagle_eye.agent.files.growing import GrowingFile
from eagle_eye.agent.loop.drops import Drops
from eagle_eye.agent.processes.process_registry import TrainingProcess
from eagle_eye.agent.training_logs.attribution import LogOrigin
from eagle_eye.agent.training_logs.followed_log import FollowedLog, Program, Said
from eagle_eye.agent.training_logs.frameworks import FRAMEWORKS
from eagle_eye.agent.training_logs.log_finder import FoundLog, Pattern, ProcessOutput, outputs, scheduler_task
from eagle_eye.agent.training_logs.reading import Framework

FILES_MAX = 64  # eight ranks with two outputs each, four times over
READ_BYTES_MAX = 1 << 20  # per log and collection: five thousand lines
TOTAL_BYTES_MAX = 4 << 20  # over all logs
LINES_MAX = 4_000  # parsed over all logs, at most 20 microseconds each: more than 64 trainers write in a second
ACTIVE_S = 3_600.0  # a log known only from a pattern and not written to for this long belongs to a run that ended
LINGER_S = 10.0  # how long a log that has gone is still read: its writer's last lines may still come
LOOK_S = 5.0  # between two searches...
LOOK_RATIO = 100.0  # ...and at least this many times the duration of a search
NEW_BYTES_MAX = 1 << 20  # a log larger than this when first seen existed before, under another name
KNOWN_MAX = 65_536  # files seen; beyond this all are forgotten and treated as pre-existing


class FollowedLogs:
    """The logs of this node's training processes, each once even with several names.

    ``tasks`` are the scheduler's tasks by pid. ``problem`` says what the last search could not access.
    """

    def __init__(
        self,
        patterns: Sequence[Pattern],
        drops: Drops,
        proc: Path,
        frameworks: Sequence[Framework] = FRAMEWORKS,
        cost_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``cost_s`` is the clock that times searches."""
        self.tasks: dict[int, int] = {}
        self.problem = ""
        self._patterns = patterns
        self._drops = drops
        self._proc = proc
        self._frameworks = frameworks
        self._cost_s = cost_s
        self._logs: dict[Identity, FollowedLog] = {}
        self._known: set[Identity] | None = None  # every file that patterns ever matched; None: no search so far
        self._programs: dict[int, Program] = {}  # by pid
        self._asked: set[int] = set()  # pids whose task was looked up
        self._due_s = self._not_before_s = 0.0
        self._listed: tuple[int, ...] = ()

    @property
    def share_bytes(self) -> int:
        """How much of one log may be read in one collection."""
        return min(READ_BYTES_MAX, TOTAL_BYTES_MAX // max(1, len(self._logs)))

    @property
    def share_lines(self) -> int:
        """How many lines of one log may be parsed in one collection."""
        return LINES_MAX // max(1, len(self._logs))

    def all(self) -> list[FollowedLog]:
        """Return the followed logs."""
        return list(self._logs.values())

    def look(
        self, processes: Sequence[TrainingProcess], now_s: float, monotonic_s: float
    ) -> list[tuple[FollowedLog, Said]]:
        """Search for logs if due; return the content of the ends of pre-existing logs.

        A log that appears later is read from its beginning, a pre-existing one from its end. A search is due when
        processes come or go; while there are none, patterns are not searched.
        """
        pids = tuple(process.pid for process in processes)
        if monotonic_s < (self._due_s if pids == self._listed else self._not_before_s):
            return []
        self._listed = pids
        begun_s = self._cost_s()
        learned = self._look(processes, now_s, monotonic_s)
        self._not_before_s = monotonic_s + LOOK_RATIO * (self._cost_s() - begun_s)
        self._due_s = max(monotonic_s + LOOK_S, self._not_before_s)
        return learned

    def forget(self, log: FollowedLog) -> None:
        """Close a log that cannot be read; it is found again if it exists."""
        log.close()
        self._logs.pop(log.identity, None)

    def close(self) -> None:
        """Close all logs."""
        for log in self._logs.values():
            log.close()
        self._logs.clear()

    def _look(
        self, processes: Sequence[TrainingProcess], now_s: float, monotonic_s: float
    ) -> list[tuple[FollowedLog, Said]]:
        written, problem = outputs(processes, self._proc)
        named, hindered = self._named(processes)
        problem = problem or hindered
        self._ask_tasks(processes)
        learned: list[tuple[FollowedLog, Said]] = []
        over = 0
        for candidate in _candidates(written, [log for log in named if log.changed_s >= now_s - ACTIVE_S]):
            log = self._logs.get(candidate.identity)
            if log is None:
                if len(self._logs) >= FILES_MAX:
                    over += 1
                    continue
                try:
                    log, said = self._open(candidate)
                except NotTheirs as error:
                    self._drops.count("training_log_refused")
                    problem = problem or str(error)
                    continue
                except OSError as error:
                    problem = problem or f"{shown(candidate.name)}: {error.strerror or error}"
                    continue
                learned += [(log, item) for item in said]
            self._describe(log, candidate, monotonic_s)
        if processes:
            self._known = self._known if self._known is not None and len(self._known) <= KNOWN_MAX else set()
            self._known.update(log.identity for log in named)
        self._let_go(monotonic_s)
        if over:
            self._drops.count("training_log_files_over_limit", over)
            problem = problem or f"{over} logs more than {FILES_MAX} are not followed; narrow training_logs"
        self.problem = problem
        return learned

    def _named(self, processes: Sequence[TrainingProcess]) -> tuple[list[FoundLog], str]:
        """Return the files that patterns match, newest first, and any problem."""
        if not processes:
            return [], ""
        jobs = [process.job for process in processes]
        found: list[FoundLog] = []
        problem = ""
        for pattern in self._patterns:
            matches = pattern.files(jobs)
            found += matches
            if not matches:
                problem = problem or f"training_logs: no file matches {pattern.text}"
        found.sort(key=lambda log: -log.changed_s)
        return found, problem

    def _open(self, candidate: _Candidate) -> tuple[FollowedLog, list[Said]]:
        """Start following a log; return it and the content of the lines before its end, empty for a new log."""
        new = self._known is not None and candidate.identity not in self._known and candidate.found is not None
        program = Program(self._frameworks)
        if len(candidate.owners) == 1:
            program = self._programs.setdefault(candidate.owners[0].pid, program)
        tail = GrowingFile(candidate.open())
        log = FollowedLog(tail, program, self._drops)
        try:
            said = [] if new and tail.size <= NEW_BYTES_MAX else log.learn()
        except OSError:
            log.close()
            raise
        self._logs[candidate.identity] = log
        return log, said

    def _describe(self, log: FollowedLog, candidate: _Candidate, monotonic_s: float) -> None:
        """Record the log's current name and writers; a process that exited a moment ago still counts as one."""
        found, owners = candidate.found, candidate.owners
        log.found_s = monotonic_s
        log.name = shown(candidate.name)
        if owners:
            log.owned_s = monotonic_s
        elif monotonic_s - log.owned_s <= LINGER_S:
            owners = log.origin.owners
        log.origin = LogOrigin(owners)
        if found is not None:
            log.configured = True
            log.origin = LogOrigin(owners, found.rank, found.local_rank, found.job)

    def _ask_tasks(self, processes: Sequence[TrainingProcess]) -> None:
        pids = {process.pid for process in processes}
        self.tasks = {pid: task for pid, task in self.tasks.items() if pid in pids}
        self._programs = {pid: program for pid, program in self._programs.items() if pid in pids}
        for pid in pids - self._asked:
            task = scheduler_task(pid, self._proc)
            if task is not None:
                self.tasks[pid] = task
        self._asked = pids

    def _let_go(self, monotonic_s: float) -> None:
        for identity, log in list(self._logs.items()):
            if monotonic_s - log.found_s > LINGER_S:
                log.close()
                del self._logs[identity]


@dataclass(frozen=True)
class _Candidate:
    """A log to follow: a process's own output, a pattern's match, or both; and the processes that write to it."""

    identity: Identity
    output: ProcessOutput | None
    owners: tuple[TrainingProcess, ...]
    found: FoundLog | None

    @property
    def name(self) -> str:
        """The name shown to people."""
        return str(self.found.path if self.found is not None else self.output.path if self.output is not None else "")

    def open(self) -> int:
        """Return a descriptor to read it; configuration may name files of other owners. Raises OSError."""
        if self.output is not None:
            try:
                return self.output.open()
            except OSError:
                if self.found is None:
                    raise
        return open_file(Path(self.name), identity=self.identity)


def _candidates(written: Sequence[ProcessOutput], named: Sequence[FoundLog]) -> list[_Candidate]:
    """Return the logs, each once: first those that processes write to themselves, then the others, newest first."""
    by_identity = {log.identity: log for log in reversed(named)}
    owners: dict[Identity, dict[int, TrainingProcess]] = {}
    of_processes: dict[Identity, ProcessOutput] = {}
    for output in written:
        of_processes.setdefault(output.identity, output)
        owners.setdefault(output.identity, {})[output.process.pid] = output.process
    return [
        _Candidate(
            identity,
            of_processes.get(identity),
            tuple(owners.get(identity, {}).values()),
            by_identity.get(identity),
        )
        for identity in dict.fromkeys((*of_processes, *(log.identity for log in named)))
    ]
