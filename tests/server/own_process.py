"""A server in a process of its own, on a free port of loopback, that tests may kill and whose files they may break."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from eagle_eye.schema.frame import CONTENT_TYPE, Frame
from tests.server.builders import body

WITHIN_S = 60.0
COMMAND = ("-m", "eagle_eye.cli.main", "server", "--listen", "127.0.0.1:0", "--data")


@dataclass
class OwnProcess:
    """A server that answers, a client of it, and what it has logged."""

    process: subprocess.Popen[bytes]
    client: httpx.Client
    listen: str
    log: Path

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def send(self, *frames: Frame) -> httpx.Response:
        content = body(*frames, sent_s=time.time())
        return self.client.post("/api/v1/frames", content=content, headers={"content-type": CONTENT_TYPE})

    def storage(self) -> str:
        said: str = self.client.get("/readyz").json()["checks"]["storage"]
        return said


def ended(data: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a server that is expected to end by itself."""
    words = [sys.executable, *COMMAND, str(data), *options]
    return subprocess.run(words, capture_output=True, text=True, timeout=WITHIN_S, check=False)


@contextmanager
def serving(data: Path, *options: str, log: Path | None = None, python: str = sys.executable) -> Iterator[OwnProcess]:
    """Run a server, which is killed in the end; its log is beside its folder, unless ``log`` is elsewhere."""
    log = log or data.with_name(f"{data.name}.log")
    with log.open("wb") as stderr:
        process = subprocess.Popen([python, *COMMAND, str(data), *options], stderr=stderr)
    try:
        wait_until(lambda: b"serving http" in log.read_bytes() or process.poll() is not None)
        # A server that has a public URL names that one.
        told = [one for flag, one in pairwise(options) if flag == "--listen" and not one.endswith(":0")]
        found = told or re.findall(r"serving http://([\d.:]+)", log.read_text())
        assert found, log.read_text()
        options_of: dict[str, Any] = {"base_url": f"http://{found[0]}", "timeout": WITHIN_S, "trust_env": False}
        with httpx.Client(**options_of) as client:
            client.get("/healthz").raise_for_status()
            yield OwnProcess(process, client, found[0], log)
    finally:
        process.kill()
        process.wait()


def wait_until(done: Callable[[], bool], within_s: float = WITHIN_S) -> None:
    """Return once it is done; fail after ``within_s``."""
    end_s = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < end_s, "it did not come about"
        time.sleep(0.02)
