"""Matches events against subscriptions' filters. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

from eagle_eye.schema import action as schema
from eagle_eye.server.model.event_labels import LABELS, labels_of
from eagle_eye.server.model.records import OutboundEvent, Subscription, WebhookFormat

# Sent only if requested by name: in all other subscribers' logs heartbeats would drown the rest.
_ON_REQUEST = frozenset({schema.HEARTBEAT})
# An alert is a state that begins and ends. A request to act, with its attempt and report URL, is not.
INCIDENT_TYPES = (schema.INCIDENT_OPENED, schema.INCIDENT_UPDATED, schema.INCIDENT_RESOLVED)
ALERT_TYPES = (*INCIDENT_TYPES, schema.HEARTBEAT, schema.PING)
_MATCHER = re.compile(r"\s*([a-z_]{1,64})\s*(!=|=~|!~|=)\s*(.*?)\s*", re.DOTALL)


class Matcher(NamedTuple):
    """A required, or (``negated``) excluded, value of a label; ``pattern`` is a glob."""

    label: str
    negated: bool
    pattern: str


@lru_cache(4_096)
def parse_matcher(text: str) -> Matcher:
    """Parse a matcher ``label=glob`` or ``label!=glob``; the glob may be in double quotes.

    Raises ValueError with what is wrong.
    """
    found = _MATCHER.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:80]!r} is no matcher; write label=glob or label!=glob, such as severity=critical")
    label, operator, pattern = found.groups()
    if operator in ("=~", "!~"):
        raise ValueError(f"{text[:80]!r} asks for a regular expression; write a glob, such as {label}=rack7-*")
    if label not in LABELS:
        raise ValueError(f"label {label!r} is unknown; expected one of {', '.join(LABELS)}")
    if len(pattern) >= 2 and pattern[0] == pattern[-1] == '"':
        pattern = pattern[1:-1]
    if not pattern:
        raise ValueError(f"{text[:80]!r} matches nothing; write a value or a glob after the operator")
    return Matcher(label, operator == "!=", pattern)


def types_of(format_: WebhookFormat) -> tuple[str, ...]:
    """Return the event types that a subscription of this format can receive."""
    return schema.EVENT_TYPES if format_ == "cloudevents" else ALERT_TYPES


def wants(subscription: Subscription, event: OutboundEvent, reported: bool = False) -> bool:
    """Return whether the event is delivered to the subscription.

    Empty filters match everything except heartbeats. A filter applies to what the event has: an event without a job
    passes every filter of jobs. Jobs, faults and values of matchers are globs. ``reported`` means that the subscription
    received an earlier event of the same incident: then faults and matchers are ignored, so that it also receives the
    end. A ping goes only to the subscription that is its subject.
    """
    if event.type == schema.PING:
        return event.subject == subscription.id
    if event.type not in types_of(subscription.format):
        return False
    if subscription.types:
        if event.type not in _wanted_types(subscription):
            return False
    elif event.type in _ON_REQUEST:
        return False
    if event.job and subscription.jobs and not fits(subscription.jobs, event.job):
        return False
    return reported or _matches(subscription, event)


def _wanted_types(subscription: Subscription) -> Sequence[str]:
    """Return the requested types; as an alert that begins must end, requesting one incident type requests them all."""
    if subscription.format != "cloudevents" and not set(INCIDENT_TYPES).isdisjoint(subscription.types):
        return (*subscription.types, *INCIDENT_TYPES)
    return subscription.types


def _matches(subscription: Subscription, event: OutboundEvent) -> bool:
    if not subscription.faults and not subscription.matchers:
        return True
    labels = labels_of(event)
    fault = labels.get("fault")
    if fault and subscription.faults and not fits(subscription.faults, fault[0]):
        return False
    for text in subscription.matchers:
        matcher = parse_matcher(text)
        values = labels.get(matcher.label)
        if values and any(fits((matcher.pattern,), value) for value in values) is matcher.negated:
            return False
    return True


def fits(patterns: Sequence[str], value: str) -> bool:
    """Return whether the value is one of the globs' or names'."""
    # A name may contain glob characters, such as the brackets of an array job.
    return any(value == pattern or fnmatchcase(value, pattern) for pattern in patterns)
