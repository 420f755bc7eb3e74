"""Converts events to Prometheus alerts: labels, annotations, start and end. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from eagle_eye.schema import action as schema
from eagle_eye.schema.labels import metric_label
from eagle_eye.schema.notation import figure
from eagle_eye.server.model.event_labels import severity
from eagle_eye.server.model.records import OutboundEvent
from eagle_eye.server.model.timestamps import rfc3339

FAULT, HEARTBEAT, PING = "EagleEyeFault", "EagleEyeHeartbeat", "EagleEyePing"
LABEL_CHARS_MAX = 256
TEXT_CHARS_MAX = 4_096  # of one annotation
EVIDENCE_MAX = 10  # items of evidence in the description


class Alert(NamedTuple):
    """One alert, identified by its labels; ``ends`` None means that it fires. Times are RFC 3339."""

    labels: dict[str, str]
    annotations: dict[str, str]
    starts: str
    ends: str | None
    url: str  # where to read more

    @property
    def fingerprint(self) -> str:
        """The labels' hash as Alertmanager computes it: 64-bit FNV-1a over sorted names and values."""
        value = 0xCBF29CE484222325
        for part in (part for item in sorted(self.labels.items()) for part in item):
            for byte in part.encode() + b"\xff":
                value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
        return f"{value:016x}"


def alerts_of(event: OutboundEvent, public_url: str, runbook_url: str) -> list[Alert]:
    """Return the alerts that the event changes: its own first, then the ended one that it replaces.

    An incident whose fault, nodes or severity change becomes another alert, since labels are an alert's identity.
    ``runbook_url`` "": no runbook. Raises ValueError for an event type that has no alert.
    """
    time = rfc3339(event.time_s)
    if event.type == schema.HEARTBEAT:
        said = {"summary": "Eagle Eye can judge. This alert always fires; its absence is the alarm."}
        return [Alert({"alertname": HEARTBEAT, "severity": "none"}, said, time, None, public_url)]
    if event.type == schema.PING:
        said = {"summary": "A test: somebody asked whether deliveries arrive. Nothing is wrong."}
        labels = {"alertname": PING, "severity": "none", "subscription": event.subject}
        return [Alert(labels, said, time, time, public_url)]
    if not event.type.startswith("eagle_eye.incident."):
        raise ValueError(f"no alert stands for an event of type {event.type}")
    data = event.data
    over = event.type == schema.INCIDENT_RESOLVED
    starts = _text(data, "onset") or time
    url = f"{public_url}/#/incidents/{quote(event.subject, safe='')}"
    labels = _labels(event, data)
    ends = (_text(data, "ended") or time) if over else None
    alerts = [Alert(labels, _annotations(data, runbook_url), starts, ends, url)]
    before = data.get("was")
    if isinstance(before, Mapping):
        former = _labels(event, before)
        if former != labels:
            alerts.append(Alert(former, {"summary": f"now {labels.get('fault', '')}"}, starts, time, url))
    return alerts


def _labels(event: OutboundEvent, data: Mapping[str, Any]) -> dict[str, str]:
    nodes = data.get("nodes")
    node = str(nodes[0]) if isinstance(nodes, list) and len(nodes) == 1 else ""
    labels = {
        "alertname": FAULT,
        # What receivers take for the thing that is in trouble: they fold alerts that have the same, or none.
        "instance": node or event.job or event.subject,
        "incident_id": event.subject,
        "job": event.job,
        "fault": _text(data, "fault"),
        "node": node,
        "severity": severity(data),
    }
    # Alertmanager treats an empty label as absent.
    return {name: value[:LABEL_CHARS_MAX] for name, value in labels.items() if value}


def _annotations(data: Mapping[str, Any], runbook_url: str) -> dict[str, str]:
    nodes = data.get("nodes")
    fault, hold = _text(data, "fault"), _text(data, "hold")
    said = {
        "summary": _text(data, "summary"),
        "description": "\n".join(_evidence(item) for item in list(data.get("evidence") or ())[:EVIDENCE_MAX]),
        "nodes": ", ".join(map(str, nodes)) if isinstance(nodes, list) else "",
        "action": _text(data, "action") + (f" (held: {hold})" if hold else ""),
        "runbook_url": runbook_url.replace("{fault}", quote(fault, safe="")) if fault else "",
    }
    return {name: value[:TEXT_CHARS_MAX] for name, value in said.items() if value}


def _evidence(item: Mapping[str, Any]) -> str:
    device = item.get("device")
    where = f"{item.get('node') or 'the job'}{'' if device is None else f' device {device}'}"
    unit = _text(item, "unit")
    beside = [f"{word} {figure(item[key], unit)}" for key, word in _BESIDE if item.get(key) is not None]
    value = "not known" if item.get("value") is None else figure(item["value"], unit)
    return f"{where}: {metric_label(_text(item, 'metric'))} {value}" + (f" ({', '.join(beside)})" if beside else "")


_BESIDE = (("peers_median", "its peers' median"), ("threshold", "threshold"))


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    return value if isinstance(value, str) else ""
