"""Finds the innermost frame and the last line of Python tracebacks in a log. Pure; never raises."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from eagle_eye.agent.training_logs.line_prefixes import LogLine

HEADER = "Traceback (most recent call last):"
STREAMS_MAX = 64  # ranks whose tracebacks may be interleaved in one log
LINES_MAX = 1_000  # per traceback: the interpreter prints at most 1,000 frames, and folds recursion

# A class name with its module: mixed case, so that "WARNING: ..." does not match.
_ENDING = re.compile(r"((?:[A-Za-z_]\w{0,100}\.){0,12}([A-Z]\w{0,100}|\w{0,100}?(?:error|Error|timeout)))(?::\s.*)?$")
_PLACE = re.compile(r'\s{1,8}File "[^"]{1,400}", line \d{1,9}(, in .{1,200})?\s*$')
# Exceptions that stop programs deliberately, and those launchers raise when one of their ranks has failed.
_NO_CAUSE = frozenset({"KeyboardInterrupt", "SystemExit", "GeneratorExit", "SignalException", "ChildFailedError"})


@dataclass
class _Open:
    header: LogLine
    lines: int = 0
    in_frame: bool = False
    place: list[str] = field(default_factory=list)  # of the last printed frame, the innermost, with its source line


class Tracebacks:
    """The open tracebacks in one log, one per rank or process named in prefixes."""

    def __init__(self) -> None:
        self._open: dict[tuple[int | None, ...], _Open] = {}

    @property
    def under_way(self) -> bool:
        """Whether the next lines belong to a traceback."""
        return bool(self._open)

    def take(self, line: LogLine) -> tuple[LogLine, str] | None:
        """Take the log's next line; if it ends an error's traceback, return the header and the error text.

        The text is the innermost frame, if printed, and this line, as in a traceback.
        """
        # An indented line may look as if its prefix ended in a space: only the header's prefix distinguishes rank and
        # local rank.
        stream = (line.local_rank if line.rank is None else line.rank, line.task, line.pid)
        if line.text.startswith(HEADER):
            if stream in self._open or len(self._open) < STREAMS_MAX:
                self._open[stream] = _Open(line)
            return None
        known = self._open.get(stream)
        if known is None:
            self._count_other_lines()
            return None
        known.lines += 1
        if line.text.startswith((" ", "\t")) and known.lines < LINES_MAX:
            known.in_frame = True
            if _PLACE.match(line.text):
                known.place = [line.text]
            elif len(known.place) == 1:
                known.place.append(line.text)
            return None
        del self._open[stream]
        found = _ENDING.match(line.text) if known.in_frame else None
        if found is None or found[2] in _NO_CAUSE or found[2].isupper():
            return None
        return known.header, "\n".join([*known.place, line.text])

    def _count_other_lines(self) -> None:
        """Drop tracebacks that have not continued for many other lines."""
        for stream, known in list(self._open.items()):
            known.lines += 1
            if known.lines >= LINES_MAX:
                del self._open[stream]
