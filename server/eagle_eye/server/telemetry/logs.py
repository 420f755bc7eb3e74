"""Logging: one line per event, as JSON or for people, without secrets. Touches: stderr.

Modules log through the standard library: constant text, with the details in ``extra``. structlog formats every record
of the process, including those of uvicorn and asyncio, warnings and uncaught errors.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from types import TracebackType
from typing import Any, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from eagle_eye.schema.configuration import SECRET_FIELDS
from eagle_eye.server.telemetry.settings import LogSettings

VALUE_CHARS_MAX = 16_384  # per value: a traceback fits
MASK = "********"
# A line per request or attempt would bury the important lines, and those lines contain URLs and headers.
QUIET = ("alembic", "httpx", "httpcore", "asyncio", "uvicorn.error", "uvicorn.access")
_SECRET_KEYS = SECRET_FIELDS | {"authorization", "password"}
_SECRETS = re.compile(
    r"\bee_[A-Za-z0-9_-]{16,}"  # tokens
    r"|\bwhsec_[A-Za-z0-9+/_-]{8,}=*"  # webhooks' secrets
    r"|(?<=://)[^\s/@]+(?=@)"  # the user and password of a URL
    r"|(?i:(?<=bearer )|(?<=basic ))[A-Za-z0-9._~+/=-]{8,}"
)
# What follows a URL's host may be a credential: many webhook receivers identify senders by the path alone.
_URL_REST = re.compile(r"(https?://[^\s/?#\"'<>]+)[/?#][^\s\"'<>]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

_log = logging.getLogger(__name__)


def configure(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Configure logging of the whole process to ``stream`` (stderr)."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_formatter(settings.format, colors=stream.isatty()))
    root = logging.getLogger()
    root.handlers = [handler]
    set_level(settings.level)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(capture=True)
    sys.excepthook = _on_uncaught
    sys.unraisablehook = lambda reported: _uncaught(reported.exc_value, str(reported.object))
    threading.excepthook = lambda reported: _uncaught(
        reported.exc_value, reported.thread.name if reported.thread else ""
    )


def set_level(level: str) -> None:
    """Set the minimum level: debug, info, warning or error."""
    logging.getLogger().setLevel(level.upper())


def redacted(text: str) -> str:
    """Return the text without tokens, webhooks' secrets, and everything of a URL but scheme and host."""
    return _URL_REST.sub(rf"\1/{MASK}", _SECRETS.sub(MASK, text))


def _formatter(kind: str, *, colors: bool) -> logging.Formatter:
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        _without_secrets,
    ]
    if kind == "json":
        shared.append(structlog.processors.JSONRenderer(serializer=_as_json))
    else:
        plain = structlog.dev.plain_traceback  # the richer ones show local variables, and with them secrets
        shared += [
            _without_breaks,
            structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=0, sort_keys=False, exception_formatter=plain),
        ]
    return structlog.stdlib.ProcessorFormatter(processors=shared)


def _without_secrets(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    return {key: MASK if key.lower() in _SECRET_KEYS else _safe(value) for key, value in event.items()}


def _safe(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    # All other types become text first: a secret inside a list or an object would be missed.
    text = redacted(value if isinstance(value, str) else repr(value))
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[:VALUE_CHARS_MAX]}... ({len(text)} characters)"


def _without_breaks(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Keep external text from ending a line and starting a forged one; tracebacks are indented."""
    for key, value in event.items():
        if key == "exception":
            event[key] = "\n".join(f"  {_escaped(line)}" for line in str(value).split("\n"))
        elif isinstance(value, str):
            event[key] = _escaped(value)
    return event


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _as_json(event: EventDict, **_options: Any) -> str:
    return msgspec.json.encode(event).decode()


def _on_uncaught(_kind: type[BaseException], error: BaseException, _trace: TracebackType | None) -> None:
    if isinstance(error, KeyboardInterrupt):
        return
    _uncaught(error, "main")


def _uncaught(error: BaseException | None, where: str) -> None:
    _log.critical("an error was caught by nobody", exc_info=error, extra={"where": where})
