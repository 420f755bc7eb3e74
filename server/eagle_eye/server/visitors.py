"""Who is connected: how many at a time, from where, and whether they have shown that they may be. On the event loop.

A connection is a stranger's until a request on it was answered with success to somebody who may ask. Of strangers an
address may have only so many at a time, and who asks for nothing sensible too often finds the door closed for a while.
So one client can neither take all of the process' files nor wear out the loop on which agents are answered.
"""

from __future__ import annotations

import logging
import math
import resource
from collections import Counter
from collections.abc import Callable

from eagle_eye.server.clock import Clock
from eagle_eye.server.limits import SAID_EVERY_S, Limits, host_of

FILES_KEPT = 256  # of those that the process may open, for everything that is no connection

_log = logging.getLogger(__name__)


class Visitors:
    """All connections. ``refused(reason)`` is called for each that was not let in: "total", "address" or "rate"."""

    def __init__(self, limits: Limits, clock: Clock, refused: Callable[[str], None]) -> None:
        self._limits = limits
        self._clock = clock
        self._refused = refused
        self._strangers: Counter[str] = Counter()
        self._said_s = -math.inf
        self.count = 0

    @property
    def strangers(self) -> int:
        """How many connections have shown nothing yet."""
        return self._strangers.total()

    def admit(self, address: str) -> Visit | None:
        """Count a connection from the address in; return None where it may not stay."""
        host, limits = host_of(address), self._limits.settings
        most = max(min(limits.connections, _files_max() - FILES_KEPT), 1)
        if self.count >= most:
            why, limit = "total", most
        elif self._strangers[host] >= min(limits.address_connections, most // 2 or 1):
            why, limit = "address", limits.address_connections
        elif self._limits.is_bad(address):
            why, limit = "rate", int(limits.bad_requests_per_s)
        else:
            self.count += 1
            self._strangers[host] += 1
            return Visit(self, address, host)
        if not self._strangers[host]:
            del self._strangers[host]
        self._refused(why)
        now_s = self._clock.monotonic_s()
        if now_s - self._said_s >= SAID_EVERY_S:
            self._said_s = now_s
            _log.warning("connections are refused", extra={"by": why, "who": address, "limit": limit})
        return None

    def is_bad(self, address: str) -> bool:
        """Count a request that was of no use; return whether its address has sent too many of them."""
        return self._limits.count_bad(address)

    def forget_stranger(self, host: str) -> None:
        """Count one stranger less."""
        self._strangers[host] -= 1
        if not self._strangers[host]:
            del self._strangers[host]


class Visit:
    """One connection from its acceptance to its end."""

    def __init__(self, visitors: Visitors, address: str, host: str) -> None:
        self._visitors = visitors
        self._address = address
        self._host = host
        self._stranger = True
        self._here = True

    def proven(self) -> None:
        """Take note that somebody who may ask has asked on it."""
        if self._stranger:
            self._stranger = False
            self._visitors.forget_stranger(self._host)

    def bad(self) -> bool:
        """Take note of a request that was of no use; return whether the connection is to be closed for it."""
        return self._visitors.is_bad(self._address)

    def end(self) -> None:
        """Count it out; a second time changes nothing."""
        if self._here:
            self._here = False
            self._visitors.count -= 1
            self.proven()


def _files_max() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
