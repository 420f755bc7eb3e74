"""The request posted for an event. A format decides its content; signing, limits and target checks happen elsewhere."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from eagle_eye.server.model.records import OutboundEvent, Subscription


class Message(NamedTuple):
    """One request. ``id`` is the same at every attempt and lets the target recognise repetitions."""

    id: str
    url: str
    content_type: str
    body: bytes


class Format(Protocol):
    """Turns an event into a request. Pure: the same arguments give the same message."""

    def message(self, subscription: Subscription, event: OutboundEvent, now_s: float) -> Message:
        """Return what to post. ``event`` is of one of the types that the format can say (``filters.types_of``)."""
        ...
