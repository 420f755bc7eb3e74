"""Reads what failing programs write to a log, and finds out which of them it ended. Pure; never raises.

A program's words begin with a line of their own, in one of a few shapes, and go on below it: a message of several lines
has its cause in the last one. Sources: Python; the C++ runtime (libstdc++, libc++); PyTorch, ProcessGroupNCCL.cpp and
torch.distributed.elastic.multiprocessing.errors (1.9 to 2.13); NCCL, debug.cc.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from eagle_eye.agent.processes.process_registry import TrainingProcess
from eagle_eye.agent.redact import redact
from eagle_eye.agent.training_hook.message import TEXT_BYTES_MAX
from eagle_eye.agent.training_logs.lines import LogLine
from eagle_eye.agent.training_logs.rank_courses import Key, key
from eagle_eye.schema.events import Event
from eagle_eye.schema.last_words import HEADER, device_word, is_advice

# PyTorch's NCCL watchdog lines, one at a time.
#
# The lines are those of ProcessGroupNCCL.cpp, from PyTorch 1.13 to 2.13: a collective that timed out, and how far the
# process group had come when the watchdog looked.
WATCHDOG_LINE_CHARS_MAX = 4_096  # these lines are below 1,000 characters; the rest of a longer one is something else
GROUP_NAME_CHARS_MAX = 128  # per operation or group; PyTorch's own are below 50

_TIMEOUT = "Watchdog caught collective operation timeout"
_NUMBER = r"(-?[0-9]{1,18})(?![0-9])"  # a 64-bit counter never has more digits
_JOB_RANK = re.compile(r"\[rank([0-9]{1,9})\]")  # from PyTorch's logger, on every line since 2.2
# Each version adds fields: Rank 1; PG 0 (default_pg) Rank 1; PG ID 5 PG GUID 37(TENSOR_...) Rank 1.
_GROUP_RANK = re.compile(
    r"\[(?:PG (?:ID [0-9]{1,9} PG GUID )?([^\s()\[\]]{1,100}) ?(?:\(([^()\[\]]{0,200})\) )?)?Rank ([0-9]{1,9})\]"
)
_DEFAULT_GROUP = "default_pg"  # of all ranks: its group ranks equal the job's ranks
_WORK = re.compile(rf"WorkNCCL\((?:SeqNum|Seq)={_NUMBER}, ?OpType=([A-Za-z0-9_]{{1,{GROUP_NAME_CHARS_MAX}}})")
_TIMEOUT_MS = re.compile(r"Timeout\(ms\)=([0-9]{1,15})(?![0-9])")
_AT_WORK = re.compile(rf"\bat (?:NCCL )?work(?: sequence id)?: ?{_NUMBER}")
_ENQUEUED = re.compile(rf"\b[Ll]ast enqueued (?:NCCL )?work: ?{_NUMBER}")
_COMPLETED = re.compile(rf"\blast completed (?:NCCL work|work)?:? ?{_NUMBER}")


@dataclass(frozen=True)
class WatchdogLine:
    """One watchdog line; None for fields it does not contain.

    ``rank`` is the rank in the job, ``group_rank`` the one in the process group: for a group of some ranks they differ,
    and PyTorch before 2.2 writes only the second. ``group`` is the group's name and description as the flight recorder
    has them ("37 TENSOR_MODEL_PARALLEL_GROUP"), "" where the line names none. ``timed_out`` is True on the line that
    names the collective: its ``sequence`` in the group, its ``operation`` ("ALLREDUCE"), and how long it was allowed,
    in seconds. ``enqueued`` and ``completed`` are the group's highest sequences when the watchdog looked, -1: none yet.
    They are the host's counts: a rank whose collective is not enqueued may also hang inside the enqueue call.
    """

    rank: int | None = None
    group_rank: int | None = None
    group: str = ""
    timed_out: bool = False
    sequence: int | None = None
    operation: str = ""
    timeout_s: float | None = None
    enqueued: int | None = None
    completed: int | None = None


def parse_watchdog(line: str) -> WatchdogLine | None:
    """Parse a watchdog line; None for every other line. Never raises."""
    if _TIMEOUT not in line and "ast enqueued " not in line:  # rejects nearly all of a million lines
        return None
    line = line[:WATCHDOG_LINE_CHARS_MAX]
    work = _WORK.search(line)
    timed_out = _TIMEOUT in line and work is not None
    enqueued = _integer(_ENQUEUED, line)
    if not timed_out and enqueued is None:
        return None
    member = _GROUP_RANK.search(line)
    name, description, spelt = member.groups(default="") if member is not None else ("", "", "")
    group_rank = int(spelt) if spelt else None
    completed = _integer(_COMPLETED, line)
    if completed is not None and enqueued is not None and completed > enqueued:
        completed = None  # PyTorch 2.3 printed uninitialized memory
    timeout_ms = _integer(_TIMEOUT_MS, line)
    return WatchdogLine(
        rank=named_rank(line),
        group_rank=group_rank,
        group=_printable(f"{name} {description}".strip()),
        timed_out=timed_out,
        sequence=int(work[1]) if work is not None else _integer(_AT_WORK, line),
        operation=work[2] if work is not None else "",
        timeout_s=timeout_ms / 1e3 if timeout_ms is not None else None,
        enqueued=enqueued,
        completed=completed,
    )


def named_rank(line: str) -> int | None:
    """Return the rank in the job that a line of PyTorch names, None if it names none."""
    rank = _integer(_JOB_RANK, line)
    member = _GROUP_RANK.search(line) if rank is None else None
    return int(member[3]) if member is not None and member[2] == _DEFAULT_GROUP else rank


def _integer(pattern: re.Pattern[str], line: str) -> int | None:
    found = pattern.search(line)
    return int(found[1]) if found is not None else None


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text[:GROUP_NAME_CHARS_MAX])


# Uncaught errors and aborts: their words, line by line.
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

    def read_line(self, line: LogLine, reads: Callable[[str], bool] = lambda _text: False) -> LastWords | None:
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


TABLE_BEGIN = "Failures:"
TABLE_NEEDLES = (TABLE_BEGIN.encode(),)
TABLE_LINES_MAX = 4_000  # of one table: 16 ranks with tracebacks

_FIELD = re.compile(r"  (host|rank|exitcode|traceback) *: (.{0,4000})")
_RANK = re.compile(r"([0-9]{1,9}) \(local_rank: ([0-9]{1,5})\)")
_EXIT = re.compile(r"(-?[0-9]{1,3}) \(pid: ([0-9]{1,10})\)")
_NEXT = re.compile(r"\[[0-9]{1,5}\]:|-{20}|={20}")


@dataclass(frozen=True)
class RankFailure:
    """One rank's failure by its launcher; ``traceback`` None unless the rank left one to the launcher."""

    host: str
    rank: int
    local_rank: int
    exit_code: int
    pid: int
    traceback: LastWords | None = None


class FailureTable:
    """The table that is under way in one log."""

    def __init__(self) -> None:
        self._read = 0
        self._begin()

    def _begin(self) -> None:
        self._fields: dict[str, str] = {}
        self._reader = WordsReader()
        self._words: LastWords | None = None

    @property
    def under_way(self) -> bool:
        """Whether the next lines are the table's."""
        return self._read > 0

    def read_line(self, text: str) -> RankFailure | None:
        """Take the log's next line, without prefixes; return a rank's failure once it is read to its end."""
        if not self._read:
            self._read = int(text.rstrip() == TABLE_BEGIN)
            return None
        self._read += 1
        found = _FIELD.match(text)
        if found is not None:
            self._fields.setdefault(found[1], found[2].strip())
            if found[1] == "traceback":
                self._reader.read_line(LogLine(found[2]))
            return None
        if not _NEXT.match(text):
            self._words = self._reader.read_line(LogLine(text[2:])) or self._words
            self._read %= TABLE_LINES_MAX
            return None
        failure = self._failure()
        self._begin()
        if text.startswith("="):
            self._read = 0
        return failure

    def _failure(self) -> RankFailure | None:
        rank, ended = _RANK.match(self._fields.get("rank", "")), _EXIT.match(self._fields.get("exitcode", ""))
        if rank is None or ended is None:
            return None
        host = self._fields.get("host", "")
        return RankFailure(host, int(rank[1]), int(rank[2]), int(ended[1]), int(ended[2]), self._words)


CHAINED_S = 1.0  # an exception raised while handling another follows directly in the log
SETTLED_S = 30.0  # a live rank without a step for this long after an uncaught error is not training
WORDS_MAX = 8  # of one process since its last step: threads and handlers fail one after the other
_CUT = "\n...\n"


@dataclass
class _Error:
    words: tuple[LastWords, ...]
    time_s: float
    seen_s: float
    uncaught: bool


class EndedByError:
    """Keeps each rank's newest words until their outcome is known. Errors are reported once per process.

    A traceback in a log may have been caught: only one after which its process ends, or which PyTorch's own hook
    for uncaught exceptions wrote and no step followed, has ended the program.
    """

    def __init__(self, running: Callable[[int], bool]) -> None:
        """``running`` says whether a pid belongs to a live process."""
        self._running = running
        self._waiting: dict[Key, _Error] = {}
        self._reported: set[Key] = set()

    def record_error(
        self, process: TrainingProcess, words: LastWords, time_s: float, monotonic_s: float, *, uncaught: bool
    ) -> None:
        """Record an error, which may go on; it replaces an earlier one, unless it follows from that one.

        An error of a device is never replaced: such a device does not recover.
        """
        if key(process) not in self._reported:
            before = self._waiting.get(key(process))
            kept: tuple[LastWords, ...] = ()
            if before is not None:
                followed = monotonic_s - before.seen_s <= CHAINED_S
                kept = before.words if followed else tuple(w for w in before.words if device_word(w.text))
            self._waiting[key(process)] = _Error((*kept, words)[-WORDS_MAX:], time_s, monotonic_s, uncaught)

    def note_step(self, process: TrainingProcess) -> None:
        """Record that the process has finished a step: earlier errors were caught."""
        self._waiting.pop(key(process), None)

    def ended(self, processes: Iterable[TrainingProcess], monotonic_s: float) -> list[Event]:
        """Return the errors known by now to have ended their program; ``processes`` are all still tracked."""
        events = []
        known = {key(process): process for process in processes}
        self._waiting = {name: error for name, error in self._waiting.items() if name in known}
        self._reported &= known.keys()
        for name, error in list(self._waiting.items()):
            process = known[name]
            settled = error.uncaught and monotonic_s - error.seen_s >= SETTLED_S
            if settled or not self._running(process.pid):
                del self._waiting[name]
                self._reported.add(name)
                text = text_of(error.words)
                events.append(Event(error.time_s, "training_error", process.device, {"text": text, **process.who()}))
        return events


def text_of(words: Sequence[LastWords]) -> str:
    """Return the words as one text: what was raised first, and what was raised for it or names a device.

    An abort or a watchdog that follows a traceback is only the end of the process. Each keeps its beginning and its
    end: the place, and the cause, which a message of several lines has in its last one.
    """
    chosen = [one for one in words if one.kind == "traceback" or device_word(one.text)] or words[:1]
    texts = list(dict.fromkeys(redact(one.text) for one in chosen))
    joint = f"\n{HEADER}\n"
    size = (TEXT_BYTES_MAX - (len(texts) - 1) * len(joint)) // len(texts)
    return joint.join(_within(text, size) for text in texts)


def _within(text: str, size: int) -> str:
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= size:
        return encoded.decode("utf-8")
    end = encoded[-(size // 2) :].decode("utf-8", "ignore")
    return encoded[: size - size // 2 - len(_CUT)].decode("utf-8", "ignore") + _CUT + end
