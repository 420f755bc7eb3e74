"""Finding in a log the place and the line with which a Python traceback ends. Pure; never raises."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from eagle_eye.agent.training_logs.line_prefixes import Line

HEADER = "Traceback (most recent call last):"
STREAMS_MAX = 64  # ranks whose tracebacks may stand interleaved in one log
LINES_MAX = 1_000  # of one traceback: the interpreter prints at most 1,000 frames, and folds recursion

# A name as classes have it, with its module: letters of both cases, so that "WARNING: ..." is none.
_ENDING = re.compile(r"((?:[A-Za-z_]\w{0,100}\.){0,12}([A-Z]\w{0,100}|\w{0,100}?(?:error|Error|timeout)))(?::\s.*)?$")
_PLACE = re.compile(r'\s{1,8}File "[^"]{1,400}", line \d{1,9}(, in .{1,200})?\s*$')
# How programs are stopped, and what launchers say when a rank of theirs has failed.
_NO_CAUSE = frozenset({"KeyboardInterrupt", "SystemExit", "GeneratorExit", "SignalException", "ChildFailedError"})


@dataclass
class _Open:
    header: Line
    lines: int = 0
    in_frame: bool = False
    place: list[str] = field(default_factory=list)  # of the frame last printed, the innermost, and its line of source


class Tracebacks:
    """The tracebacks that are under way in one log, one for each rank or process that prefixes name."""

    def __init__(self) -> None:
        self._open: dict[tuple[int | None, ...], _Open] = {}

    @property
    def under_way(self) -> bool:
        """Whether the next lines belong to a traceback."""
        return bool(self._open)

    def take(self, line: Line) -> tuple[Line, str] | None:
        """Take the log's next line; where it ends a traceback of an error return the header and what it says.

        That is the place of the innermost frame, where it was printed, and this line, as in a traceback.
        """
        # An indented line may look as if its prefix had a space behind it: only the header's tells rank and local rank.
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
        """Give up what has not gone on for many lines of others."""
        for stream, known in list(self._open.items()):
            known.lines += 1
            if known.lines >= LINES_MAX:
                del self._open[stream]
