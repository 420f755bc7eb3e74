"""What this package's commands share: parsers of option values, which read files, and one line on stderr per record."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from pathlib import Path
from typing import Any

from eagle_eye.orchestrators.protocol import OrchestratorError

TOKEN_BYTES_MAX = 4_096


def seconds(text: str) -> float:
    """Return a time span in seconds, above 0."""
    found = _seconds(text)
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text!r}")
    return found


def seconds_or_none(text: str) -> float:
    """Return a time span in seconds, 0 for none."""
    found = _seconds(text)
    if not 0 <= found < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds, 0 or more, got {text!r}")
    return found


def positive(text: str) -> int:
    """Return a count, 1 or more."""
    found = _whole(text)
    if found < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more, got {text!r}")
    return found


def count(text: str) -> int:
    """Return a count, 0 or more."""
    found = _whole(text)
    if found < 0:
        raise argparse.ArgumentTypeError(f"expected a whole number, 0 or more, got {text!r}")
    return found


def address(text: str) -> tuple[str, int]:
    """Return (host, port) of HOST:PORT."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 <= _whole(port) <= 65_535:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)


def token(file: Path | None) -> str:
    """Return the token in a file, "" without a file. Raises OrchestratorError."""
    if file is None:
        return ""
    try:
        with file.open("rb") as opened:
            found = opened.read(TOKEN_BYTES_MAX + 1).decode("ascii").strip()
    except OSError as error:
        raise OrchestratorError(f"--token-file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        found = "\n"
    if len(found) > TOKEN_BYTES_MAX or not found.isprintable():  # it goes into a header
        raise OrchestratorError(f"--token-file {file}: expected one line of ASCII, a token")
    return found


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return -1


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
