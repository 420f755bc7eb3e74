"""The format "alertmanager": the body that an Alertmanager posts to its webhook receivers, version 4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from eagle_eye.server.delivery.notifiers.alerts import Alert, alerts_of
from eagle_eye.server.delivery.notifiers.message import Message
from eagle_eye.server.model.records import OutboundEvent, Subscription

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
