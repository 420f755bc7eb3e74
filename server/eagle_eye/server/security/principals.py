"""Caches the principals of frame senders between requests: a fleet's agents authenticate ten thousand times a second.

The cache is cleared as soon as any token changes: at once when this server changed it, within ``LOOK_EVERY_S`` when
``eagle-eye tokens`` did. While the records are away it stays as it is: frames are taken on.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import msgspec

from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.security.auth import Credentials, Principal, Tokens
from eagle_eye.server.store.store import TOKENS, Store

LOOK_EVERY_S = 0.2
KEPT_MAX = 65_536


class CachedPrincipal(msgspec.Struct, frozen=True, gc=False):
    """A cached principal; valid while no token changes, until ``expires_s`` (Unix seconds)."""

    principal: Principal
    expires_s: float
    version: int


class Principals:
    """Authenticates as ``Tokens`` does. On the event loop."""

    def __init__(
        self,
        tokens: Tokens,
        store: Store,
        clock: Clock,
        *,
        stands_by: bool = False,
        looked: Callable[[int, float], None] | None = None,
    ) -> None:
        """``looked`` gets the sequence of the records' newest change as it was read, and when it was asked for."""
        self._tokens = tokens
        self._looked = looked
        self._store = store
        self._clock = clock
        self._stands_by = stands_by
        self._known: dict[Credentials, CachedPrincipal] = {}
        self._version = -1
        self._looked_s = -math.inf
        self._changed = threading.Event()
        store.listen(self._changed.set)

    def authenticate(self, credentials: Credentials, held: CachedPrincipal | None = None) -> CachedPrincipal:
        """Return the principal's pass; ``held`` is the connection's earlier pass for the same credentials.

        Raises Refusal 401 or 403.
        """
        now_s = self._clock.monotonic_s()
        if now_s - self._looked_s >= LOOK_EVERY_S or self._changed.is_set():
            self._look(now_s)
        known = held
        if known is None or known.version != self._version:
            known = self._known.get(credentials)
        if known is not None and (known.expires_s == math.inf or self._clock.now_s() < known.expires_s):
            return known
        principal = self._tokens.authenticate(credentials)
        token = self._store.get(TOKENS, principal.who)
        expires_s = math.inf if token is None or token.expires_s is None else token.expires_s
        if len(self._known) >= KEPT_MAX:
            self._known.clear()
        known = self._known[credentials] = CachedPrincipal(principal, expires_s, self._version)
        return known

    def _look(self, now_s: float) -> None:
        self._changed.clear()
        self._looked_s = now_s
        try:
            if not self._stands_by:
                # Without the lease nobody waits here for a database that may not answer.
                self._store.ensure_leading()
            version, newest = self._store.marks()
        except StoreUnavailable:
            if not self._tokens.remembers():
                self._known.clear()
            return
        self._tokens.answered()
        if self._looked is not None:
            self._looked(newest, now_s)
        if version != self._version:
            self._version = version
            self._known.clear()
            self._tokens.forget()
