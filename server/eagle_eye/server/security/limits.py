"""Request rate limits per token and per client address. Excess requests are refused with a retry time, and counted."""

from __future__ import annotations

import ipaddress
import logging
import math
import threading
from collections.abc import Callable

from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.security.auth import LOCAL, Principal
from eagle_eye.server.security.settings import LimitSettings

KEYS_MAX = 65_536  # tokens or addresses remembered, about 10 MB; beyond it those unused longest start anew
ROUNDING_S = 1e-6  # tolerance for rounding in sums of many intervals, in seconds since boot
SAID_EVERY_S = 10.0  # at most one log line about excess requests in this time, to avoid a flood of them
V6_HOST_BYTES = 8  # an IPv6 host has a whole /64: its addresses count as one

_log = logging.getLogger(__name__)


class Rates:
    """The generic cell rate algorithm: for each key the time at which all of its requests are paid for."""

    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        self._paid_s: dict[str, float] = {}  # the longest unused first
        self._keys_max = keys_max
        self._lock = threading.Lock()

    def take(self, key: str, per_s: float, burst: int, now_s: float) -> float:
        """Count one request and return 0.0, or, without counting it, return the seconds until there is room for it."""
        with self._lock:
            paid_s = max(self._paid_s.pop(key, now_s), now_s)
            wait_s = paid_s - now_s - (burst - 1) / per_s
            admitted = wait_s <= ROUNDING_S
            self._paid_s[key] = paid_s + 1.0 / per_s if admitted else paid_s
            if len(self._paid_s) > self._keys_max:
                del self._paid_s[next(iter(self._paid_s))]
        return 0.0 if admitted else wait_s

    def is_spent(self, key: str, per_s: float, burst: int, now_s: float) -> bool:
        """Return whether there is no room for one more request; nothing is counted."""
        with self._lock:
            paid_s = self._paid_s.get(key, now_s)
        return paid_s - now_s - (burst - 1) / per_s > ROUNDING_S


class Limits:
    """Refuses excess requests; ``counted("token" | "address")`` is called for each. Thread-safe."""

    def __init__(self, settings: LimitSettings, clock: Clock, counted: Callable[[str], None]) -> None:
        self.settings = settings
        self._clock = clock
        self._counted = counted
        self._tokens = Rates()
        self._addresses = Rates()
        self._writers = Rates()
        self._bad = Rates()
        self._said_s = -math.inf

    def use(self, settings: LimitSettings) -> None:
        """Use these settings from now on."""
        self.settings = settings

    def check_token(self, principal: Principal) -> None:
        """Raise Refusal 429 if the token exceeds its rate.

        Join tokens are exempt: a fleet shares one, and its hosts are limited by address.
        """
        settings = self.settings
        if principal.scope == "agent":
            per_s, burst, key = settings.agent_requests_per_s, settings.agent_burst, "limits.agent_requests_per_s"
        elif principal.who == LOCAL or principal.scope == "join":
            return
        else:
            per_s, burst, key = settings.token_requests_per_s, settings.token_burst, "limits.token_requests_per_s"
        wait_s = self._tokens.take(principal.who, per_s, burst, self._clock.monotonic_s())
        if wait_s > 0.0:
            raise self._refusal("token", principal.who, per_s, key, wait_s)

    def check_frames(self, principal: Principal) -> None:
        """Raise Refusal 429 if the sender of frames exceeds its rate.

        Senders that may send any node's frames are exempt, as they send for many nodes.
        """
        if principal.scope == "agent":
            self.check_token(principal)

    def check_address(self, address: str) -> None:
        """Raise Refusal 429 if this address exceeds its rate."""
        settings = self.settings
        per_s = settings.address_requests_per_s
        wait_s = self._addresses.take(host_of(address), per_s, settings.address_burst, self._clock.monotonic_s())
        if wait_s > 0.0:
            raise self._refusal("address", address, per_s, "limits.address_requests_per_s", wait_s)

    def check_remote_write(self, principal: Principal) -> None:
        """Raise Refusal 503 if the token exceeds its rate: Prometheus drops what is answered with 429."""
        settings = self.settings
        per_s, burst = settings.remote_write_requests_per_s, settings.remote_write_burst
        if principal.who == LOCAL:
            return
        wait_s = self._writers.take(principal.who, per_s, burst, self._clock.monotonic_s())
        if wait_s > 0.0:
            raise self._refusal("token", principal.who, per_s, "limits.remote_write_requests_per_s", wait_s, 503)

    def count_bad(self, address: str) -> bool:
        """Count a malformed or unauthenticated request; return whether they come too often."""
        settings, now_s = self.settings, self._clock.monotonic_s()
        return self._bad.take(host_of(address), settings.bad_requests_per_s, settings.bad_burst, now_s) > 0.0

    def is_bad(self, address: str) -> bool:
        """Return whether too many such requests came from the address recently."""
        settings, now_s = self.settings, self._clock.monotonic_s()
        return self._bad.is_spent(host_of(address), settings.bad_requests_per_s, settings.bad_burst, now_s)

    def _refusal(self, kind: str, who: str, per_s: float, key: str, wait_s: float, status: int = 429) -> Refusal:
        self._counted(kind)
        now_s = self._clock.monotonic_s()
        if now_s - self._said_s >= SAID_EVERY_S:
            self._said_s = now_s
            said = {"by": kind, "who": who, "limit_per_s": per_s}
            _log.warning("requests come too often and are refused", extra=said)
        detail = f"{kind} {who} asks more than {per_s:g} times a second; wait, ask less often, or raise {key}"
        return Refusal(status, "rate", detail, {"Retry-After": str(math.ceil(wait_s))})


def host_of(address: str) -> str:
    """Return the host of an address: the address itself, the /64 of an IPv6 one, or an IPv4-mapped IPv4 address."""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(parsed.ipv4_mapped) if parsed.ipv4_mapped else parsed.packed[:V6_HOST_BYTES].hex()
