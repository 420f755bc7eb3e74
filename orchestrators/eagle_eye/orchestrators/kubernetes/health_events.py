"""Sends node health to a site's own system, as CloudEvents in NVSentinel's format. Touches the network.

NVSentinel exports its health events as structured CloudEvents over HTTP, the event itself under ``healthEvent``. Ours
have the same shape with our own type, so that a site's sink accepts both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import httpx

from eagle_eye.orchestrators.protocol import Cause

log = logging.getLogger(__name__)

TYPE = "eagle_eye.node.health"
TIMEOUT_S = 5.0
RETRY_AFTER_S = (0.5, 2.0)

# What would repair the node (schema/action.py), in NVSentinel's terms.
RECOMMENDED = {
    "reset_gpu": "COMPONENT_RESET",
    "reboot": "RESTART_BM",
    "replace": "REPLACE_VM",
    "inspect": "CONTACT_SUPPORT",
    "none": "NONE",
}


def event(
    node: str, health: Literal["excluded", "readmitted"], cause: Cause | None, cluster: str, now: str
) -> dict[str, Any]:
    """Return the event. ``cause`` is None for a readmission, whose check is "eagle_eye"; ``now`` is RFC 3339.

    It requests no action: the node is cordoned already (``processingStrategy`` STORE_ONLY).
    """
    fault = cause.fault if cause is not None else "eagle_eye"
    bad = health == "excluded"
    repair = RECOMMENDED.get(cause.repair, "UNKNOWN") if cause is not None else "NONE"
    return {
        "specversion": "1.0",
        "id": f"{cause.action_id if cause is not None else now}/{node}/{health}",
        "type": TYPE,
        "source": f"/eagle-eye/{cluster}/nodes",
        "subject": node,
        "time": now,
        "datacontenttype": "application/json",
        "data": {
            "metadata": {"cluster": cluster},
            "healthEvent": {
                "version": 1,
                "agent": "eagle-eye",
                "componentClass": "GPU" if fault.startswith("gpu_") else "Node",
                "checkName": fault,
                "isFatal": bad,
                "isHealthy": not bad,
                "message": cause.reason if cause is not None else "readmitted",
                "recommendedAction": repair,
                "errorCode": [fault] if bad else [],
                "entitiesImpacted": [{"entityType": "Node", "entityValue": node}],
                "metadata": {"incident_id": cause.incident_id, "action_id": cause.action_id} if cause else {},
                "generatedTimestamp": now,
                "nodeName": node,
                "processingStrategy": "STORE_ONLY",
            },
        },
    }


class HealthEvents:
    """The sink for the events; three tries each. ``token_file`` holds a bearer token, read per event; None: none."""

    def __init__(
        self, url: str, cluster: str, token_file: Path | None = None, pause: Callable[[float], object] = time.sleep
    ) -> None:
        self.cluster = cluster
        self._url = url
        self._token_file = token_file
        self._pause = pause
        self._http = httpx.Client(timeout=TIMEOUT_S, trust_env=False, follow_redirects=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def send(self, content: dict[str, Any]) -> str:
        """Send the event; returns "" or why it failed. A node's exclusion does not wait for it."""
        why = ""
        for pause_s in (*RETRY_AFTER_S, None):
            why, again = self._send(content)
            if not why or not again or pause_s is None:
                break
            self._pause(pause_s)
        if why:
            log.warning("health event %s was not delivered: %s", content["id"], why)
        return why

    def _send(self, content: dict[str, Any]) -> tuple[str, bool]:
        headers = {"content-type": "application/cloudevents+json"}
        if self._token_file is not None:
            try:
                headers["authorization"] = f"Bearer {self._token_file.read_text(encoding='utf-8').strip()}"
            except (OSError, UnicodeDecodeError) as error:
                return f"--health-events-token-file: {type(error).__name__}", False
        try:
            answer = self._http.post(self._url, json=content, headers=headers)
        except httpx.HTTPError as error:
            return type(error).__name__, True
        if answer.is_success:
            return "", False
        return f"HTTP {answer.status_code}", answer.status_code >= 500 or answer.status_code in (408, 429)
