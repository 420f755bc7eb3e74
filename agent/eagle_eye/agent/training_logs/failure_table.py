"""Reads the table in which torchrun sums up which of its ranks failed, and how. Pure; never raises.

Source: PyTorch, torch.distributed.elastic.multiprocessing.errors (1.9 to 2.13).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from eagle_eye.agent.training_logs.last_words import LastWords, WordsReader
from eagle_eye.agent.training_logs.line_prefixes import LogLine

BEGIN = "Failures:"
NEEDLES = (BEGIN.encode(),)
LINES_MAX = 4_000  # of one table: 16 ranks with tracebacks

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

    def take(self, text: str) -> RankFailure | None:
        """Take the log's next line, without prefixes; return a rank's failure once it is read to its end."""
        if not self._read:
            self._read = int(text.rstrip() == BEGIN)
            return None
        self._read += 1
        found = _FIELD.match(text)
        if found is not None:
            self._fields.setdefault(found[1], found[2].strip())
            if found[1] == "traceback":
                self._reader.take(LogLine(found[2]))
            return None
        if not _NEXT.match(text):
            self._words = self._reader.take(LogLine(text[2:])) or self._words
            self._read %= LINES_MAX
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
