"""What systemd says to a service in its environment: where it listens, and how often it wants a sign of life.

Protocol: sd_notify(3) and sd_watchdog_enabled(3).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

ADDRESS_BYTES_MAX = 107  # the kernel's limit for a path; an abstract name's leading NUL counts


def notify_address(environ: Mapping[str, str]) -> bytes:
    """Return the socket's address, empty where there is none that we can speak to: a path, or "@" and a name."""
    text = environ.get("NOTIFY_SOCKET", "")
    address = os.fsencode(text)
    if not text.startswith(("/", "@")) or len(address) > ADDRESS_BYTES_MAX:
        return b""
    return b"\0" + address[1:] if text.startswith("@") else address


def watchdog_s(environ: Mapping[str, str], pid: int) -> float:
    """Return the manager's deadline between two signs of life; infinite where there is none for this process."""
    text, meant_for = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not (text.isascii() and text.isdecimal() and 0 < len(text) < 20) or meant_for not in ("", str(pid)):
        return math.inf
    return int(text) / 1e6 or math.inf
