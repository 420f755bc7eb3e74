"""Builders and fakes shared by the agent's tests."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from eagle_eye.agent.clock import Waitable
from eagle_eye.agent.training_hook.message import HookMessage, Totals, decode

REPOSITORY = Path(__file__).parents[2]


class FakeClock:
    """A clock that only moves when somebody waits or says so; both clocks move together unless ``jump`` is used."""

    def __init__(self, now_s: float = 1_000_000.0) -> None:
        self.wall_s = now_s
        self.passed_s = 0.0
        self.on_wait: Callable[[float], None] = lambda _s: None

    def now_s(self) -> float:
        return self.wall_s

    def monotonic_s(self) -> float:
        return self.passed_s

    def since_boot_s(self) -> float:
        return self.passed_s

    def wait(self, event: Waitable, timeout_s: float) -> bool:
        self.on_wait(timeout_s)
        if event.is_set():
            return True
        self.advance(max(0.0, timeout_s))
        return event.is_set()

    def advance(self, seconds: float) -> None:
        self.wall_s += seconds
        self.passed_s += seconds

    def jump(self, seconds: float) -> None:
        self.wall_s += seconds


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Return as soon as the condition holds; fail when it never does."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"did not come true within {timeout_s} s")
        time.sleep(0.005)


def message(number: int = 1, **changes: object) -> HookMessage:
    """A message of rank 0 of 2 of job "j"."""
    fields: dict[str, object] = {
        "process": b"p" * 16,
        "number": number,
        "time_s": 1_000_000.0,
        "heartbeat_s": 0.25,
        "job": "j",
        "rank": 0,
        "world_size": 2,
        "device": 0,
        "attempt": 0,
        "step": -1,
        "sequence": -1,
        "completed_sequence": -1,
        "goodbye": False,
        "failures": 0,
        "unread": 0,
        "unsent": 0,
        "totals": Totals(),
    }
    return HookMessage(**(fields | changes))  # type: ignore[arg-type]


class Listener:
    """The agent's end of the hook's socket, read only when asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)

    def read(self) -> list[HookMessage]:
        """Return everything that has arrived."""
        messages = []
        with contextlib.suppress(BlockingIOError):
            while True:
                messages.append(decode(self._socket.recv(1 << 16)))
        return messages

    def read_last(self) -> HookMessage:
        return self.read()[-1]

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def script(text: str, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run a Python program of its own process until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()
