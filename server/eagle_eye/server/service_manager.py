"""Notifies systemd that the server serves, that its event loop runs, and that it stops. Touches: systemd's socket."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping

from eagle_eye.schema.service import NotifySocket, watchdog_s

ALIVE_RATIO = 1 / 3  # of the manager's deadline: two signs of life may be late

_log = logging.getLogger(__name__)


class ServiceManager:
    """What systemd knows of the server. What it did not take is sent again at the next ``alive``."""

    def __init__(
        self,
        environ: Mapping[str, str],
        monotonic_s: Callable[[], float] = time.monotonic,
        pid: int | None = None,
    ) -> None:
        """``pid`` is this process's; the watchdog's deadline may be meant for another (WATCHDOG_PID)."""
        self._socket = NotifySocket(environ, _log)
        self._every_s = ALIVE_RATIO * watchdog_s(environ, os.getpid() if pid is None else pid)
        self._monotonic_s = monotonic_s
        self._alive_s = monotonic_s()
        self._unsent: tuple[str, ...] = ()

    def serving(self, url: str) -> None:
        """Requests are answered from now on: a start that was waited for has ended."""
        self._send("READY=1", f"STATUS=serving {url}")

    def alive(self) -> None:
        """The event loop runs: sent three times within the watchdog's deadline. Costs nothing where none is due."""
        if self._unsent:
            self._send(*self._unsent)
        now_s = self._monotonic_s()
        if now_s - self._alive_s >= self._every_s and self._socket.send("WATCHDOG=1"):
            self._alive_s = now_s

    def stopping(self) -> None:
        """The server was asked to end, and ends what is under way first."""
        self._send("STOPPING=1", "STATUS=stopping")

    def _send(self, *lines: str) -> None:
        self._unsent = () if self._socket.send(*lines) else lines
