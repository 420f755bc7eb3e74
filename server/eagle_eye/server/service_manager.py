"""What systemd is told: that the server serves, that its event loop lives, that it ends. Touches: its socket.

Protocol: sd_notify(3) and sd_watchdog_enabled(3): lines of KEY=value in one datagram.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping

from eagle_eye.schema.service_environment import notify_address, watchdog_s

ALIVE_RATIO = 1 / 3  # of the manager's deadline: two signs of life may be late

_log = logging.getLogger(__name__)


class ServiceManager:
    """Speaks when a manager listens (NOTIFY_SOCKET); never waits for it, and never fails for it.

    What a busy manager did not take is said again at the next ``alive``; one that cannot be told is logged once.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        monotonic_s: Callable[[], float] = time.monotonic,
        pid: int | None = None,
    ) -> None:
        """``pid`` is this process's; the watchdog's deadline may be meant for another (WATCHDOG_PID)."""
        self._address = notify_address(environ)
        self._every_s = ALIVE_RATIO * watchdog_s(environ, os.getpid() if pid is None else pid)
        self._monotonic_s = monotonic_s
        self._alive_s = monotonic_s()
        self._untold: tuple[str, ...] = ()
        self._said = False

    def serving(self, url: str) -> None:
        """Requests are answered from now on: a start that was waited for has ended."""
        self._say("READY=1", f"STATUS=serving {url}")

    def alive(self) -> None:
        """The event loop lives: told three times within the watchdog's deadline. Costs nothing where none is due."""
        if self._untold:
            self._say(*self._untold)
        now_s = self._monotonic_s()
        if now_s - self._alive_s >= self._every_s and self._tell("WATCHDOG=1"):
            self._alive_s = now_s

    def stopping(self) -> None:
        """The server was asked to end, and ends what is under way first."""
        self._say("STOPPING=1", "STATUS=stopping")

    def _say(self, *lines: str) -> None:
        self._untold = () if self._tell(*lines) else lines

    def _tell(self, *lines: str) -> bool:
        """Return False where the manager is busy, and it is worth another attempt."""
        if not self._address:
            return True
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as end:
                end.sendto("\n".join(lines).encode("utf-8", "replace"), self._address)
        except BlockingIOError:
            return False
        except OSError as error:
            if not self._said:
                self._said = True
                _log.warning("the service manager cannot be told that the server serves", extra={"error": str(error)})
        return True
