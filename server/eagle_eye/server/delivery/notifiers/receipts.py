"""What came of one attempt to deliver."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol

from eagle_eye.server.delivery.notifiers.message import Message
from eagle_eye.server.model.records import OutboundEvent, Subscription


class Outcome(str, Enum):
    """Whether the target has the event, and if not, whether trying again could help."""

    DELIVERED = "delivered"
    RETRY = "retry"
    REJECTED = "rejected"
    GONE = "gone"  # the target wants nothing any more


class Receipt(NamedTuple):
    """``status`` is the HTTP status, None when there was no answer; ``error`` never holds the URL or a secret.

    ``retry_after_s`` is how long the target asked to be left alone, None if it did not.
    """

    outcome: Outcome
    status: int | None = None
    error: str = ""
    retry_after_s: float | None = None


class Notifier(Protocol):
    """Makes one attempt. It neither retries nor logs nor counts; the outbox does."""

    async def deliver(
        self, subscription: Subscription, event: OutboundEvent, now_s: float, timeout_s: float
    ) -> Receipt:
        """Return what came of one attempt, within ``timeout_s``."""
        ...

    async def post(self, subscription: Subscription, message: Message, now_s: float, timeout_s: float) -> Receipt:
        """Return what came of posting something that is no event, within ``timeout_s``."""
        ...
