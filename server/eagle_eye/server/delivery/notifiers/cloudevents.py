"""The format "cloudevents": CloudEvents 1.0 in structured JSON."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from eagle_eye.server.delivery.notifiers.message import Message
from eagle_eye.server.model.records import OutboundEvent, Subscription
from eagle_eye.server.model.timestamps import rfc3339

CONTENT_TYPE = "application/cloudevents+json"


class CloudEvents:
    """``source`` names this server in every event; ``epoch()`` is that under which it leads, 0 for a server alone.

    ``lease_s`` is how long another server waits for a sign of life of this one, at least, before it leads.
    """

    def __init__(self, source: str, epoch: Callable[[], int] = lambda: 0, lease_s: float = 0.0) -> None:
        self._source = source
        self._epoch = epoch
        self._lease_s = lease_s

    def message(
        self,
        subscription: Subscription,
        event: OutboundEvent,
        now_s: float,  # noqa: ARG002 - other formats include the time
    ) -> Message:
        """Return the event's envelope; the same bytes at every attempt of one leader."""
        body = envelope(event, self._source, self._epoch(), self._lease_s)
        return Message(event.id, subscription.url, CONTENT_TYPE, body)


def envelope(event: OutboundEvent, source: str, epoch: int = 0, lease_s: float = 0.0) -> bytes:
    """Return the event as a CloudEvent in structured JSON; numbers that JSON lacks become null."""
    return msgspec.json.encode(
        {
            "specversion": "1.0",
            "id": event.id,
            "source": source,
            "type": event.type,
            "subject": event.subject,
            "time": rfc3339(event.time_s),
            "datacontenttype": "application/json",
            "data": {**event.data, "epoch": epoch, "lease_seconds": lease_s} if epoch else event.data,
        }
    )
