"""The server is killed: who is told, by the shipped rules and routes, with a real Prometheus and Alertmanager."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_eye.schema.frame import CONTENT_TYPE, encode_frame, encode_request
from tests.loopback import free_port
from tests.server.builders import frame
from tests.server.receiver import Receiver, receiver

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("prometheus-alertmanager") is None,
    reason="apt-get install prometheus prometheus-alertmanager",
)

SHIPPED = Path(__file__).parents[2] / "dashboards/prometheus"
WITHIN_S = 60.0


@dataclass
class Site:
    """A server, a Prometheus and an Alertmanager, and what the two receivers of its routes got."""

    server: subprocess.Popen[bytes]
    client: httpx.Client
    prometheus: httpx.Client
    pager: Receiver
    dead_man: Receiver

    def fires(self, name: str) -> bool:
        answer = self.prometheus.get("/api/v1/alerts").json()["data"]["alerts"]
        return any(alert["labels"]["alertname"] == name and alert["state"] == "firing" for alert in answer)


def reported(target: Receiver) -> set[tuple[str, str]]:
    """Return the alerts that a receiver got, each with whether it fires or is resolved."""
    bodies: list[dict[str, Any]] = [json.loads(content) for _, content in list(target.got)]
    return {(alert["labels"]["alertname"], alert["status"]) for body in bodies for alert in body["alerts"]}


def eventually(claim: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WITHIN_S
    while not claim():
        assert time.monotonic() < until_s
        time.sleep(0.1)


def is_up(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started:
        try:
            yield started
        finally:
            started.kill()


def quick(text: str) -> str:
    """Return the shipped rules or routes with their waits cut to a second; nothing else is changed."""
    return re.sub(r"\b(for|group_wait|group_interval|interval): \d+[smh]", r"\1: 1s", text)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    ours, prometheus, alertmanager = free_port(), free_port(), free_port()
    rules = tmp_path / "rules"
    rules.mkdir()
    for name in ("alerts.rules.yml", "recording.rules.yml"):
        (rules / name).write_text(quick((SHIPPED / name).read_text()))
    scrape = (SHIPPED / "prometheus.yml").read_text()
    for shipped, here in (
        ("/etc/prometheus/rules/", f"{rules}/"),
        ("alertmanager:9093", f"127.0.0.1:{alertmanager}"),
        ("server:8470", f"127.0.0.1:{ours}"),
        ("localhost:9090", f"127.0.0.1:{prometheus}"),
        ("    authorization: {credentials_file: /run/eagle-eye-tokens/token}\n", ""),
        ("_interval: 15s", "_interval: 1s"),
    ):
        assert shipped in scrape
        scrape = scrape.replace(shipped, here)
    (tmp_path / "prometheus.yml").write_text(scrape)
    with ExitStack() as stack:
        pager, dead_man = stack.enter_context(receiver()), stack.enter_context(receiver())
        routes = quick((SHIPPED / "alertmanager.yml").read_text())
        for name, target in (("pager", pager), ("dead-man", dead_man)):
            assert f"  - name: {name}\n" in routes
            routes = routes.replace(
                f"  - name: {name}\n", f'  - name: {name}\n    webhook_configs: [{{url: "{target.url}"}}]\n'
            )
        (tmp_path / "alertmanager.yml").write_text(routes)
        (tmp_path / "server.toml").write_text(
            f'listen = "127.0.0.1:{ours}"\ndata_dir = "{tmp_path / "data"}"\n'
            "[webhooks]\nallow_private = true\nheartbeat_s = 1.0\n[ingest]\nfresh_s = 600.0\n"
        )
        command = (sys.executable, "-m", "eagle_eye.cli.main", "server", "--config", str(tmp_path / "server.toml"))
        server = stack.enter_context(process(*command))
        stack.enter_context(
            process(
                "prometheus-alertmanager",
                f"--config.file={tmp_path / 'alertmanager.yml'}",
                f"--storage.path={tmp_path / 'alertmanager'}",
                f"--web.listen-address=127.0.0.1:{alertmanager}",
                "--cluster.listen-address=",
            )
        )
        stack.enter_context(
            process(
                "prometheus",
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'prometheus'}",
                f"--web.listen-address=127.0.0.1:{prometheus}",
            )
        )
        clients = [
            stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10.0, trust_env=False))
            for port in (ours, prometheus, alertmanager)
        ]
        for client, path in zip(clients, ("/healthz", "/-/ready", "/-/ready"), strict=True):
            eventually(partial(is_up, client, path))
        heard = encode_request([encode_frame(frame(time_s=time.time()))], time.time())
        clients[0].post("/api/v1/frames", content=heard, headers={"content-type": CONTENT_TYPE}).raise_for_status()
        wanted = {
            "url": f"http://127.0.0.1:{alertmanager}",
            "format": "alertmanager_api",
            "types": ["eagle_eye.incident.opened", "eagle_eye.heartbeat"],
        }
        clients[0].post("/api/v1/subscriptions", json=wanted).raise_for_status()
        yield Site(server, clients[0], clients[1], pager, dead_man)


def test_a_server_that_is_killed_pages_and_its_signs_of_life_end(site: Site) -> None:
    alive = {("EagleEyeAlertsWork", "firing"), ("EagleEyeHeartbeat", "firing")}
    eventually(lambda: alive <= reported(site.dead_man))
    # Without the two minutes that it waits in earnest, it fired until the server had started.
    eventually(lambda: not site.fires("EagleEyeDown"))
    site.pager.got.clear()
    site.server.kill()
    eventually(lambda: site.fires("EagleEyeDown"))
    eventually(lambda: ("EagleEyeDown", "firing") in reported(site.pager))
    # To the dead man's switch nothing more comes but that they have ended.
    eventually(
        lambda: {("EagleEyeAlertsWork", "resolved"), ("EagleEyeHeartbeat", "resolved")} <= reported(site.dead_man)
    )
