"""A training log's lines: found, freed of what others add, and what they say; the interface of a parser. Pure.

Containers, terminals and launchers add to a line; what remains are numbers and progress bars. Nothing here raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import TypeVar

import msgspec

NUMBER_CHARS_MAX = 40  # the longest number of any framework has 24
PAIRS_MAX = 64  # per line; the longest known lines have 20

# A number as any format prints it, for use in a format's own pattern; ``number`` reads what it matches.
NUMBER = (
    r"[+-]?(?:(?i:nan|inf(?:inity)?)(?:\.0)?(?![A-Za-z0-9_])"
    r"|(?:[0-9]{1,3}(?:,[0-9]{3}){1,8}(?![0-9])|[0-9]{1,24})(?:\.[0-9]{0,24})?(?:[eE][+-]?[0-9]{1,4})?(?:[kKMGBT](?![A-Za-z]))?"
    r"|\.[0-9]{1,24}(?:[eE][+-]?[0-9]{1,4})?(?:[kKMGBT](?![A-Za-z]))?)"
)

_SCALES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?")
_ODD = re.compile(r"([+-]?)(nan|inf|infinity)(?:\.0)?", re.IGNORECASE)  # progress bars pad to "nan.0"
_STAMP = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2})[ T]([0-9]{2}:[0-9]{2}:[0-9]{2})[.,]([0-9]{3,6})(?![0-9])")
# What Python and others write where JSON has no number; not inside a string, as far as the neighbours show.
_NO_JSON = re.compile(r"(?<=[\s:,\[])([+-]?(?:[Nn]a[Nn]|NAN|[Ii]nf(?:inity)?|INF))(?=[\s,}\]])")
_BEGINNING = datetime(2000, 1, 1)  # noqa: DTZ001 - logs have local times; only differences are used


def number(text: str) -> float | None:
    """Parse the text as a number; return None when it is not one.

    Supports exponents, thousands separators, the suffixes k, K, M, G, B and T, NaN and infinity.
    """
    text = text.strip()
    if not 0 < len(text) <= NUMBER_CHARS_MAX:
        return None
    odd = _ODD.fullmatch(text)
    if odd is not None:
        return float(odd[1] + odd[2])
    scale = _SCALES.get(text[-1], 1.0)
    if scale != 1.0:
        text = text[:-1]
    if _THOUSANDS.fullmatch(text) is not None:
        text = text.replace(",", "")
    elif _NUMBER.fullmatch(text) is None:
        return None
    return float(text) * scale


DecodedT = TypeVar("DecodedT")


def decoded(line: str, decoder: msgspec.json.Decoder[DecodedT]) -> DecodedT | None:
    """Decode the JSON text; return None when it is not such an object.

    NaN and infinity, which Python's json writes as no JSON has them, become strings that ``number`` reads.
    """
    for text in (line, _NO_JSON.sub(r'"\1"', line)):
        try:
            return decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):  # invalid characters; unbalanced brackets
            continue
    return None


def pairs(line: str) -> dict[str, str]:
    """Return the fields between bars by lower-case name: ``lm loss: 1.2 | grad norm: 0.5 |``.

    In a field without a colon the last word is the value, as in older versions.
    """
    found: dict[str, str] = {}
    for field in line.split("|", PAIRS_MAX)[:PAIRS_MAX]:
        name, colon, value = field.rpartition(":")
        if not colon:
            name, _, value = field.rstrip().rpartition(" ")
        found[name.strip().lower()] = value.strip()
    return found


def first_number(fields: dict[str, str], names: tuple[str, ...]) -> float | None:
    """Return the number of the first of the names among the fields; None: none found."""
    for name in names:
        if name in fields:
            value = number(fields[name])
            if value is not None:
                return value
    return None


def stamp_s(line: str) -> float | None:
    """Return the line's timestamp in seconds since an arbitrary moment, None where it lacks millisecond precision.

    Logs use local time without a time zone: only differences are meaningful.
    """
    found = _STAMP.search(line, 0, 200)
    if found is None:
        return None
    try:
        at = datetime.fromisoformat(f"{found[1]}T{found[2]}")
    except ValueError:
        return None
    return (at - _BEGINNING).total_seconds() + float(f"0.{found[3]}")


STEP_MAX = 10**12  # a larger value is not a step but an epoch in nanoseconds, or a hash


class LineWriter(Enum):
    """Which rank writes a line without a rank, where any rank might: the framework's own rule."""

    ANY = "any"
    FIRST = "first"  # rank 0
    LAST = "last"  # the highest rank of the job


class Quiet(Enum):
    """What a line says about a phase without steps."""

    CHECKPOINT_BEGIN = "checkpoint_begin"
    CHECKPOINT_END = "checkpoint_end"
    EVAL_BEGIN = "eval_begin"
    EVAL_END = "eval_end"


@dataclass(frozen=True)
class LogReading:
    """One line's content; None for absent fields.

    ``step`` is the last finished step. ``step_s`` (seconds per step), ``loss``, ``grad_norm`` and ``tokens_per_second``
    (of the rank) are means over the steps since the line before; NaN and infinity are reported as logged.
    ``job_tokens_per_second`` is the whole job's. ``stamp_s`` is the line's timestamp: seconds since an arbitrary
    moment, so that only differences are meaningful. ``quiet_step`` is a checkpoint's step. ``rank`` is the global rank
    if the line contains it; ``writer`` says which rank writes such lines if nothing else does.
    """

    step: int | None = None
    step_s: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    job_tokens_per_second: float | None = None
    stamp_s: float | None = None
    quiet: Quiet | None = None
    quiet_step: int | None = None
    rank: int | None = None
    writer: LineWriter = LineWriter.ANY


Parse = Callable[[str], "LogReading | None"]


@dataclass(frozen=True)
class Framework:
    """One framework's log lines.

    A line without any of ``needles`` is not one of its lines. ``parser`` creates a parser for one log: it takes lines
    without prefixes, never raises, and may keep state. Once a log is known to be the framework's,
    ``needles_once_known`` are searched instead, if any. ``engine``: a library below other frameworks, whose lines say
    more. ``general``: parses lines of no particular framework, until one is recognised.
    """

    name: str
    needles: tuple[bytes, ...]
    parser: Callable[[], Parse]
    engine: bool = False
    general: bool = False
    needles_once_known: tuple[bytes, ...] = ()


# tqdm's progress bars, as logged.
#
# A bar's rate is not read: it is a mean over what the program pleases, an epoch with its evaluations, or a few recent
# rounds.
_BAR = re.compile(
    rf"^(?P<label>[^|%\n]{{0,200}}?):? {{0,4}}(?:[0-9]{{1,3}}%)?\|[^|]{{0,400}}\|"
    rf" {{0,12}}(?P<done>{NUMBER})/(?P<total>{NUMBER}|\?)"
    r" \[[0-9:?]{1,12}<[0-9:?a-z, ]{1,24}(?:, {0,4}[0-9.?]{1,12} ?[A-Za-z]{1,12}/[A-Za-z]{1,12})?"
    r"(?P<rest>[^\]]{0,2000})"
)


@dataclass(frozen=True)
class ProgressBar:
    """One state of a bar: ``done`` of ``total`` (None: unknown), and the text around it.

    ``label`` is "" for a bar without one. ``postfix`` are the ``name=value`` pairs after the rate.
    """

    label: str
    done: int
    total: int | None
    postfix: dict[str, str]


def bar(line: str) -> ProgressBar | None:
    """Parse the line as a bar; return None when it is not one."""
    found = _BAR.match(line)
    done = _count(found["done"]) if found is not None else None
    if found is None or done is None:
        return None
    postfix = {}
    for field in found["rest"].split(", "):
        name, equals, value = field.partition("=")
        if equals:
            postfix[name.strip()] = value
    return ProgressBar(found["label"].strip(), done, _count(found["total"]), postfix)


def _count(text: str) -> int | None:
    value = number(text)
    return int(value) if value is not None and 0 <= value < STEP_MAX else None


# Finds the few relevant lines of a log, without examining each.
#
# ``bytes.find`` scans a gigabyte per second; a regular expression on each line costs a hundred times as much.
LINE_BYTES_MAX = 8_192  # read of each line; the longest known lines, structured ones, are below 2 KB


def starts_of(lines: bytes, needles: Iterable[bytes]) -> list[int]:
    """Return the starts of lines that contain any of the needles, in order; an empty needle matches every line."""
    starts: set[int] = set()
    for needle in needles:
        at = lines.find(needle)
        while at >= 0:
            starts.add(lines.rfind(b"\n", 0, at) + 1)
            end = lines.find(b"\n", at)
            at = lines.find(needle, end + 1) if end >= 0 else -1
    return sorted(starts)


def line_at(lines: bytes, start: int) -> tuple[str, int]:
    """Return the line that starts there, and where the next one starts."""
    end = lines.find(b"\n", start)
    end = len(lines) if end < 0 else end
    return lines[start : min(end, start + LINE_BYTES_MAX)].decode("utf-8", "replace"), end + 1


# Unwraps a program's own lines from the container runtime's log format.
#
# Docker's json-file driver writes ``{"log":"text","stream":"stdout","time":"..."}``, a long line in pieces of 16 KB of
# which only the last one's text ends in a newline. Kubernetes' CRI writes ``<time> stdout F text``, P in place of F
# for a piece that is not the last; the prefix of a CRI line is left to ``without_prefixes``.
_DOCKER = b'{"log":"'
_STREAMS = ("stdout", "stderr")
_CRI_PIECE = re.compile(rb"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{8,20}(?:Z|[+-][0-9:]{5}) (stdout|stderr) ([FP]) ")
_CRI_PIECES = (b" stdout P ", b" stderr P ")


class _Entry(msgspec.Struct):
    log: str
    stream: str
    time: str  # unused, but keeps a program's own JSON line from being taken for an entry


_decoder = msgspec.json.Decoder(_Entry)


class ContainerLines:
    """Unwraps the lines of one log, in a runtime's format or not; pieces of a line wait for its last one.

    The first LINE_BYTES_MAX of a line in pieces are kept: no more of any line is read.
    """

    def __init__(self) -> None:
        self._pieces: dict[str, bytes] = {}  # by stream

    def unwrapped(self, lines: bytes) -> bytes:
        """Return the program's own complete lines from complete lines of the log."""
        if _DOCKER in lines:
            return b"".join(self._docker(line) for line in lines.splitlines(keepends=True))
        if self._pieces or any(mark in lines for mark in _CRI_PIECES):
            return b"".join(self._cri(line) for line in lines.splitlines(keepends=True))
        return lines

    def _docker(self, line: bytes) -> bytes:
        if not line.startswith(_DOCKER):
            return line
        try:
            entry = _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeError, RecursionError):  # invalid characters; unbalanced brackets
            return line
        if entry.stream not in _STREAMS:
            return line
        text = self._pieces.pop(entry.stream, b"") + entry.log.encode("utf-8", "replace").replace(b"\r", b"\n")
        end = text.rfind(b"\n") + 1
        self._keep(entry.stream, text[end:])
        return text[:end]

    def _cri(self, line: bytes) -> bytes:
        found = _CRI_PIECE.match(line)
        if found is None:
            return line
        stream = found[1].decode()
        begun = self._pieces.pop(stream, b"")
        text = begun + line[found.end() :] if begun else line
        if found[2] == b"F":
            return text
        self._keep(stream, text.rstrip(b"\n"))
        return b""

    def _keep(self, stream: str, piece: bytes) -> None:
        if piece:
            self._pieces[stream] = piece[:LINE_BYTES_MAX]


# Strips what terminals and launchers add to a line: colours, ranks, tasks, pids.
#
# Known: PyTorch's ``[rank3]: `` (the rank in the job), torchrun's ``[default0]:`` (role and local rank; torchtitan
# calls its role "rank", but only PyTorch adds a space or a log level after it), the task of ``srun --label`` (``3:
# ``), Ray's ``(Trainer pid=12, ip=10.0.0.2) ``, Open MPI's ``[1,3]<stdout>:``, the CRI's time and stream before each
# line of a container's log, and ``kubectl logs --timestamps``'s time before an object.
PREFIXES_MAX = 4  # of different launchers, nested

_BEGINNINGS = frozenset("[( 0123456789")

_ANSI = re.compile(r"\x1b(?:\[[0-9;:?]{0,40}[ -/]?[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\))")
_CRI = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{8,20}(?:Z|[+-][0-9:]{5}) (?:(?:stdout|stderr) [FP] |(?=\{))")
_TASK = re.compile(r" {0,6}([0-9]{1,7}): ")
_RANK = re.compile(r"\[rank([0-9]{1,7})\]:(?: |(?=\[?[A-Z][0-9]{3,4} ))")
_ROLE = re.compile(r"\[[A-Za-z_]{1,40}([0-9]{1,5})\]:")
_MPI = re.compile(r"\[[0-9]{1,7},([0-9]{1,7})\]<std(?:out|err)>: ?")
_RAY = re.compile(r"\([A-Za-z_][^()]{0,200}?pid=([0-9]{1,10})(?:, ip=[0-9A-Fa-f.:]{2,45})?\) ?")


@dataclass(frozen=True)
class LogLine:
    """A line without its prefixes, and their values; None for those absent.

    ``rank`` is the rank in the job, ``local_rank`` the one among a launcher's ranks, ``task`` the scheduler's task.
    """

    text: str
    rank: int | None = None
    local_rank: int | None = None
    task: int | None = None
    pid: int | None = None


def without_prefixes(line: str) -> LogLine:
    """Return the line without colours and known prefixes."""
    if "\x1b" in line:
        line = _ANSI.sub("", line)
    rank = local_rank = task = pid = None
    at = 0
    if line[:1] not in _BEGINNINGS:
        return LogLine(line)
    for place in range(PREFIXES_MAX):
        if found := _CRI.match(line, at):
            pass
        elif found := _RANK.match(line, at):
            rank = int(found[1])
        elif found := _ROLE.match(line, at):
            local_rank = int(found[1])
        elif found := _MPI.match(line, at):
            rank = int(found[1])
        elif found := _RAY.match(line, at):
            pid = int(found[1])
        elif place == 0 and (found := _TASK.match(line, at)):
            task = int(found[1])
        else:
            break
        at = found.end()
    return LogLine(line[at:], rank, local_rank, task, pid)
