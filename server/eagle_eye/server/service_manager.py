"""What systemd is told: that the server serves. Touches: the notification socket.

Protocol: sd_notify(3), lines of KEY=value in one datagram.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

_log = logging.getLogger(__name__)


def say_ready(environ: Mapping[str, str]) -> None:
    """Have whoever started the service know that it serves, if a manager waits for that (NOTIFY_SOCKET).

    Never waits and never fails: a manager that cannot be told is logged.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    name = os.fsencode(address)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as end:
            end.sendto(b"READY=1", b"\0" + name[1:] if address.startswith("@") else name)
    except OSError as error:
        _log.warning("the service manager cannot be told that the server serves", extra={"error": str(error)})
