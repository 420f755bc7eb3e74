"""A real Alertmanager: what is pushed to it, and whether what we send in its place is what it sends itself."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_eye.schema.times import unix_seconds
from eagle_eye.server.delivery.attempts import Outcome, WebhookSettings
from eagle_eye.server.delivery.events import heartbeat, incident_opened, incident_resolved, incident_updated, ping
from eagle_eye.server.delivery.message_formats import Alert, formats
from eagle_eye.server.delivery.webhook import Guard, Webhook
from eagle_eye.server.model.records import Incident, OutboundEvent
from tests.loopback import free_port
from tests.server.builders import incident, subscription
from tests.server.receiver import Receiver, receiver

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus-alertmanager") is None,
    reason="prometheus-alertmanager is not installed: apt-get install prometheus-alertmanager",
)

WITHIN_S = 20.0
SHAPES = formats("http://eagle.example", WebhookSettings(runbook_url="https://runbooks.example/{fault}"))
CONFIG = """
route: {{receiver: ours, group_by: [incident_id, alertname], group_wait: 0s, group_interval: 1s, repeat_interval: 1h}}
receivers:
  - name: ours
    webhook_configs: [{{url: "{url}", send_resolved: true}}]
"""


class Alertmanager:
    """One that runs, and what its receiver got."""

    def __init__(self, url: str, target: Receiver) -> None:
        self.url = url
        self.target = target
        self.client = httpx.Client(base_url=url, timeout=5.0, trust_env=False)

    def is_up(self) -> bool:
        try:
            return self.client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def alerts(self, incident_id: str) -> list[dict[str, Any]]:
        asked = {"filter": f'incident_id="{incident_id}"'}
        found: list[dict[str, Any]] = self.client.get("/api/v2/alerts", params=asked).json()
        return found

    def notifications(self, incident_id: str) -> list[dict[str, Any]]:
        bodies = [json.loads(content) for _, content in self.target.got]
        return [body for body in bodies if body["groupLabels"].get("incident_id") == incident_id]


def eventually(claim: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not claim():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@contextmanager
def process(*command: str) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started:
        try:
            yield
        finally:
            started.terminate()


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alertmanager]:
    folder: Path = tmp_path_factory.mktemp("alertmanager")
    port = free_port()
    with receiver() as target:
        config = folder / "alertmanager.yml"
        config.write_text(CONFIG.format(url=target.url), encoding="utf-8")
        with process(
            "prometheus-alertmanager",
            f"--config.file={config}",
            f"--storage.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--cluster.listen-address=",
        ):
            started = Alertmanager(f"http://127.0.0.1:{port}", target)
            eventually(started.is_up)
            yield started
            started.client.close()


def push(alertmanager: Alertmanager, *events: OutboundEvent) -> None:
    async def all_of_them() -> None:
        webhook = Webhook(Guard(True, no_names), SHAPES.by_name())
        try:
            for event in events:
                receipt = await webhook.deliver(
                    subscription(url=alertmanager.url, format="alertmanager_api"), event, time.time(), 5.0
                )
                assert receipt.outcome is Outcome.DELIVERED, receipt
        finally:
            await webhook.close()

    asyncio.run(all_of_them())


async def no_names(_host: str, _port: int) -> list[str]:
    raise OSError("no such name")


def found(id_: str, **more: Any) -> Incident:
    now_s = time.time()
    evidence = [{"metric": "gpu_temperature_celsius", "node": "n1", "device": 3, "value": 93.0, "unit": "celsius"}]
    fields = {"onset_s": now_s - 20, "detected_s": now_s - 10, "updated_s": now_s, "evidence": evidence, **more}
    return incident(id_, **fields)


def own(event: OutboundEvent) -> list[Alert]:
    return SHAPES.alertmanager_api.alerts(event)


def test_an_incident_fires_once_however_often_it_is_delivered_and_then_resolves(alertmanager: Alertmanager) -> None:
    opened = incident_opened(found("inc_fires"), time.time())
    push(alertmanager, opened, opened, opened)
    eventually(lambda: len(alertmanager.notifications("inc_fires")) == 1)
    (alert,) = alertmanager.alerts("inc_fires")
    assert alert["status"]["state"] == "active"
    (ours,) = own(opened)
    assert (alert["labels"], alert["annotations"]) == (ours.labels, ours.annotations)
    assert alert["fingerprint"] == ours.fingerprint
    assert unix_seconds(alert["startsAt"]) == pytest.approx(unix_seconds(ours.starts), abs=0.001)
    push(alertmanager, opened)
    over = found("inc_fires", ended_s=time.time(), state="recovered")
    push(alertmanager, incident_resolved(over, time.time()))
    eventually(lambda: [n["status"] for n in alertmanager.notifications("inc_fires")] == ["firing", "resolved"])
    assert alertmanager.alerts("inc_fires") == []


def test_what_changes_becomes_another_alert_and_the_former_ends(alertmanager: Alertmanager) -> None:
    before = found("inc_changes", fault="straggler", action="notify")
    after = found("inc_changes", fault="thermal_throttle", action="exclude_node")
    push(alertmanager, incident_opened(before, time.time()))
    eventually(lambda: len(alertmanager.notifications("inc_changes")) == 1)
    push(alertmanager, incident_updated(after, before, time.time()))
    (alert,) = alertmanager.alerts("inc_changes")
    assert (alert["labels"]["fault"], alert["labels"]["severity"]) == ("thermal_throttle", "critical")


def test_an_alert_that_nobody_refreshes_ends_by_itself(alertmanager: Alertmanager) -> None:
    event = incident_opened(found("inc_forgotten"), time.time())
    shape = formats("http://eagle.example", WebhookSettings(alert_refresh_s=1.0)).alertmanager_api
    message = shape.message(subscription(url=alertmanager.url), event, time.time() - 2.0)
    alertmanager.client.post(message.url, content=message.body, headers={"Content-Type": message.content_type})
    eventually(lambda: [n["status"] for n in alertmanager.notifications("inc_forgotten")] == ["firing", "resolved"])


def test_heartbeats_are_one_alert_that_goes_on_and_a_ping_is_shown(alertmanager: Alertmanager) -> None:
    now_s = time.time()
    push(alertmanager, heartbeat(now_s - 60, 60.0, "http://eagle.example"))
    push(alertmanager, heartbeat(now_s, 60.0, "http://eagle.example"), ping(subscription(), "1", now_s))
    shown = {alert["labels"]["alertname"]: alert for alert in alertmanager.client.get("/api/v2/alerts").json()}
    heart = shown["EagleEyeHeartbeat"]
    assert unix_seconds(heart["startsAt"]) == pytest.approx(now_s - 60, abs=0.01)
    assert unix_seconds(heart["endsAt"]) == pytest.approx(now_s + 240, abs=5.0)
    assert shown["EagleEyePing"]["status"]["state"] == "active"


def test_our_notifications_have_the_keys_and_kinds_of_alertmanagers_own(alertmanager: Alertmanager) -> None:
    opened = incident_opened(found("inc_alike"), time.time())
    push(alertmanager, opened)
    eventually(lambda: len(alertmanager.notifications("inc_alike")) == 1)
    (its,) = alertmanager.notifications("inc_alike")
    message = SHAPES.alertmanager.message(subscription(format="alertmanager"), opened, time.time())
    ours = json.loads(message.body)
    assert kinds(ours) == kinds(its)
    for key in ("version", "status", "groupLabels", "commonLabels", "commonAnnotations", "truncatedAlerts"):
        assert ours[key] == its[key], key
    (mine,), (theirs,) = ours["alerts"], its["alerts"]
    for key in ("status", "labels", "annotations", "endsAt", "generatorURL", "fingerprint"):
        assert mine[key] == theirs[key], key
    assert unix_seconds(mine["startsAt"]) == pytest.approx(unix_seconds(theirs["startsAt"]), abs=0.001)
    assert message.content_type == alertmanager.target.got[0][0]["content-type"]


def kinds(value: Any) -> Any:
    """Return a JSON value's shape: its keys, and the types of what they hold."""
    if isinstance(value, dict):
        return {key: kinds(inner) for key, inner in value.items()}
    return [kinds(inner) for inner in value[:1]] if isinstance(value, list) else type(value).__name__
