"""What can go wrong in the server.

ServerError
  HistoryUnavailable    the history takes no frames at the moment (disk full); the agent tries again
    HistoryMoved        ... what was to be read was moved meanwhile; asked again, it answers
    HistoryBusy         ... because too much waits for the disk already
  StoreUnavailable      the records cannot be written or read at the moment
  BadCursor             a page was asked for with a cursor that this server did not give
  IllegalTransition     a record is in a state from which the change is not allowed
  RemoteStoreSilent     the Prometheus-compatible store gave no answer that can be used
  TargetRefused         a webhook's URL leads where deliveries may not go
  BackupFailed          no backup was made; what was there is as it was
  Refusal               an HTTP request is refused; carries its status and reason
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from eagle_eye.schema.problem import problem

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class ServerError(Exception):
    """Something the server names; everything else that escapes is a bug."""


class HistoryUnavailable(ServerError):
    """The history could not make frames durable; nothing of the request was kept."""


class HistoryMoved(HistoryUnavailable):
    """What was to be read is not there any more; asked again, the history answers from what is."""


class HistoryBusy(HistoryUnavailable):
    """More bytes wait for the disk than the limit allows; try again shortly."""


class StoreUnavailable(ServerError):
    """The records could not be written or read; nothing of the change was kept."""


class BadCursor(ServerError):
    """A cursor that this server did not give, or that belongs to another list."""


class IllegalTransition(ServerError):
    """A change that the record's state does not allow; the record is as it was."""


class TargetRefused(ServerError):
    """A URL that deliveries may not go to; the message says which rule and which setting."""


class RemoteStoreSilent(ServerError):
    """A Prometheus gave no answer that can be used; ``too_large``: it may, for less at a time."""

    def __init__(self, detail: str, too_large: bool = False) -> None:
        super().__init__(detail)
        self.too_large = too_large


class BackupFailed(ServerError):
    """No backup was made; the message says of what and why."""


class Refusal(ServerError):
    """A request that is refused with ``status``; ``reason`` is one stable word for counters and clients."""

    def __init__(self, status: int, reason: str, detail: str, headers: Mapping[str, str] = NO_HEADERS) -> None:
        super().__init__(detail)
        self.status = status
        self.reason = reason
        self.detail = detail
        self.headers = headers

    def document(self) -> bytes:
        """Return the problem document that answers the request (RFC 9457)."""
        return msgspec.json.encode(problem(self.status, self.reason, self.detail))
