"""Finds the logs to follow, configured ones and the training processes' own outputs, and reads them as they grow.

It searches periodically, opens and closes them. Touches: log files, /proc/<pid>/fd and /proc/<pid>/environ.
"""

from __future__ import annotations

import errno
import glob
import itertools
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from eagle_eye.agent.collector import Drops
from eagle_eye.agent.foreign_files import GrowingFile, Identity, NotTheirs, open_file, open_output, shown
from eagle_eye.agent.processes.process_files import ProcessFiles
from eagle_eye.agent.processes.process_registry import TrainingProcess
from eagle_eye.agent.training_logs.frameworks import FRAMEWORKS, LogParser
from eagle_eye.agent.training_logs.last_words import (
    NEEDLES,
    TABLE_NEEDLES,
    FailureTable,
    LastWords,
    RankFailure,
    WatchdogLine,
    WordsReader,
    parse_watchdog,
)
from eagle_eye.agent.training_logs.lines import (
    ContainerLines,
    Framework,
    LineWriter,
    LogLine,
    LogReading,
    Quiet,
    line_at,
    starts_of,
    without_prefixes,
)

# Which logs to follow: configured ones, and the training processes' own outputs. No log is read for this.
MATCHES_MAX = 1_024  # per pattern: more are archives of old runs
JOBS_MAX = 16  # jobs per node filled into a pattern
OUTPUTS = (1, 2)  # stdout, stderr

_FIELD = re.compile(r"\{(job|node|rank|local_rank)\}")
_WILD = re.compile(r"\*\*/|\*+|\?|\[[^\]]{1,100}\]|\{rank\}|\{local_rank\}")
_WILD_MEANS = {"**/": "(?:.*/)?", "?": "[^/]", "{rank}": r"([0-9]{1,7})", "{local_rank}": r"([0-9]{1,5})"}


class BadPattern(ValueError):
    """An invalid pattern; the message says why."""


@dataclass(frozen=True)
class FoundLog:
    """A pattern's match, as of the search; ``rank``, ``local_rank`` and ``job`` come from its path."""

    path: Path
    identity: Identity
    changed_s: float
    rank: int | None = None
    local_rank: int | None = None
    job: str | None = None


class Pattern:
    """A glob pattern: placeholders ``{job}`` and ``{node}`` are filled in, ``{rank}`` and ``{local_rank}`` parsed.

    ``/shared/run/{job}/rank_{rank}.log`` matches the logs of the jobs that run on this node, and identifies their
    ranks.
    """

    def __init__(self, text: str, node: str) -> None:
        """Raises BadPattern for a relative path, and for unknown or repeated placeholders."""
        self.text = text
        if not text.startswith("/") or not text.isprintable():
            raise BadPattern(f"expected an absolute path, got {text[:200]!r}")
        places = _FIELD.findall(text)
        unknown = re.search(r"[{}]", _FIELD.sub("", text))
        if unknown is not None:
            raise BadPattern(f"{text[:200]!r}: places are {{job}}, {{node}}, {{rank}} and {{local_rank}}")
        if places.count("rank") > 1 or places.count("local_rank") > 1:
            raise BadPattern(f"{text[:200]!r} names {{rank}} or {{local_rank}} twice")
        self._text = text.replace("{node}", glob.escape(node))
        self._groups = [place for place in places if place in ("rank", "local_rank")]

    def files(self, jobs: Sequence[str]) -> list[FoundLog]:
        """Return the regular files that the pattern matches now. ``jobs`` run on this node."""
        if "{job}" not in self._text:
            return self._matches(self._text, None)
        found = []
        for job in list(dict.fromkeys(jobs))[:JOBS_MAX]:
            if job not in (".", "..") and "/" not in job and job.isprintable():
                found += self._matches(self._text.replace("{job}", glob.escape(job)), job)
        return found

    def _matches(self, pattern: str, job: str | None) -> list[FoundLog]:
        wanted = pattern.replace("{rank}", "*").replace("{local_rank}", "*")
        exact = re.compile(_expression(pattern)) if self._groups else None
        found = []
        names = glob.iglob(wanted, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        for name in itertools.islice(names, MATCHES_MAX):
            said = exact.fullmatch(name) if exact is not None else None
            if exact is not None and said is None:
                continue
            try:
                state = os.stat(name)  # noqa: PTH116 - thousands of names: no object for each
            except OSError:  # gone again, or a dangling link
                continue
            if stat.S_ISREG(state.st_mode):
                numbers = dict(zip(self._groups, said.groups(), strict=True)) if said is not None else {}
                rank, local_rank = numbers.get("rank"), numbers.get("local_rank")
                found.append(
                    FoundLog(
                        Path(name),
                        (state.st_dev, state.st_ino),
                        state.st_mtime,
                        None if rank is None else int(rank),
                        None if local_rank is None else int(local_rank),
                        job,
                    )
                )
        return found


@dataclass(frozen=True)
class ProcessOutput:
    """A regular file that is a training process's stdout or stderr."""

    path: Path  # through /proc: the file itself, whatever its path in the process's container
    identity: Identity
    process: TrainingProcess

    def open(self) -> int:
        """Return a descriptor to read the file. Raises OSError, NotTheirs as ``open_output`` does."""
        status = ProcessFiles(self.path.parents[2]).status(self.process.pid)
        if status is None:
            raise ProcessLookupError(errno.ESRCH, f"process {self.process.pid} has ended", str(self.path))
        return open_output(self.path, status.user, identity=self.identity)


def outputs(processes: Iterable[TrainingProcess], proc: Path) -> tuple[list[ProcessOutput], str]:
    """Return the files that are the processes' stdout and stderr, and any problem, "" for none."""
    found: list[ProcessOutput] = []
    problem = ""
    for process in processes:
        for number in OUTPUTS:
            path = proc / str(process.pid) / "fd" / str(number)
            try:
                state = path.stat()
            except FileNotFoundError:  # the process has exited, or closed it
                continue
            except OSError as error:
                problem = problem or f"{path}: {error.strerror or error}; run the agent as root or as the job's user"
                continue
            if stat.S_ISREG(state.st_mode):
                found.append(ProcessOutput(path, (state.st_dev, state.st_ino), process))
    return found, problem


def scheduler_task(pid: int, proc: Path) -> int | None:
    """Return the process's Slurm task number; None: there is none, or it is not visible."""
    try:
        environ = ProcessFiles(proc).environment(pid) or b""
    except OSError:
        return None
    found = re.search(rb"(?:^|\0)SLURM_PROCID=([0-9]{1,9})(?:\0|$)", environ)
    return int(found[1]) if found is not None else None


def _expression(pattern: str) -> str:
    """Return the pattern as a regular expression with a group per parsed placeholder."""
    parts, at = [], 0
    for wild in _WILD.finditer(pattern):
        parts.append(re.escape(pattern[at : wild.start()]))
        token = wild[0]
        parts.append("[^/]" if token.startswith("[") else _WILD_MEANS.get(token, "[^/]*"))
        at = wild.end()
    parts.append(re.escape(pattern[at:]))
    return "".join(parts)


class Missing(Enum):
    """Why a line has no process here."""

    ELSEWHERE = "elsewhere"  # its rank runs on another node, whose agent reports it
    UNKNOWN = "unknown"  # unattributable


@dataclass(frozen=True)
class LogOrigin:
    """What is known about a log besides its lines.

    ``owners`` are the training processes of this node that write to it themselves. The rest comes from its path.
    """

    owners: tuple[TrainingProcess, ...] = ()
    rank: int | None = None
    local_rank: int | None = None
    job: str | None = None


def writer_of(
    line: LogLine,
    rank: int | None,
    writer: LineWriter,
    origin: LogOrigin,
    processes: Sequence[TrainingProcess],
    tasks: Mapping[int, int],
) -> TrainingProcess | Missing:
    """Return the process that wrote the line.

    In order of precedence: the rank or process that the line names (``rank``, or in its prefix), the rank in the log's
    path, the one process that writes to the log, the framework's own rule (``writer``). A task or local rank prefixed
    to the line narrows the choice. ``tasks`` are the scheduler's tasks by pid, as far as known.
    """
    here = [process for process in origin.owners or processes if origin.job in (None, process.job)]
    if not here:
        return Missing.ELSEWHERE  # no rank of this node can have written it
    of_this_node = bool(origin.owners) or all(process.world_size <= len(here) for process in here)
    if line.pid is not None:
        here, of_this_node = [process for process in here if process.pid == line.pid], True
    if line.task is not None and tasks:
        here, of_this_node = [process for process in here if tasks.get(process.pid) == line.task], True
    local_rank = origin.local_rank if line.local_rank is None else line.local_rank
    if local_rank is not None:
        here = [process for process in here if process.local_rank == local_rank]
    for said in (rank, line.rank, origin.rank):
        if said is not None:
            return _only([process for process in here if process.rank == said])
    if not here:
        return Missing.ELSEWHERE
    if of_this_node and len(here) == 1:
        return here[0]
    if writer is LineWriter.ANY:
        return Missing.UNKNOWN
    return _only(
        [process for process in here if process.rank == (0 if writer is LineWriter.FIRST else process.world_size - 1)]
    )


def _only(found: list[TrainingProcess]) -> TrainingProcess | Missing:
    """Return the process of the newest attempt; several jobs with the same rank are ambiguous."""
    if not found:
        return Missing.ELSEWHERE
    if len({process.job for process in found}) > 1:
        return Missing.UNKNOWN
    return max(found, key=lambda process: process.attempt)


UNKNOWN_BYTES = 1 << 20  # without a line of any framework: probably not a training log...
UNKNOWN_EVERY = 8  # ...and searched for all of them only this rarely
LEARN_BYTES = 1 << 16  # from the end of a pre-existing log: some hundred lines
UNREAD_LINES, UNREAD_TIMES = 1_000, 3  # without a step, and so many times as many as before: it is not understood
WATCHDOG = b"ProcessGroupNCCL"

_ALWAYS = (*NEEDLES, *TABLE_NEEDLES, WATCHDOG)


@dataclass(frozen=True)
class Said:
    """One line's content: ``reading`` from a framework, ``words`` of a failure, ``watchdog`` from NCCL, or ``failure``.

    ``line`` is the one used for attribution: the first of a traceback. Words may go on with the next lines.
    """

    line: LogLine
    reading: LogReading | None = None
    words: LastWords | None = None
    watchdog: WatchdogLine | None = None
    failure: RankFailure | None = None


class Program:
    """What is known about the program that writes a log; a process's two outputs share one."""

    def __init__(self, frameworks: Sequence[Framework]) -> None:
        self.parser = LogParser(frameworks)
        self.quiet: dict[Quiet, tuple[TrainingProcess, int | None]] = {}  # phases started and not ended


class FollowedLog:
    """A log, its program and what is in progress in it."""

    def __init__(self, tail: GrowingFile, program: Program, drops: Drops) -> None:
        self.identity = tail.identity
        self.name = ""  # for people
        self.origin = LogOrigin()
        self.configured = False
        self.found_s = 0.0  # when it was last found, on the agent's clock...
        self.owned_s = 0.0  # ...and when a process last wrote to it itself
        self.read_bytes = 0
        self.understood = False  # whether any line was recognized
        self.lines_since_step = 0  # since the last line with a step, or since it is followed
        self.step: int | None = None  # the last that was read
        self.steps_of: TrainingProcess | None = None  # the rank whose steps it has named last
        self.usual_lines = 0  # the most between two lines with a step
        self.program = program
        self._tail = tail
        self._drops = drops
        self._container = ContainerLines()
        self._begin_words()
        self._reads = 0

    def learn(self) -> list[Said]:
        """Seek to the end; return the content of the last lines before it. Raises OSError."""
        self._tail.begin_at(max(0, self._tail.size - LEARN_BYTES))
        needles = (*_ALWAYS, *self.program.parser.needles)
        said = list(self._said(self._container.unwrapped(self._tail.read(LEARN_BYTES)), needles, LEARN_BYTES))
        self._begin_words()
        self.lines_since_step = 0
        return said

    def new(self, bytes_max: int, lines_max: int) -> Iterator[Said]:
        """Yield the content of new lines, in order; parses at most ``lines_max``. Raises OSError."""
        raw = self._tail.read(bytes_max)
        self._drops.count("training_log_bytes_skipped", self._tail.skipped_bytes)
        self._drops.count("training_log_long_lines", self._tail.long_lines)
        if self._tail.skipped_bytes:
            self._container = ContainerLines()  # what follows does not continue the last pieces
        lines = self._container.unwrapped(raw)
        self.read_bytes += len(raw)
        self._reads += 1 if raw else 0
        self.lines_since_step += lines.count(b"\n")
        if not self.understood and self.read_bytes > UNKNOWN_BYTES and self._reads % UNKNOWN_EVERY:
            return self._said(lines, _ALWAYS, lines_max)
        return self._said(lines, (*_ALWAYS, *self.program.parser.needles), lines_max)

    @property
    def unread(self) -> str:
        """Says that the log has gone on for long without a step that was read; "" while it has not."""
        if self.lines_since_step < max(UNREAD_LINES, UNREAD_TIMES * self.usual_lines):
            return ""
        since = "with a step that is understood" if self.step is None else f"read since step {self.step}"
        return f"{self.name}: {self.lines_since_step:,} lines, none {since}; training_log_patterns can name its format"

    def close(self) -> None:
        """Close the file."""
        self._tail.close()

    def _begin_words(self) -> None:
        self._words = WordsReader()
        self._table = FailureTable()

    def _note_step(self, step: int, lines_after: int) -> None:
        """Record a step that was read; ``lines_after`` it are already counted."""
        if self.step is not None:
            self.usual_lines = max(self.usual_lines, self.lines_since_step - lines_after)
        self.step, self.lines_since_step = step, lines_after

    def _said(self, lines: bytes, needles: tuple[bytes, ...], lines_max: int) -> Iterator[Said]:
        starts = starts_of(lines, needles)
        if len(starts) > lines_max:
            self._drops.count("training_log_lines_skipped", len(starts) - lines_max)
            starts = starts[-lines_max:]
        following, at = 0, 0
        while at < len(lines):
            if not (self._words.under_way or self._table.under_way):
                while following < len(starts) and starts[following] < at:
                    following += 1
                if following == len(starts):
                    return
                at = starts[following]
            text, at = line_at(lines, at)
            said = self._read(text)
            if said is not None:
                self.understood = True
                if said.reading is not None and said.reading.step is not None:
                    self._note_step(said.reading.step, lines.count(b"\n", at))
                yield said

    def _read(self, text: str) -> Said | None:
        line = without_prefixes(text)
        failure = self._table.read_line(line.text)
        if failure is not None:
            return Said(LogLine("", failure.rank), failure=failure)
        words = self._words.read_line(line, lambda text: self.program.parser.parse(text) is not None)
        if words is not None:
            return Said(words.line, words=words)
        reading = self.program.parser.parse(line.text)
        if reading is not None:
            return Said(line, reading=reading)
        watchdog = parse_watchdog(text)
        return Said(line, watchdog=watchdog) if watchdog is not None else None


NAMED_S = 60.0  # long enough to be read, short enough to disappear once it is over


class LogTrouble:
    """A collector's text for one kind of problem; times are of the agent's monotonic clock."""

    def __init__(self) -> None:
        self._text = ""
        self._until_s = 0.0

    def set_text(self, text: str, now_s: float) -> None:
        """Report this text from now on."""
        self._text, self._until_s = text, now_s + NAMED_S

    def text(self, now_s: float) -> str:
        """Return the text to report; "" when it is over."""
        return self._text if now_s < self._until_s else ""


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

    def find_logs(
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
