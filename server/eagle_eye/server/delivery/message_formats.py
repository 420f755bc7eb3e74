"""The formats that a subscription may have: CloudEvents, an Alertmanager's webhook, and an Alertmanager's API. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
import msgspec

from eagle_eye.schema import action as schema
from eagle_eye.schema.action import HEARTBEAT, PING
from eagle_eye.schema.labels import figure, metric_label
from eagle_eye.schema.times import unix_seconds
from eagle_eye.server.delivery.attempts import Format, Message, WebhookSettings
from eagle_eye.server.model.clock import rfc3339
from eagle_eye.server.model.event_filters import event_text, severity
from eagle_eye.server.model.records import OutboundEvent, Subscription, WebhookFormat

# The format "cloudevents": CloudEvents 1.0 in structured JSON.

CLOUDEVENTS_CONTENT_TYPE = "application/cloudevents+json"


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
        return Message(event.id, subscription.url, CLOUDEVENTS_CONTENT_TYPE, body)


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


# Events as Prometheus alerts, of which both of Alertmanager's formats consist.

FAULT_ALERT, HEARTBEAT_ALERT, PING_ALERT = "EagleEyeFault", "EagleEyeHeartbeat", "EagleEyePing"
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
        return [Alert({"alertname": HEARTBEAT_ALERT, "severity": "none"}, said, time, None, public_url)]
    if event.type == schema.PING:
        said = {"summary": "A test: somebody asked whether deliveries arrive. Nothing is wrong."}
        labels = {"alertname": PING_ALERT, "severity": "none", "subscription": event.subject}
        return [Alert(labels, said, time, time, public_url)]
    if not event.type.startswith("eagle_eye.incident."):
        raise ValueError(f"no alert stands for an event of type {event.type}")
    data = event.data
    over = event.type == schema.INCIDENT_RESOLVED
    starts = event_text(data, "onset") or time
    url = f"{public_url}/#/incidents/{quote(event.subject, safe='')}"
    labels = _labels(event, data)
    ends = (event_text(data, "ended") or time) if over else None
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
        "alertname": FAULT_ALERT,
        # What receivers take for the thing that is in trouble: they fold alerts that have the same, or none.
        "instance": node or event.job or event.subject,
        "incident_id": event.subject,
        "job": event.job,
        "fault": event_text(data, "fault"),
        "node": node,
        "severity": severity(data),
    }
    # Alertmanager treats an empty label as absent.
    return {name: value[:LABEL_CHARS_MAX] for name, value in labels.items() if value}


def _annotations(data: Mapping[str, Any], runbook_url: str) -> dict[str, str]:
    nodes = data.get("nodes")
    fault, hold = event_text(data, "fault"), event_text(data, "hold")
    said = {
        "summary": event_text(data, "summary"),
        "description": "\n".join(_evidence(item) for item in list(data.get("evidence") or ())[:EVIDENCE_MAX]),
        "nodes": ", ".join(map(str, nodes)) if isinstance(nodes, list) else "",
        "action": event_text(data, "action") + (f" (held: {hold})" if hold else ""),
        "runbook_url": runbook_url.replace("{fault}", quote(fault, safe="")) if fault else "",
    }
    return {name: value[:TEXT_CHARS_MAX] for name, value in said.items() if value}


def _evidence(item: Mapping[str, Any]) -> str:
    device = item.get("device")
    where = f"{item.get('node') or 'the job'}{'' if device is None else f' device {device}'}"
    unit = event_text(item, "unit")
    beside = [f"{word} {figure(item[key], unit)}" for key, word in _BESIDE if item.get(key) is not None]
    value = "not known" if item.get("value") is None else figure(item["value"], unit)
    return f"{where}: {metric_label(event_text(item, 'metric'))} {value}" + (
        f" ({', '.join(beside)})" if beside else ""
    )


_BESIDE = (("peers_median", "its peers' median"), ("threshold", "threshold"))


# The format "alertmanager": the body that an Alertmanager posts to its webhook receivers, version 4.

CONTENT_TYPE = "application/json"
FIRING, RESOLVED = "firing", "resolved"
NO_END = "0001-01-01T00:00:00Z"  # Go's zero time, which Alertmanager writes for a firing alert


class Alertmanager:
    """One message per event, with the alerts that it changes, for receivers made for Alertmanager."""

    def __init__(self, public_url: str, runbook_url: str) -> None:
        self._public_url = public_url
        self._runbook_url = runbook_url

    def message(
        self,
        subscription: Subscription,
        event: OutboundEvent,
        now_s: float,  # noqa: ARG002 - other formats include the time
    ) -> Message:
        """Return the notification; the same bytes at every attempt."""
        alerts = alerts_of(event, self._public_url, self._runbook_url)
        body = msgspec.json.encode(notification(alerts, subscription.id, self._public_url))
        return Message(event.id, subscription.url, CONTENT_TYPE, body)


def notification(alerts: Sequence[Alert], receiver: str, external_url: str) -> dict[str, Any]:
    """Return the payload, version 4. Alerts are grouped by incident, or by name where there is none."""
    first = alerts[0].labels
    group = {name: first[name] for name in ("alertname", "incident_id") if name in first}
    keyed = ", ".join(f'{name}="{value}"' for name, value in group.items())
    return {
        "receiver": receiver,
        "status": FIRING if any(alert.ends is None for alert in alerts) else RESOLVED,
        "alerts": [_alert(alert) for alert in alerts],
        "groupLabels": group,
        "commonLabels": _common([alert.labels for alert in alerts]),
        "commonAnnotations": _common([alert.annotations for alert in alerts]),
        "externalURL": external_url,
        "version": "4",
        "groupKey": f"{{}}:{{{keyed}}}",
        "truncatedAlerts": 0,
    }


def _alert(alert: Alert) -> dict[str, Any]:
    return {
        "status": FIRING if alert.ends is None else RESOLVED,
        "labels": alert.labels,
        "annotations": alert.annotations,
        "startsAt": alert.starts,
        "endsAt": alert.ends or NO_END,
        "generatorURL": alert.url,
        "fingerprint": alert.fingerprint,
    }


def _common(sets: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return the entries that all sets have with the same value."""
    return {name: value for name, value in sets[0].items() if all(other.get(name) == value for other in sets)}


# The format "alertmanager_api": alerts pushed to an Alertmanager as Prometheus does.

PATH = "/api/v2/alerts"
REFRESHES_LASTED = 4.0  # times the refresh interval: how long an alert fires without being refreshed
PING_LASTS_S = 60.0


class AlertmanagerApi:
    """A firing alert ends by itself ``REFRESHES_LASTED`` times ``refresh_s`` after it was last sent."""

    def __init__(self, public_url: str, runbook_url: str, refresh_s: float) -> None:
        self._public_url = public_url
        self._runbook_url = runbook_url
        self._lasts_s = REFRESHES_LASTED * refresh_s

    def message(self, subscription: Subscription, event: OutboundEvent, now_s: float) -> Message:
        """Return the event's alerts as posted at ``now_s``."""
        alerts = self.alerts(event)
        lasts_s = None
        if event.type == PING:
            lasts_s = PING_LASTS_S  # an Alertmanager ignores an alert that has already ended when it first sees it
        elif event.type == HEARTBEAT:
            lasts_s = REFRESHES_LASTED * float(event.data["interval_seconds"])
        if lasts_s is not None:
            alerts = [alert._replace(ends=rfc3339(now_s + lasts_s)) for alert in alerts]
        return self.push(subscription, event.id, alerts, now_s)

    def alerts(self, event: OutboundEvent) -> list[Alert]:
        """Return the alerts that the event changes."""
        return alerts_of(event, self._public_url, self._runbook_url)

    def push(self, subscription: Subscription, id_: str, alerts: Sequence[Alert], now_s: float) -> Message:
        """Return one request with all these alerts."""
        body = msgspec.json.encode([_postable(alert, now_s + self._lasts_s) for alert in alerts])
        return Message(id_, push_url(subscription.url), CONTENT_TYPE, body)


def push_url(url: str) -> str:
    """Return the URL for posting alerts: below an Alertmanager's URL, or the URL itself if it already is one."""
    parsed = httpx.URL(url)
    path = parsed.path.rstrip("/")
    return url if path.endswith(PATH) else str(parsed.copy_with(path=path + PATH))


def _postable(alert: Alert, fires_until_s: float) -> dict[str, Any]:
    ends = alert.ends or rfc3339(fires_until_s)
    # If the clock was set, an end before the beginning would have the whole request refused.
    if unix_seconds(ends) < unix_seconds(alert.starts):
        ends = alert.starts
    return {
        "labels": alert.labels,
        "annotations": alert.annotations,
        "startsAt": alert.starts,
        "endsAt": ends,
        "generatorURL": alert.url,
    }


class Formats(NamedTuple):
    """One instance of each format."""

    cloudevents: CloudEvents
    alertmanager: Alertmanager
    alertmanager_api: AlertmanagerApi

    def by_name(self) -> Mapping[WebhookFormat, Format]:
        """Return the formats by the name used in a subscription."""
        return {
            "cloudevents": self.cloudevents,
            "alertmanager": self.alertmanager,
            "alertmanager_api": self.alertmanager_api,
        }


def formats(
    public_url: str, settings: WebhookSettings, epoch: Callable[[], int] = lambda: 0, lease_s: float = 0.0
) -> Formats:
    """Return the formats of a server whose public URL is ``public_url``; the others as in ``CloudEvents``."""
    return Formats(
        CloudEvents(public_url, epoch, lease_s),
        Alertmanager(public_url, settings.runbook_url),
        AlertmanagerApi(public_url, settings.runbook_url, settings.alert_refresh_s),
    )
