"""The receivers of docs/how-to/webhook-receivers.md, as they stand there, against a real server's deliveries."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from eagle_eye.server.model.clock import SystemClock
from tests.docs.pages import blocks
from tests.loopback import free_port
from tests.server.builders import Running, running
from tests.server.test_end_to_end import eventually

PYTHON, LISTEN, SHELL, WORK = (
    block.text for block in blocks("docs/how-to/webhook-receivers.md") if block.mark.startswith("run by tests/docs")
)
OTHER = "whsec_" + "A" * 32  # the secret before the last rotation


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path / "data", SystemClock(), webhooks__allow_private=True) as server:
        yield server


@contextmanager
def receiver(command: list[str], folder: Path, port: int, secret: str) -> Iterator[str]:
    """Run a receiver in ``folder`` and yield its URL once it listens."""
    with (folder / "said").open("ab") as said:
        child = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "WEBHOOK_SECRET": f"{OTHER} {secret}"},
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}/"
        try:
            eventually(lambda: answers(url))
            yield url
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def answers(url: str) -> bool:
    try:
        httpx.get(url, timeout=5)
    except httpx.ConnectError:
        return False
    except httpx.HTTPError:
        pass
    return True


def forged(url: str, identity: str = "evt_1") -> int:
    """Return what a receiver answers to an event that nobody signed."""
    headers = {"webhook-id": identity, "webhook-timestamp": f"{time.time():.0f}", "webhook-signature": "v1,AAAA"}
    return httpx.post(url, content=b"{}", headers=headers, timeout=10).status_code


def subscribed(server: Running, url: str) -> tuple[str, str]:
    """Return the id and the secret of a new subscription."""
    made = server.client.post("/api/v1/subscriptions", json={"url": url}).json()
    return made["id"], made["secret"]


def states(server: Running) -> list[str]:
    return [item["state"] for item in server.client.get("/api/v1/deliveries").json()["items"]]


def test_the_one_in_python_takes_signed_events_once_and_refuses_forged_ones(server: Running, tmp_path: Path) -> None:
    (tmp_path / "receiver.py").write_text(PYTHON, encoding="utf-8")
    port = free_port()
    subscription, secret = subscribed(server, f"http://127.0.0.1:{port}/")
    command = [sys.executable, "receiver.py", str(port)]
    with receiver(command, tmp_path, port, secret) as url:
        assert forged(url) == 400
        server.client.post(f"/api/v1/subscriptions/{subscription}/ping")
        eventually(lambda: states(server) == ["delivered"])
        delivery = server.client.get("/api/v1/deliveries").json()["items"][0]["id"]
        eventually(lambda: "eagle_eye.ping" in (tmp_path / "said").read_text(encoding="utf-8"))
        server.client.post(f"/api/v1/deliveries/{delivery}/redeliver")
        eventually(lambda: states(server) == ["delivered"])
    with receiver(command, tmp_path, port, secret):
        pass  # what was handled is not handled again by the next one
    assert (tmp_path / "said").read_text(encoding="utf-8").count("eagle_eye.ping") == 1


def test_the_one_in_shell_takes_signed_events_once_and_refuses_forged_ones(server: Running, tmp_path: Path) -> None:
    if missing := [tool for tool in ("socat", "openssl", "jq") if shutil.which(tool) is None]:
        pytest.skip(f"{', '.join(missing)} not installed: apt-get install {' '.join(missing)}")
    script = tmp_path / "receive.sh"
    script.write_text(SHELL, encoding="utf-8")
    script.chmod(0o755)
    port = free_port()
    subscription, secret = subscribed(server, f"http://127.0.0.1:{port}/")
    listen = LISTEN.replace("9000", str(port))
    with receiver(["sh", "-c", listen], tmp_path, port, secret) as url:
        assert forged(url) == 400
        assert forged(url, identity="../done/x") == 400
        server.client.post(f"/api/v1/subscriptions/{subscription}/ping")
        eventually(lambda: states(server) == ["delivered"])
        assert len(list((tmp_path / "inbox").iterdir())) == 1
        worked = subprocess.run(["sh", "-c", WORK], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert worked.stdout.startswith("eagle_eye.ping")
        (delivery,) = server.client.get("/api/v1/deliveries").json()["items"]
        again = server.client.post(f"/api/v1/deliveries/{delivery['id']}/redeliver").json()
        assert again["state"] != "delivered"
        eventually(lambda: states(server) == ["delivered"])
    assert not list((tmp_path / "inbox").glob("[!.]*"))  # it was ended, perhaps before it had cleared away its own file
    assert len(list((tmp_path / "done").iterdir())) == 1
