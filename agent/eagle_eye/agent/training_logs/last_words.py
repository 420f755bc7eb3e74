"""Finds what failing programs write to a log: tracebacks, aborts, watchdogs, NCCL's warnings. Pure; never raises.

Each begins with a line of its own, in one of the shapes below, and goes on below it: a message of several lines has its
cause in the last one. Sources: Python; the C++ runtime (libstdc++, libc++); PyTorch, ProcessGroupNCCL.cpp; NCCL,
debug.cc.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from eagle_eye.agent.nccl.watchdog import named_rank
from eagle_eye.agent.training_logs.line_prefixes import LogLine
from eagle_eye.schema.last_words import HEADER, is_advice

STREAMS_MAX = 64  # ranks whose words may be interleaved in one log
LINES_MAX = 1_000  # per traceback: the interpreter prints at most 1,000 frames, and folds recursion
MESSAGE_LINES_MAX = 32  # the longest known, NCCL's, have five

# A line with none of these begins no words.
NEEDLES = (
    HEADER.encode(),
    b"terminate called ",
    b"terminating due to ",
    b"terminated with exception: ",
    b" NCCL WARN ",
)

# A class name with its module: mixed case, so that "WARNING: ..." does not match.
_ENDING = re.compile(r"((?:[A-Za-z_]\w{0,100}\.){0,12}([A-Z]\w{0,100}|\w{0,100}?(?:error|Error|timeout)))(?::\s.*)?$")
_PLACE = re.compile(r'\s{1,8}File "[^"]{1,400}", line \d{1,9}(, in .{1,200})?\s*$')
# Exceptions that stop programs deliberately, and those launchers raise when one of their ranks has failed.
_NO_CAUSE = frozenset({"KeyboardInterrupt", "SystemExit", "GeneratorExit", "SignalException", "ChildFailedError"})
# libstdc++ and libc++; what() follows, on a line of its own or on the same one. An abort without an exception says no
# more than its signal.
_ABORT = re.compile(
    r"terminate called after throwing an instance of '(?P<kind>[^']{1,200})'"
    r"|libc\+\+abi: terminating due to uncaught exception of type (?P<type>[\w:<>]{1,200}?)(?:: (?P<said>.{1,2000}))?$"
)
_WHAT = re.compile(r"\s{1,4}what\(\):\s{1,4}(.*)")
_WATCHDOG = re.compile(r"\[[EF].{1,400}?\] (?P<said>[\w' ]{1,60} thread terminated with exception: .*)")
# host:pid:thread [device]; what comes before it is the program's own.
_WARNING = re.compile(
    r"(?:.{0,80}\s)?(?P<host>[^\s:]{1,255}):(?P<pid>[0-9]{1,10}):[0-9]{1,10} \[[0-9]{1,4}\] .{0,200}?"
    r"NCCL WARN (?P<said>.+)"
)
# What is no part of a message: another program's or logger's line, a stack of C++ frames, a ruler.
_ANOTHER = re.compile(
    r"\s*$|\[[EWIF][0-9 ]|[EWIF][0-9]{3,4} |frame #|Exception raised from"
    r"|\[?[0-9]{4}-[0-9]{2}-[0-9]{2}|[0-9]{2}:[0-9]{2}:[0-9]{2}|(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|wandb)\b|[=*-]{8}"
    r"|.{0,300}NCCL (?:WARN|INFO) "
)


_BARE: tuple[int | None, ...] = (None, None, None)  # the stream of lines without a prefix


@dataclass
class LastWords:
    """One failure's words, which may go on while more lines come; ``line`` is the one that says who wrote them.

    A "warning" is NCCL's: the program may survive it. ``host`` and ``pid`` are the writer's own, in its container
    perhaps.
    """

    line: LogLine
    kind: Literal["traceback", "abort", "warning"] = "abort"
    host: str = ""
    pid: int | None = None
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The innermost frame of a traceback, if it was printed, and the message as far as it is read."""
        return "\n".join(self.lines)


@dataclass
class _Open:
    """Words that have begun. ``known`` once they are known to be an error's; before, frames or what() are missing."""

    words: LastWords
    known: bool = False
    read: int = 0
    in_frame: bool = False


class WordsReader:
    """The words that are under way in one log, one for each rank or process named in prefixes."""

    def __init__(self) -> None:
        self._open: dict[tuple[int | None, ...], _Open] = {}

    @property
    def under_way(self) -> bool:
        """Whether the next lines may belong to words that have begun."""
        return bool(self._open)

    def take(self, line: LogLine, reads: Callable[[str], bool] = lambda _text: False) -> LastWords | None:
        """Take the log's next line; return the words once it is known that they are an error's.

        What belongs to them and comes later is added to the same object. ``reads`` says whether a framework's parser
        understands a line: such a one ends a message.
        """
        # An indented line may look as if its prefix ended in a space: only the first line's prefix distinguishes rank
        # and local rank.
        stream = (line.local_rank if line.rank is None else line.rank, line.task, line.pid)
        begun = _begun(line)
        if begun is not None:
            before = self._open.pop(stream, None)
            if len(self._open) < STREAMS_MAX:
                self._open[stream] = begun
            if begun.known:
                return begun.words
            # An abort that says no more is one, too.
            return before.words if before is not None and not before.known and before.words.kind == "abort" else None
        known = self._open.get(stream)
        if known is None:
            self._count_other_lines()
            if (bare := self._open.get(_BARE)) is not None and bare.known:
                del self._open[_BARE]  # who writes no prefix writes no line with one in between
            return None
        known.read += 1
        if known.known:
            self._go_on(stream, known, line.text, reads)
            return None
        return (
            self._traceback(stream, known, line)
            if known.words.kind == "traceback"
            else self._abort(stream, known, line)
        )

    def _go_on(self, stream: tuple[int | None, ...], known: _Open, text: str, reads: Callable[[str], bool]) -> None:
        """Add a line to the message, or end it."""
        if known.read > MESSAGE_LINES_MAX or _ANOTHER.match(text) or reads(text):
            del self._open[stream]
        elif not is_advice(text):
            known.words.lines.append(text)

    def _traceback(self, stream: tuple[int | None, ...], known: _Open, line: LogLine) -> LastWords | None:
        lines = known.words.lines
        if line.text.startswith((" ", "\t")) and known.read < LINES_MAX:
            known.in_frame = True
            if _PLACE.match(line.text):
                lines[:] = [line.text]
            elif len(lines) == 1:
                lines.append(line.text)
            return None
        found = _ENDING.match(line.text) if known.in_frame else None
        if found is None or found[2] in _NO_CAUSE or found[2].isupper():
            del self._open[stream]
            return None
        lines.append(line.text)
        known.known, known.read = True, 0
        return known.words

    def _abort(self, stream: tuple[int | None, ...], known: _Open, line: LogLine) -> LastWords | None:
        """Take the line after an abort: what() of its exception, or something else."""
        found, words = _WHAT.match(line.text), known.words
        if found is None:
            del self._open[stream]
            return words
        words.lines[0] = f"{words.lines[0]}: {found[1]}"
        words.line = _by_group(words.line, found[1])
        known.known, known.read = True, 0
        return words

    def _count_other_lines(self) -> None:
        """Drop words that have not continued for many other lines."""
        for stream, known in list(self._open.items()):
            known.read += 1
            if known.read >= LINES_MAX:
                del self._open[stream]


def _begun(line: LogLine) -> _Open | None:
    """Return the words that begin with the line, None if none do."""
    text = line.text
    if text.startswith(HEADER):
        return _Open(LastWords(line, "traceback"))
    if found := _ABORT.match(text):
        said = found["kind"] or ": ".join(filter(None, (found["type"], found["said"])))
        return _Open(LastWords(line, lines=[said]), known=found["kind"] is None)
    if found := _WATCHDOG.match(text):
        return _Open(LastWords(_by_group(line, text), lines=[found["said"]]), known=True)
    if found := _WARNING.match(text):
        words = LastWords(line, "warning", found["host"], int(found["pid"]), [found["said"].strip()])
        return _Open(words, known=True)
    return None


def _by_group(line: LogLine, text: str) -> LogLine:
    """Return the line as written by the rank that the text names, if no prefix does."""
    rank = named_rank(text) if line.rank is None else line.rank
    return LogLine(line.text, rank, line.local_rank, line.task, line.pid)
