"""Chromium spoken to over pipes, in its own debugging protocol: a browser for the tests that every run makes.

It needs nothing but the browser; the other tests of the page use Playwright.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WITHIN_S = 30.0  # for one answer, or until something is so; neighbours may have the machine
# Chromium reads commands from descriptor 3 and writes answers to 4, each ended by a zero byte.
_EXEC = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage")


class PipedBrowser:
    """One page of one browser. ``complaints`` are script errors, violations of the policy, and failed requests."""

    def __init__(self, commands: int, answers: int) -> None:
        self.complaints: list[str] = []
        self._commands = commands
        self._answers = answers
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the answer to one command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + WITHIN_S
        while True:
            reported = self._next(deadline_s, method)
            if reported.get("id") == self._number:
                assert "error" not in reported, reported
                result: dict[str, Any] = reported["result"]
                return result

    def evaluate(self, expression: str) -> Any:
        """Return what the JavaScript gives."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until the JavaScript says true."""
        deadline_s = time.monotonic() + WITHIN_S
        while not self.evaluate(expression):
            assert time.monotonic() < deadline_s, (expression, self.evaluate("document.body.innerText"))
            time.sleep(0.05)

    def _next(self, deadline_s: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._answers], [], [], max(0.0, deadline_s - time.monotonic()))[0], what
            part = os.read(self._answers, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        reported: dict[str, Any] = json.loads(text)
        match reported.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(reported["params"]["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if reported["params"]["type"] in ("error", "warning"):
                self.complaints.append(str(reported["params"]["args"]))
            case "Log.entryAdded" if reported["params"]["entry"]["level"] in ("error", "warning"):
                self.complaints.append(str(reported["params"]["entry"]))
        return reported


@contextmanager
def piped_browser(program: str, folder: Path) -> Iterator[PipedBrowser]:
    """Run the browser with its profile in ``folder``."""
    theirs_in, commands = os.pipe()
    answers, theirs_out = os.pipe()
    # Out of the way of 3 and 4.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]
    for fd in (theirs_in, theirs_out):
        os.close(fd)
    flags = (*_FLAGS, f"--user-data-dir={folder}", "--remote-debugging-pipe")
    process = subprocess.Popen(
        [sys.executable, "-c", _EXEC, *map(str, high), program, *flags],
        pass_fds=high,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for fd in high:
        os.close(fd)
    try:
        yield PipedBrowser(commands, answers)
    finally:
        os.close(commands)  # it ends once nobody can command it
        os.close(answers)
        try:
            process.wait(WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
