"""Parses the exception that ended a rank: type, place, and whether a faulty node may have caused it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from eagle_eye.detectors.signs.exits import ECHO, Exit
from eagle_eye.detectors.types import Window

TRACEBACK_CHARS_MAX = 4_096
HEADER = "Traceback (most recent call last):"
_CHAINED = re.compile(r"^(?:During handling of|The above exception was).*:$", re.MULTILINE)
_FRAME = re.compile(r'\s{0,8}File "(?P<file>[^"]{1,400})", line (?P<line>\d{1,9})(?:, in (?P<function>.{1,200}))?\s*\Z')
_ENDING = re.compile(r"(?P<kind>(?:[A-Za-z_]\w{0,100}\.){0,12}[A-Za-z_]\w{0,100})(?::\s?(?P<message>.*))?\Z", re.DOTALL)
# What a peer, a device, the network or storage does to a correct program, by the exception's type...
_KINDS_OF_OTHERS = re.compile(
    r"Dist\w*Error|Connection|Timeout|Network|Socket|HTTP|SSL|Broken|Remote|Interrupt|Signal|SystemExit|EOFError"
    r"|ChildFailed|OutOfMemory|MemoryError|Accelerator|Cuda|CUDA|NCCL|OSError|IOError|FileNotFound|Permission|Blocking"
)
# ...by its message...
_WORDS_OF_OTHERS = re.compile(
    r"nccl|rccl|gloo|\bmpi\b|\bucx\b|watchdog|cuda|cudnn|cublas|\bhip\b|\bgpu|device|\becc\b|socket|connect|peer"
    r"|timed? ?out|network|rendezvous|allocat|memory|input/output|\bstale\b|\bspace\b|\bstore\b|storage|zip archive"
    r"|killed|signal|worker .{0,40}exited|corrupt|checksum",
    re.IGNORECASE,
)
# ...and what one node's wrong numbers do to all ranks, by the message or by the line that raised it.
_NUMBERS = re.compile(r"\bnan\b|\binf(?:inity|inite)?\b|is_?(?:nan|inf|finite)|(?:not|non)[- _]?finite", re.IGNORECASE)


def exception(text: str) -> str:
    """Return the type and place of the exception in a traceback: "KeyError at train.py:7 in main".

    "" if its place is missing, or if a peer, a device, memory, the network, storage or a signal may be the cause, of it
    or of one that it was chained to. The place is that of the innermost frame; values in the message differ between
    ranks and are ignored.
    """
    begun = text.startswith(HEADER)
    found = [_one(part) for part in text.removeprefix(HEADER).split("\n" + HEADER)]
    if not all(found) or (_CHAINED.search(text) and not begun):  # the chained exception may have been cut off
        return ""
    return found[-1]


def last_words(text: str) -> str:
    """Return the end of a traceback after its last frame: the exception and its message."""
    return _parts(text.rpartition(HEADER)[2])[2]


def _one(traceback: str) -> str:
    place, source, ending = _parts(traceback)
    found = _ENDING.match(ending)
    if place is None or found is None:
        return ""
    kind, message = found["kind"].rpartition(".")[2], found["message"] or ""
    others = _KINDS_OF_OTHERS.search(kind) or _WORDS_OF_OTHERS.search(message) or ECHO.search(message)
    if others or _NUMBERS.search(message) or _NUMBERS.search(source):
        return ""
    function = f" in {place['function']}" if place["function"] else ""
    return f"{kind} at {place['file']}:{place['line']}{function}"


def _parts(traceback: str) -> tuple[re.Match[str] | None, str, str]:
    """Return the innermost frame, its source line, and what follows the frames: everything if there are none."""
    place, source = None, ""
    lines = traceback.splitlines()
    for number, line in enumerate(lines):
        if frame := _FRAME.match(line):
            place, source = frame, lines[number + 1] if number + 1 < len(lines) else ""
        elif place is not None and line and not line[0].isspace():
            return place, source, _CHAINED.split("\n".join(lines[number:]), maxsplit=1)[0].strip()
    return place, source, "" if place is not None else traceback.strip()


def shared_exception(window: Window, exits: Sequence[Exit]) -> tuple[str, list[Exit]]:
    """Return the exception that ended most ranks of the job, and their exits; ("", []) if none did.

    If the job has several nodes the ranks must be on more than one: a single node may be the cause itself.
    """
    ends: dict[str, list[Exit]] = {}
    for item in exits:
        if item.error and (name := exception(item.error)):
            ends.setdefault(name, []).append(item)
    ranks = max(sum(series.rank >= 0 for series in window.series), len(exits))
    for name, ended in ends.items():
        nodes = {item.node for item in ended}
        if 2 * len(ended) > ranks and len(nodes) >= min(2, len(window.nodes)):
            return name, ended
    return "", []
