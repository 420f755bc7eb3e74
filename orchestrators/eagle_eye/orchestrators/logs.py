"""What the commands of this package log: one line on stderr for each record, whoever chose the names in it."""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

# Names of jobs and nodes, and what programs print, come from outside: none of it may begin a line of its own, or move
# a terminal's cursor.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def to_stderr() -> None:
    """The process logs to stderr from now on; of each request only what went wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)


def one_line(text: str) -> str:
    """Return the text with its control characters escaped."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _OneLine(logging.Formatter):
    """A traceback follows its line, moved in."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name for it
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name for it
        return "\n".join(f"  {one_line(line)}" for line in super().formatException(ei).split("\n"))
