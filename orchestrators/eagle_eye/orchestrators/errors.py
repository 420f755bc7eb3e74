"""Errors between Eagle Eye and the system that restarts a job.

OrchestratorError
├── CannotCarryOutError     the orchestrator may not or cannot do what was asked; the message is the report
├── UnacceptableEventError  the webhook's body is signed but not understood
├── LowerEpochError         the webhook is from a server that leads no more, or whose database was restored
└── ServerUnreachableError  Eagle Eye's server did not answer, or not with what was expected
    └── RejectedError       it answered, and said no
"""

from __future__ import annotations


class OrchestratorError(Exception):
    """The base class of this package's errors."""


class CannotCarryOutError(OrchestratorError):
    """The request cannot be carried out; the message says why and is reported to the server unchanged."""


class UnacceptableEventError(OrchestratorError):
    """A correctly signed delivery that is not a CloudEvent that this package understands."""


class LowerEpochError(OrchestratorError):
    """An event's epoch is lower than ``seen``, the highest that was seen; nothing of it is kept."""

    def __init__(self, message: str, seen: int) -> None:
        super().__init__(message)
        self.seen = seen


class ServerUnreachableError(OrchestratorError):
    """The server did not answer or refused; worth retrying later. The message holds no secret."""


class RejectedError(ServerUnreachableError):
    """The server answered with an error; ``status`` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def may_pass(self) -> bool:
        """Whether the server may accept the same request later: after a token is renewed, or an overload is over."""
        return self.status >= 500 or self.status in (401, 403, 408, 425, 429)
