"""Logging of this package's commands: one line on stderr per record, with untrusted names escaped."""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

# Names of jobs and nodes, and output of programs, are untrusted: they must not start a line of their own, or move a
# terminal's cursor.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def to_stderr() -> None:
    """Log to stderr from now on; of requests only failures."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)


def one_line(text: str) -> str:
    """Return the text with its control characters escaped."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _OneLine(logging.Formatter):
    """Formats a record as one line; a traceback follows it, indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name for it
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name for it
        return "\n".join(f"  {one_line(line)}" for line in super().formatException(ei).split("\n"))
