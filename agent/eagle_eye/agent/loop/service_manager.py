"""Notifies systemd of readiness, watchdog and status. Touches: systemd's socket."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping

from eagle_eye.agent.loop.tick_result import TickFrame
from eagle_eye.schema.systemd import NotifySocket, watchdog_s

WATCHDOG_RATIO = 1 / 3  # of the manager's deadline: two notifications may be late
STARTING_EVERY_S = 10.0  # how often a slow start asks for more time,
EXTEND_S = 60.0  # and how much
STATUS_EVERY_S = 10.0
STATUS_CHARS_MAX = 300

_log = logging.getLogger("eagle_eye.agent")


class ServiceManager:
    """What systemd knows of the agent; a notification that failed is sent again at the next opportunity.

    ``every_s`` is the longest time between calls of ``alive``; infinite without a watchdog.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        monotonic_s: Callable[[], float] = time.monotonic,
        pid: int | None = None,
    ) -> None:
        """``pid`` is this process's; the watchdog's deadline may be meant for another process (WATCHDOG_PID)."""
        self._socket = NotifySocket(environ, _log)
        self._monotonic_s = monotonic_s
        self._watchdog_s = watchdog_s(environ, os.getpid() if pid is None else pid)
        self._ready = False
        self._alive_s = -math.inf
        self._status_s = -math.inf
        self._status = ""

    @property
    def every_s(self) -> float:
        """How often a watchdog notification is due, seconds."""
        if not self._socket.listens:
            return math.inf
        starting_s = math.inf if self._ready else STARTING_EVERY_S
        return min(starting_s, WATCHDOG_RATIO * self._watchdog_s)

    def alive(self) -> None:
        """Send a watchdog notification when due; before the first frame, also ask for more start time."""
        now_s = self._monotonic_s()
        if now_s - self._alive_s < 0.9 * self.every_s:
            return
        lines = [] if self._ready else [f"EXTEND_TIMEOUT_USEC={EXTEND_S * 1e6:.0f}"]
        if math.isfinite(self._watchdog_s):
            lines.append("WATCHDOG=1")
        if self._socket.send(*lines):
            self._alive_s = now_s

    def ticked(self, tick: TickFrame) -> None:
        """Note a frame. The first one makes the service ready."""
        now_s = self._monotonic_s()
        status = status_of(tick)
        if not self._ready:
            lines = ["READY=1", f"STATUS={status}"]
        elif status != self._status and now_s - self._status_s >= STATUS_EVERY_S:
            lines = [f"STATUS={status}"]
        else:
            lines = []
        if lines and self._socket.send(*lines):
            self._ready, self._status, self._status_s = True, status, now_s
        self.alive()

    def stopping(self, reason: str) -> None:
        """Notify that the loop has ended."""
        self._socket.send("STOPPING=1", f"STATUS=stopping: {_one_line(reason)}")


def status_of(tick: TickFrame) -> str:
    """Return one line on the agent's state: which collectors fail, and why."""
    asked = [standing for standing in tick.collectors if standing.supported]
    failing = [f"{standing.name} {standing.state}" for standing in asked if not standing.ok]
    line = f"{len(asked) - len(failing)} of {len(asked)} collectors ok"
    return _one_line("; ".join((line, *failing)))


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text[:STATUS_CHARS_MAX])
