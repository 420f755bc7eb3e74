"""A followed log: reads and parses its new lines. Touches: one file, read only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eagle_eye.agent.files.growing import GrowingFile
from eagle_eye.agent.loop.drops import Drops
from eagle_eye.agent.nccl.watchdog import WatchdogLine, parse_watchdog
from eagle_eye.agent.processes.process_registry import TrainingProcess
from eagle_eye.agent.training_logs import failure_table, last_words
from eagle_eye.agent.training_logs.attribution import LogOrigin
from eagle_eye.agent.training_logs.container_lines import ContainerLines
from eagle_eye.agent.training_logs.failure_table import FailureTable, RankFailure
from eagle_eye.agent.training_logs.frameworks import LogParser
from eagle_eye.agent.training_logs.last_words import LastWords, WordsReader
from eagle_eye.agent.training_logs.line_prefixes import LogLine, without_prefixes
from eagle_eye.agent.training_logs.line_search import line_at, starts_of
from eagle_eye.agent.training_logs.reading import Framework, LogReading, Quiet

UNKNOWN_BYTES = 1 << 20  # without a line of any framework: probably not a training log...
UNKNOWN_EVERY = 8  # ...and searched for all of them only this rarely
LEARN_BYTES = 1 << 16  # from the end of a pre-existing log: some hundred lines
UNREAD_LINES, UNREAD_TIMES = 1_000, 3  # without a step, and so many times as many as before: it is not understood
WATCHDOG = b"ProcessGroupNCCL"

_ALWAYS = (*last_words.NEEDLES, *failure_table.NEEDLES, WATCHDOG)


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
        failure = self._table.take(line.text)
        if failure is not None:
            return Said(LogLine("", failure.rank), failure=failure)
        words = self._words.take(line, lambda text: self.program.parser.parse(text) is not None)
        if words is not None:
            return Said(words.line, words=words)
        reading = self.program.parser.parse(line.text)
        if reading is not None:
            return Said(line, reading=reading)
        watchdog = parse_watchdog(text)
        return Said(line, watchdog=watchdog) if watchdog is not None else None
