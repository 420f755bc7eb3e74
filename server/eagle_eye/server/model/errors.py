"""The server's errors.

ServerError
  HistoryUnavailable    the history cannot store frames at present (disk full); the agent retries
    HistoryMoved        ... the data to read was moved meanwhile; a retry succeeds
    HistoryBusy         ... because too much is waiting for the disk
  StoreUnavailable      the records cannot be written or read at present
    NotLeading          ... because another server leads, or may lead by now
  BadCursor             a page was requested with a cursor that this server did not create
  IllegalTransition     a record's state does not allow the change
  RemoteStoreSilent     the Prometheus-compatible store gave no usable answer
  TargetRefused         a webhook's URL leads where deliveries may not go
  BackupFailed          no backup was made; existing files are unchanged
  Refusal               an HTTP request is refused; carries its status and reason
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from eagle_eye.schema.problem import problem

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class ServerError(Exception):
    """An error that the server anticipates; any other exception that escapes is a bug."""


class HistoryUnavailable(ServerError):
    """The history could not make frames durable; nothing of the request was kept."""


class HistoryMoved(HistoryUnavailable):
    """The data to read has moved; on a retry the history answers from its new place."""


class HistoryBusy(HistoryUnavailable):
    """More bytes wait for the disk than the limit allows; retry shortly."""


class StoreUnavailable(ServerError):
    """The records could not be written or read; nothing of the change was kept."""


class NotLeading(StoreUnavailable):
    """Another server leads, or may lead by now; nothing was decided or written."""


class BadCursor(ServerError):
    """A cursor that this server did not create, or that belongs to another list."""


class IllegalTransition(ServerError):
    """The record's state does not allow the change; the record is unchanged."""


class TargetRefused(ServerError):
    """A URL that deliveries may not go to; the message names the rule and the setting."""


class RemoteStoreSilent(ServerError):
    """A Prometheus gave no usable answer; ``too_large``: it may, for a smaller request."""

    def __init__(self, detail: str, too_large: bool = False) -> None:
        super().__init__(detail)
        self.too_large = too_large


class BackupFailed(ServerError):
    """No backup was made; the message gives the reason."""


class CopyFailed(ServerError):
    """Records were not copied, or not all; the message gives the reason."""


class Refusal(ServerError):
    """A request is refused with ``status``; ``reason`` is one stable word for counters and clients."""

    def __init__(self, status: int, reason: str, detail: str, headers: Mapping[str, str] = NO_HEADERS) -> None:
        super().__init__(detail)
        self.status = status
        self.reason = reason
        self.detail = detail
        self.headers = headers

    def document(self) -> bytes:
        """Return the problem document of the answer (RFC 9457)."""
        return msgspec.json.encode(problem(self.status, self.reason, self.detail))


def how_it_ended(code: int, said: str) -> str:
    """Return how a process ended, with its last words if it had any; a negative code is a signal."""
    if code >= 0:
        return f"ended with {code}: {said or 'it gave no reason'}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    killed = f"ended by {name}"
    if not said and -code == signal.SIGKILL:
        said = "perhaps for lack of memory (see the kernel log)"
    return f"{killed}: {said}" if said else f"{killed}, without a word"


def in_words(error: BaseException) -> str:
    """Return the error's kind and text; the kind alone where it has no text, as many timeouts have none."""
    return f"{type(error).__name__}: {error}".rstrip(": ")
