"""Who may do what: bearer tokens, kept as hashes, with scopes."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

from eagle_eye.server.clock import Clock
from eagle_eye.server.errors import Refusal
from eagle_eye.server.records import Scope, Token
from eagle_eye.server.store import Store

TOKEN_PREFIX = "ee_"  # noqa: S105 - lets secret scanners find a leaked token
TOKEN_CHARS_MAX = 256
LOCAL = "local"

# Each scope includes those of a lower rank; "agent" stands beside them: it sends frames and sees nothing.
_RANK: Mapping[str, int] = MappingProxyType({"agent": 0, "read": 1, "operate": 2, "admin": 3})
_CHALLENGE: Mapping[str, str] = MappingProxyType({"WWW-Authenticate": "Bearer"})
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Credentials(NamedTuple):
    """What a request says about its sender."""

    method: str
    authorization: str
    host: str
    origin: str

    @classmethod
    def of(cls, method: str, headers: Mapping[str, str]) -> Credentials:
        """Return the credentials in a request's headers, whose names are in lower case."""
        return cls(method, headers.get("authorization", ""), headers.get("host", ""), headers.get("origin", ""))


class Principal(NamedTuple):
    """Who is asking: a token's id or "local"; ``node`` binds an agent's token."""

    who: str
    scope: Scope
    node: str | None = None


class Tokens:
    """Authenticates by the store's tokens; a revoked one is refused from the next request on.

    As long as no token was ever made and only this machine can reach the server, everything is allowed.
    """

    def __init__(self, store: Store, clock: Clock, loopback: bool) -> None:
        self._store = store
        self._clock = clock
        self._loopback = loopback

    def authenticate(self, credentials: Credentials) -> Principal:
        """Return who it is. Raises Refusal 401, or 403 for a web page that misuses a browser on this machine."""
        kind, _, text = credentials.authorization.partition(" ")
        if not text:
            if self._loopback and not self._store.any_token():
                _check_browser(credentials)
                return Principal(LOCAL, "admin")
            raise Refusal(401, "no_token", "a token is needed: Authorization: Bearer ee_...", _CHALLENGE)
        if kind.lower() != "bearer" or len(text) > TOKEN_CHARS_MAX:
            raise Refusal(401, "token", "Authorization must be: Bearer ee_...", _CHALLENGE)
        digest = sha256(text.strip())
        token = self._store.token_by_sha256(digest)
        # One answer for unknown, revoked and expired: the sender learns nothing about which tokens exist.
        if (
            token is None
            or not hmac.compare_digest(token.sha256, digest)
            or token.revoked
            or (token.expires_s is not None and token.expires_s <= self._clock.now_s())
        ):
            raise Refusal(401, "token", "the token is unknown, revoked or expired; make another one", _CHALLENGE)
        return Principal(token.id, token.scope, token.node)

    def authorise(self, principal: Principal, needed: Scope) -> None:
        """Return if the principal's scope includes ``needed``. Raises Refusal 403."""
        if _RANK[principal.scope] < _RANK[needed]:
            raise Refusal(403, "scope", f"the token has scope {principal.scope}; this needs {needed}")

    def authorise_frames(self, principal: Principal, node: str) -> None:
        """Return if the principal may send the node's frames: its own agent or an administrator.

        Raises Refusal 403.
        """
        if principal.scope == "admin":
            return
        if principal.scope != "agent":
            raise Refusal(403, "scope", f"the token has scope {principal.scope}; frames need agent")
        if principal.node != node:
            raise Refusal(403, "node", f"the token is bound to node {principal.node!r}; it cannot speak for {node!r}")


def sha256(text: str) -> str:
    """Return the hash under which a token is kept. Tokens are long and random, so a fast hash is enough."""
    return hashlib.sha256(text.encode()).hexdigest()


def mint(scope: Scope, node: str | None, now_s: float, lifetime_s: float | None) -> tuple[str, Token]:
    """Return a new token's text, which is known to nobody else, and its record.

    Raises ValueError when an agent's token names no node, or another one names a node.
    """
    if scope == "agent" and not node:
        raise ValueError("an agent's token is bound to its node: --node NAME")
    if scope != "agent" and node:
        raise ValueError(f"only an agent's token is bound to a node; scope is {scope}")
    text = TOKEN_PREFIX + secrets.token_urlsafe(32)
    expires_s = None if lifetime_s is None else now_s + lifetime_s
    token = Token(
        id=f"tok-{secrets.token_hex(6)}",
        sha256=sha256(text),
        scope=scope,
        node=node,
        created_s=now_s,
        expires_s=expires_s,
    )
    return text, token


def _check_browser(credentials: Credentials) -> None:
    """Refuse what a foreign web page makes a browser on this machine send; without tokens nothing else would."""
    try:
        host = urlsplit(f"//{credentials.host}").hostname
        origin = urlsplit(credentials.origin).hostname if credentials.origin else host
    except ValueError:
        host = origin = None
    if host not in _LOCAL_NAMES:
        raise Refusal(
            403,
            "host",
            f"host {credentials.host[:80]!r} is not this machine; without tokens only localhost is served:"
            " make one with eagle-eye tokens create",
        )
    if credentials.method not in _SAFE_METHODS and origin not in _LOCAL_NAMES:
        raise Refusal(403, "origin", "a web page of another origin may change nothing here")
