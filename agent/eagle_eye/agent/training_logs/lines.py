"""Finds the relevant lines of a log and strips what containers, terminals and launchers add. Pure; never raises."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

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
