"""Request bodies for subscriptions, and their validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec
from msgspec import UNSET, UnsetType

from eagle_eye.schema.names import NAME_CHARS_MAX
from eagle_eye.server.api.constraints import EVENT_TYPE, SECRET, WEBHOOK_URL, Constraint, list_of, matcher
from eagle_eye.server.delivery.notifiers import signing
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.model.records import Subscription, WebhookFormat
from eagle_eye.server.model.subscription_filters import parse_matcher, types_of

PATTERNS_MAX = 1_000  # of jobs or faults
MATCHERS_MAX = 20
MATCHER_CHARS_MAX = 500
OVERLAP_MAX_S = 30 * 86_400.0
# Constraints of the bodies, for /openapi.json.
_GLOBS = list_of({"minLength": 1, "maxLength": NAME_CHARS_MAX}, PATTERNS_MAX)
CHANGING: Mapping[str, Constraint] = MappingProxyType(
    {
        "url": WEBHOOK_URL,
        "types": {"items": EVENT_TYPE},
        "jobs": _GLOBS,
        "faults": _GLOBS,
        "matchers": list_of(matcher(MATCHER_CHARS_MAX), MATCHERS_MAX),
    }
)
SUBSCRIBING: Mapping[str, Constraint] = MappingProxyType({**CHANGING, "secret": SECRET})
ROTATING: Mapping[str, Constraint] = MappingProxyType(
    {"secret": SECRET, "overlap_seconds": {"minimum": 0, "maximum": OVERLAP_MAX_S}}
)
SIGNING_MAX = 5  # secrets that sign at a time: each adds a signature to every request


class NewSubscription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``types``, ``jobs``, ``faults`` and ``matchers`` filter, empty means all (heartbeats only by name).

    ``secret`` "": the server makes one.
    """

    url: str
    types: list[str] = []
    jobs: list[str] = []
    faults: list[str] = []
    matchers: list[str] = []
    format: WebhookFormat = "cloudevents"
    secret: str = ""


class SubscriptionChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is left out stays. ``active`` false pauses the subscription, true has it go on."""

    url: str | UnsetType = UNSET
    types: list[str] | UnsetType = UNSET
    jobs: list[str] | UnsetType = UNSET
    faults: list[str] | UnsetType = UNSET
    matchers: list[str] | UnsetType = UNSET
    active: bool | UnsetType = UNSET


class Rotation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``secret`` "": the server makes one. ``overlap_seconds`` None: ``webhooks.rotation_overlap_s``; 0: none."""

    secret: str = ""
    overlap_seconds: float | None = None


class Redelivery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``since``: RFC 3339 or Unix seconds; what failed of the events from then on is delivered again."""

    since: str


def check_filters(subscription: Subscription) -> None:
    """Raise Refusal 400, naming the field and what was expected, unless the filters are usable."""
    known = types_of(subscription.format)
    for name in subscription.types:
        if name not in known:
            raise Refusal(
                400,
                "types",
                f"type {name[:80]!r} is not for format {subscription.format}; expected some of {', '.join(known)}",
            )
    _check_patterns("jobs", subscription.jobs)
    _check_patterns("faults", subscription.faults)
    if len(subscription.matchers) > MATCHERS_MAX or any(len(m) > MATCHER_CHARS_MAX for m in subscription.matchers):
        raise Refusal(
            400,
            "matchers",
            f"matchers may hold at most {MATCHERS_MAX} entries of {MATCHER_CHARS_MAX} characters; leave it out for all",
        )
    try:
        for text in subscription.matchers:
            parse_matcher(text)
    except ValueError as error:
        raise Refusal(400, "matchers", str(error)) from None


def check_overlap(seconds: float) -> float:
    """Return the overlap in seconds. Raises Refusal 400."""
    if not 0.0 <= seconds <= OVERLAP_MAX_S:
        raise Refusal(400, "overlap", f"overlap_seconds is {seconds!r}; expected 0 to {OVERLAP_MAX_S:.0f}")
    return seconds


def usable_secret(wanted: str) -> str:
    """Return the secret, or a new one for "". Raises Refusal 400."""
    secret = wanted or signing.new_secret()
    try:
        signing.check_secret(secret)
    except ValueError as error:
        raise Refusal(400, "secret", str(error)) from None
    return secret


def _check_patterns(field: str, patterns: Sequence[str]) -> None:
    if len(patterns) > PATTERNS_MAX or any(not 0 < len(pattern) <= NAME_CHARS_MAX for pattern in patterns):
        raise Refusal(
            400,
            field,
            f"{field} may hold {PATTERNS_MAX} names or globs of 1 to {NAME_CHARS_MAX} characters; leave it out for all",
        )
