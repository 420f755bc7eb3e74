"""Actions sent by hand: signed as the server signs them, though no server has asked for anything."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import httpx
import msgspec
from standardwebhooks import Webhook

from benchmarks.recovery.site import FireStack
from eagle_eye.schema.action import ACTION_REQUESTED, ActionRequest

EXPIRES_S = 120.0


class Hand:
    """Somebody who has the launcher's secret and address, and sends it what he likes."""

    def __init__(self, stack: FireStack) -> None:
        self._stack = stack
        self._state = stack.folder / "launch"

    def exclude(self, action_id: str, node: str, attempt: int, *, expired: bool = False) -> None:
        """An exclusion of the node arrives. Raises httpx.HTTPError."""
        now = datetime.now(timezone.utc)
        before = now - timedelta(seconds=30)
        expires = before + timedelta(seconds=10) if expired else now + timedelta(seconds=EXPIRES_S)
        action = ActionRequest(
            action_id=action_id, kind="exclude_node", job=self._stack.job, attempt=attempt, exclude=[node],
            restart=True, fault="gpu_lost", confidence=1.0, onset=before.isoformat(), detected=before.isoformat(),
            expires=expires.isoformat(), incident_id=f"inc-{action_id}", repair="none", summary="sent by hand",
            evidence=[], ranks=[], report_to=f"{self._stack.url}/api/v1/actions/{action_id}/reports",
        )  # fmt: skip
        url = next(line["webhook_url"] for line in reversed(self._stack.reported()) if line["event"] == "listening")
        send(url, _secret(self._state), ACTION_REQUESTED, msgspec.to_builtins(action), action_id)

    def outcome(self, action_id: str) -> str:
        """Return what the launcher made of an action: carried_out, refused, unknown (to the server), or "" so far."""
        file = self._state / "ledger.sqlite"
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as ledger:
            row = ledger.execute("SELECT state FROM action WHERE action_id = ?", (action_id,)).fetchone()
        state = row[0] if row else ""
        return "carried_out" if state in ("begun", "excluded", "restarting", "finished") else str(state)


def send(url: str, secret: str, kind: str, data: Any, event_id: str, timeout_s: float = 10.0) -> None:
    """Post an event to an orchestrator, signed as the server would. Raises httpx.HTTPError where it is not taken."""
    now = datetime.now(timezone.utc)
    event = {"specversion": "1.0", "id": event_id, "type": kind, "source": "/by-hand", "time": now.isoformat()}
    body = json.dumps({**event, "data": data})
    headers = {
        "content-type": "application/cloudevents+json",
        "webhook-id": event_id,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(secret).sign(event_id, now, body),
    }
    httpx.post(url, content=body, headers=headers, timeout=timeout_s, trust_env=False).raise_for_status()


def _secret(state: Path) -> str:
    secret: str = json.loads((state / "subscription.json").read_text(encoding="utf-8"))["secret"]
    return secret
