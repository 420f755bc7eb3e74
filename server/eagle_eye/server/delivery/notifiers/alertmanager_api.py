"""The format "alertmanager_api": alerts pushed to an Alertmanager as Prometheus does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import msgspec

from eagle_eye.schema.action import HEARTBEAT, PING
from eagle_eye.schema.times import unix_seconds
from eagle_eye.server.delivery.notifiers.alerts import Alert, alerts_of
from eagle_eye.server.delivery.notifiers.message import Message
from eagle_eye.server.model.records import OutboundEvent, Subscription
from eagle_eye.server.model.timestamps import rfc3339

CONTENT_TYPE = "application/json"
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
