"""The formats that a subscription may have, each implemented in a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from eagle_eye.server.delivery.notifiers.alertmanager import Alertmanager
from eagle_eye.server.delivery.notifiers.alertmanager_api import AlertmanagerApi
from eagle_eye.server.delivery.notifiers.cloudevents import CloudEvents
from eagle_eye.server.delivery.notifiers.message import Format
from eagle_eye.server.delivery.settings import WebhookSettings
from eagle_eye.server.model.records import WebhookFormat


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
