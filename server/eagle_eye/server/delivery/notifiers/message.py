"""The request posted for an event. A format produces its content; signing, limits and target checks are elsewhere."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from eagle_eye.server.model.records import OutboundEvent, Subscription


class Message(NamedTuple):
    """One request. ``id`` is the same at every attempt, so that the target can recognise repetitions."""

    id: str
    url: str
    content_type: str
    body: bytes


class Format(Protocol):
    """Turns an event into a request. Pure: the same arguments give the same message."""

    def message(self, subscription: Subscription, event: OutboundEvent, now_s: float) -> Message:
        """Return what to post. ``event`` is of one of the types that the format supports (``filters.types_of``)."""
        ...
