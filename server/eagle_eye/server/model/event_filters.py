"""Who gets which news: labels of outbound events, subscriptions' filters, and silences. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple

from eagle_eye.schema import action as schema
from eagle_eye.server.model.clock import rfc3339
from eagle_eye.server.model.records import Incident, NewsSilence, OutboundEvent, Subscription, WebhookFormat

# The labels that a filter may use. An event has those that apply to it.
LABELS = ("job", "fault", "node", "severity", "state", "action")

_SEVERITIES: Mapping[str, str] = {
    "exclude_node": "critical",
    "restart_job": "critical",
    "drain_node": "warning",
    "checkpoint_now": "warning",
    "notify": "warning",
    "none": "info",
}


def severity(data: Mapping[str, Any]) -> str:
    """Return the severity of an event's data, "" where it has none.

    Critical when a job is to be interrupted, or when people have to intervene because nothing else will.
    """
    action = event_text(data, "action") or event_text(data, "kind")
    if data.get("escalated") is True:
        return "critical"
    return _SEVERITIES.get(action, "warning") if action else ""


def labels_of(event: OutboundEvent) -> dict[str, tuple[str, ...]]:
    """Return the event's labels, each with its values; an event may concern several nodes. None are empty.

    For an incident, ``action`` is what policy wants for it; for an action, what is requested.
    """
    data = event.data
    action = event_text(data, "action") or event_text(data, "kind")
    nodes = data.get("nodes") or data.get("exclude") or data.get("node")
    found = {
        "job": (event.job,),
        "fault": (event_text(data, "fault"),),
        "node": tuple(str(node) for node in nodes) if isinstance(nodes, list) else (event_text(data, "node"),),
        "severity": (severity(data),),
        "state": (event_text(data, "state"),),
        "action": (action,),
    }
    kept = {label: tuple(value for value in values if value) for label, values in found.items()}
    return {label: values for label, values in kept.items() if values}


def event_text(data: Mapping[str, Any], key: str) -> str:
    """Return a text of an event's data, "" where it has none."""
    value = data.get(key)
    return value if isinstance(value, str) else ""


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


def covering(silences: Iterable[NewsSilence], fault: str, job: str, nodes: Sequence[str]) -> NewsSilence | None:
    """Return the silence that covers such an incident and ends last, or None.

    All that a silence names must hold. One of nodes covers an incident only if it covers every node of it: the trouble
    of another node is not silenced.
    """
    found = (
        one
        for one in silences
        if (not one.faults or fault in one.faults)
        and (not one.jobs or fits(one.jobs, job))
        and (not one.nodes or (bool(nodes) and all(fits(one.nodes, node) for node in nodes)))
    )
    return max(found, key=lambda one: (one.until_s, one.id), default=None)


def covering_incident(silences: Iterable[NewsSilence], incident: Incident) -> NewsSilence | None:
    """Return the silence that covers the incident and ends last, or None."""
    return covering(silences, incident.fault, incident.job, incident.nodes)


def silence_in_words(silence: NewsSilence) -> str:
    """Return which silence it is, who made it, until when, and why."""
    return f"{silence.id} of {silence.by} until {rfc3339(silence.until_s)}: {silence.reason}"
