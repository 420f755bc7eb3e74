"""Connection limits: in total, per client address, and for unauthenticated connections. On the event loop.

A connection is unauthenticated until an authorised request on it has succeeded. Each address may have a limited number
of such connections at a time, and one that sends bad requests too often is refused for a while. So no client can use up
the process's files or the event loop that serves the agents.
"""

from __future__ import annotations

import logging
import math
import resource
from collections import Counter
from collections.abc import Callable

from eagle_eye.server.model.clock import Clock
from eagle_eye.server.security.limits import SAID_EVERY_S, Limits, host_of

FILES_KEPT = 256  # of the process's file limit, reserved for everything but connections

_log = logging.getLogger(__name__)


class Connections:
    """All connections. ``refused(reason)`` is called for each one refused: "total", "address" or "rate"."""

    def __init__(self, limits: Limits, clock: Clock, refused: Callable[[str], None]) -> None:
        self._limits = limits
        self._clock = clock
        self._refused = refused
        self._unauthenticated: Counter[str] = Counter()
        self._said_s = -math.inf
        self.count = 0

    @property
    def unauthenticated(self) -> int:
        """Number of unauthenticated connections."""
        return self._unauthenticated.total()

    def admit(self, address: str) -> Connection | None:
        """Count a new connection from the address; return None if it must be refused."""
        host, limits = host_of(address), self._limits.settings
        most = max(min(limits.connections, _files_max() - FILES_KEPT), 1)
        if self.count >= most:
            why, limit = "total", most
        elif self._unauthenticated[host] >= min(limits.address_connections, most // 2 or 1):
            why, limit = "address", limits.address_connections
        elif self._limits.is_bad(address):
            why, limit = "rate", int(limits.bad_requests_per_s)
        else:
            self.count += 1
            self._unauthenticated[host] += 1
            return Connection(self, address, host)
        if not self._unauthenticated[host]:
            del self._unauthenticated[host]
        self._refused(why)
        now_s = self._clock.monotonic_s()
        if now_s - self._said_s >= SAID_EVERY_S:
            self._said_s = now_s
            _log.warning("connections are refused", extra={"by": why, "who": address, "limit": limit})
        return None

    def is_bad(self, address: str) -> bool:
        """Count a bad request; return whether its address has sent too many of them."""
        return self._limits.count_bad(address)

    def count_authenticated(self, host: str) -> None:
        """Decrease the count of unauthenticated connections."""
        self._unauthenticated[host] -= 1
        if not self._unauthenticated[host]:
            del self._unauthenticated[host]


class Connection:
    """One connection from its acceptance to its end."""

    def __init__(self, connections: Connections, address: str, host: str) -> None:
        self._connections = connections
        self._address = address
        self._host = host
        self._unauthenticated = True
        self._here = True

    def proven(self) -> None:
        """Mark the connection as authenticated."""
        if self._unauthenticated:
            self._unauthenticated = False
            self._connections.count_authenticated(self._host)

    def bad(self) -> bool:
        """Count a bad request; return whether the connection must be closed for it."""
        return self._connections.is_bad(self._address)

    def end(self) -> None:
        """Remove the connection from the counts; idempotent."""
        if self._here:
            self._here = False
            self._connections.count -= 1
            self.proven()


def _files_max() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
