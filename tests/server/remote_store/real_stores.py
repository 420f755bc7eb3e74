"""Real stores on loopback, for whoever has them installed."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.loopback import free_port

WITHIN_S = 20.0
PROMETHEUS = pytest.param(
    "prometheus",
    marks=pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="prometheus is not installed: apt-get install prometheus"
    ),
)
VICTORIA_METRICS = pytest.param(
    "victoria-metrics",
    marks=pytest.mark.skipif(
        shutil.which("victoria-metrics") is None,
        reason="victoria-metrics is not installed: apt-get install victoria-metrics",
    ),
)


@contextmanager
def listening(store: str, folder: Path) -> Iterator[str]:
    """Give the URL of a store that keeps its files below ``folder``."""
    address = f"127.0.0.1:{free_port()}"
    config = folder / "prometheus.yml"
    config.write_text("global: {}\n", encoding="utf-8")
    command = {
        "prometheus": [
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address={address}",
            "--web.enable-remote-write-receiver",
        ],
        "victoria-metrics": [
            f"-storageDataPath={folder / 'vm'}",
            f"-httpListenAddr={address}",
            "-search.latencyOffset=0s",
        ],
    }[store]
    with subprocess.Popen([store, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_until_ready(f"http://{address}", store)
            yield f"http://{address}"
        finally:
            process.kill()


def show(url: str, store: str) -> None:
    """Return once what was written can be read."""
    if store == "victoria-metrics":
        httpx.get(f"{url}/internal/force_flush", timeout=WITHIN_S, trust_env=False).raise_for_status()


def _wait_until_ready(url: str, store: str) -> None:
    path = "/-/ready" if store == "prometheus" else "/health"
    deadline_s = time.monotonic() + WITHIN_S
    while True:
        try:
            if httpx.get(url + path, timeout=1.0, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
