"""The result of one delivery attempt."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol

from eagle_eye.server.delivery.notifiers.message import Message
from eagle_eye.server.model.records import OutboundEvent, Subscription


class Outcome(str, Enum):
    """Whether the target received the event, and if not, whether a retry could help."""

    DELIVERED = "delivered"
    RETRY = "retry"
    REJECTED = "rejected"
    GONE = "gone"  # the target wants no further events


class Receipt(NamedTuple):
    """``status`` is the HTTP status, None without an answer; ``error`` never contains the URL or a secret.

    ``retry_after_s`` is how long the target asked for no requests, None if it did not. ``epoch_seen`` is the epoch that
    it has seen where it refuses a lower one.
    """

    outcome: Outcome
    status: int | None = None
    error: str = ""
    retry_after_s: float | None = None
    epoch_seen: int | None = None


class Notifier(Protocol):
    """Makes one attempt. It does not retry, log or count; the outbox does."""

    async def deliver(
        self, subscription: Subscription, event: OutboundEvent, now_s: float, timeout_s: float
    ) -> Receipt:
        """Return the receipt of one attempt, within ``timeout_s``."""
        ...

    async def post(self, subscription: Subscription, message: Message, now_s: float, timeout_s: float) -> Receipt:
        """Post a message that is not an event; return its receipt, within ``timeout_s``."""
        ...
