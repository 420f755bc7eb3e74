"""The format "cloudevents": CloudEvents 1.0 in structured JSON."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from eagle_eye.server.delivery.notifiers.message import Message
from eagle_eye.server.model.records import OutboundEvent, Subscription
from eagle_eye.server.model.timestamps import rfc3339

CONTENT_TYPE = "application/cloudevents+json"


class CloudEvents:
    """``source`` names this server in every event; ``epoch()`` is that under which it leads, 0 for a server alone."""

    def __init__(self, source: str, epoch: Callable[[], int] = lambda: 0) -> None:
        self._source = source
        self._epoch = epoch

    def message(
        self,
        subscription: Subscription,
        event: OutboundEvent,
        now_s: float,  # noqa: ARG002 - other formats include the time
    ) -> Message:
        """Return the event's envelope; the same bytes at every attempt of one leader."""
        return Message(event.id, subscription.url, CONTENT_TYPE, envelope(event, self._source, self._epoch()))


def envelope(event: OutboundEvent, source: str, epoch: int = 0) -> bytes:
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
            "data": {**event.data, "epoch": epoch} if epoch else event.data,
        }
    )
