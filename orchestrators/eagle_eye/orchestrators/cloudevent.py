"""Webhook bodies: CloudEvents 1.0 in structured JSON, and the actions inside them. Pure."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, TypeVar

import msgspec

from eagle_eye.orchestrators.protocol import UnacceptableEventError
from eagle_eye.schema.action import EPOCH_MAX, ActionRequest

CONTENT_TYPE = "application/cloudevents+json"
ShapeT = TypeVar("ShapeT")
_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:~-]{0,127}\Z")


class CloudEvent(msgspec.Struct, frozen=True):
    """An event as received; ``data`` is still undecoded JSON, ``time`` RFC 3339 or ""."""

    specversion: str
    id: str
    type: str
    source: str
    time: str = ""
    data: msgspec.Raw = msgspec.Raw(b"null")


class EpochReference(msgspec.Struct, frozen=True):
    """The epoch in an event's data, 0 for none."""

    epoch: Annotated[int, msgspec.Meta(ge=0, le=EPOCH_MAX)] = 0


class ActionReference(msgspec.Struct, frozen=True):
    """The relevant part of an expired or withdrawn action's data."""

    action_id: str


class NodeReference(msgspec.Struct, frozen=True):
    """The data of a readmission: one or several nodes."""

    node: str = ""
    nodes: list[str] = []

    def names(self) -> list[str]:
        """Return every node named."""
        return [*([self.node] if self.node else []), *self.nodes]


def parse_event(body: bytes) -> CloudEvent:
    """Return the event in the body. Raises UnacceptableEventError saying what is wrong."""
    event = _decode(body, CloudEvent, "the body is not a CloudEvent in structured JSON")
    if event.specversion != "1.0":
        raise UnacceptableEventError(f"specversion is {event.specversion[:16]!r}; expected '1.0'")
    if not event.id or not event.type:
        raise UnacceptableEventError("id and type must not be empty")
    return event


def parse_action(event: CloudEvent) -> ActionRequest:
    """Return the requested action, with its times checked. Raises UnacceptableEventError."""
    action = _decode(event.data, ActionRequest, "data is not an action")
    if not is_identifier(action.action_id):
        raise UnacceptableEventError("action_id must be 1 to 128 letters, digits or '._:~-'")
    for name in ("onset", "detected", "expires"):
        unix_seconds(getattr(action, name), name)
    return action


def parse_reference(event: CloudEvent) -> ActionReference:
    """Return the action that an expiry or withdrawal refers to. Raises UnacceptableEventError."""
    return _decode(event.data, ActionReference, "data does not name an action")


def epoch_of(event: CloudEvent) -> int:
    """Return the epoch of the server that sent the event, 0 where it says none: then it is the only one."""
    try:
        return msgspec.json.decode(event.data, type=EpochReference).epoch
    except (msgspec.DecodeError, RecursionError):
        return 0


def parse_nodes(event: CloudEvent) -> list[str]:
    """Return the nodes of a readmission. Raises UnacceptableEventError."""
    return _decode(event.data, NodeReference, "data does not name nodes").names()


def is_identifier(text: str) -> bool:
    """Whether the text can be used unchanged in a URL path and a log line."""
    return _IDENTIFIER.match(text) is not None


def unix_seconds(text: str, name: str) -> float:
    """Return an RFC 3339 time as Unix seconds. Raises UnacceptableEventError where it is not one."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UnacceptableEventError(f"{name} is {text[:40]!r}; expected an RFC 3339 time") from None
    if moment.tzinfo is None:
        raise UnacceptableEventError(f"{name} is {text[:40]!r}; expected an offset from UTC, such as Z")
    return moment.timestamp()


def _decode(body: bytes | msgspec.Raw, shape: type[ShapeT], what: str) -> ShapeT:
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnacceptableEventError(f"{what}: {error}") from None
