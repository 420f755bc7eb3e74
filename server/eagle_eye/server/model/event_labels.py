"""Labels of outbound events: filters match them, alerts carry some of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_eye.server.model.records import OutboundEvent

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
    action = _text(data, "action") or _text(data, "kind")
    if data.get("escalated") is True:
        return "critical"
    return _SEVERITIES.get(action, "warning") if action else ""


def labels_of(event: OutboundEvent) -> dict[str, tuple[str, ...]]:
    """Return the event's labels, each with its values; an event may concern several nodes. None are empty.

    For an incident, ``action`` is what policy wants for it; for an action, what is requested.
    """
    data = event.data
    action = _text(data, "action") or _text(data, "kind")
    nodes = data.get("nodes") or data.get("exclude") or data.get("node")
    found = {
        "job": (event.job,),
        "fault": (_text(data, "fault"),),
        "node": tuple(str(node) for node in nodes) if isinstance(nodes, list) else (_text(data, "node"),),
        "severity": (severity(data),),
        "state": (_text(data, "state"),),
        "action": (action,),
    }
    kept = {label: tuple(value for value in values if value) for label, values in found.items()}
    return {label: values for label, values in kept.items() if values}


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    return value if isinstance(value, str) else ""
