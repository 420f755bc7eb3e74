"""Systemd's service protocol: readiness and status notifications, and the watchdog.

Touches: the notification socket. Protocol: sd_notify(3) and sd_watchdog_enabled(3). Not a library (sdnotify,
systemd-python): the agent should not gain a dependency, and those block while systemd is busy.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Mapping

ADDRESS_BYTES_MAX = 107  # the kernel's limit for a path; an abstract name's leading NUL counts


def notify_address(environ: Mapping[str, str]) -> bytes:
    """Return the socket's address, empty if there is no usable one: a path, or "@" and a name."""
    text = environ.get("NOTIFY_SOCKET", "")
    address = os.fsencode(text)
    if not text.startswith(("/", "@")) or len(address) > ADDRESS_BYTES_MAX:
        return b""
    return b"\0" + address[1:] if text.startswith("@") else address


def watchdog_s(environ: Mapping[str, str], pid: int) -> float:
    """Return the manager's deadline between two keep-alives; infinite if there is none for this process."""
    text, meant_for = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not (text.isascii() and text.isdecimal() and 0 < len(text) < 20) or meant_for not in ("", str(pid)):
        return math.inf
    return int(text) / 1e6 or math.inf


class NotifySocket:
    """Sends to systemd's notification socket, if there is one; never blocks and never fails.

    ``listens`` is whether there is one. A failure to reach it is logged to ``log`` once.
    """

    def __init__(self, environ: Mapping[str, str], log: logging.Logger) -> None:
        self._address = notify_address(environ)
        self._log = log
        self._warned = False

    @property
    def listens(self) -> bool:
        """Whether there is a socket to notify."""
        return bool(self._address)

    def send(self, *lines: str) -> bool:
        """Send KEY=value lines in one datagram; return False if they were not accepted and may be sent again."""
        if not self._address:
            return True
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as end:
                end.sendto("\n".join(lines).encode("utf-8", "replace"), self._address)
        except BlockingIOError:  # systemd is busy
            return False
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._log.warning("systemd cannot be notified: %s", error.strerror or error)
            return False
        return True
