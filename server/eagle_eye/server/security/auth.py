"""Authentication and authorisation: bearer tokens with scopes, stored as hashes; and rate limits."""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import ipaddress
import logging
import math
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from eagle_eye.schema.names import RULE, is_name
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import Refusal, StoreUnavailable
from eagle_eye.server.model.records import Scope, Token
from eagle_eye.server.security.settings import LimitSettings
from eagle_eye.server.store.store import TOKENS, Store

TOKEN_PREFIX = "ee_"  # noqa: S105 - lets secret scanners find a leaked token
TOKEN_CHARS_MAX = 256
LOCAL = "local"
CERTIFICATE_NAMES = "certificate_names"  # in an ASGI scope's state
PEER = "peer"  # likewise: the address at the other end of the connection, whatever headers say

JOIN_LIFETIME_S_MAX = 30 * 86_400.0  # a join token is on every host of a fleet, so it must be short-lived

# Each scope includes those of a lower rank; those of rank 0 are separate and can read nothing.
_RANK: Mapping[str, int] = MappingProxyType(
    {"agent": 0, "remote_write": 0, "join": 0, "read": 1, "operate": 2, "admin": 3}
)
# Never "Basic": a browser would ask for a password, keep it, and send it with whatever foreign pages have it request.
_CHALLENGE: Mapping[str, str] = MappingProxyType({"WWW-Authenticate": "Bearer"})
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_WILDCARDS = frozenset("*?[")
# For how long tokens are believed as they were read last, while the records cannot be read: who could revoke one cannot
# write it down. As long as agents keep what was acknowledged.
REMEMBERED_S = 900.0
KNOWN_MAX = 65_536  # tokens remembered
_NO_STATE: Mapping[str, Any] = MappingProxyType({})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Credentials(NamedTuple):
    """What identifies a request's sender.

    ``or_basic``: the token may be the password of Basic credentials. For endpoints of senders that know no other kind
    and are no browsers: a browser repeats Basic credentials on its own, also for foreign pages.
    """

    method: str
    authorization: str
    host: str
    origin: str
    certificate_names: frozenset[str] = frozenset()  # the names in the client's certificate
    or_basic: bool = False

    @classmethod
    def of(
        cls,
        method: str,
        headers: Mapping[str, str],
        state: Mapping[str, Any] = _NO_STATE,
        *,
        or_basic: bool = False,
    ) -> Credentials:
        """Return the credentials from a request's headers (names in lower case) and its connection's state."""
        names = state.get(CERTIFICATE_NAMES, frozenset())
        authorization, host, origin = (headers.get(name, "") for name in ("authorization", "host", "origin"))
        return cls(method, authorization, host, origin, names, or_basic)

    @property
    def accepted(self) -> str:
        """What the header may be."""
        basic = ", or HTTP basic auth with the token as password and any user name" if self.or_basic else ""
        return f"Authorization: Bearer ee_...{basic}"

    def token(self) -> str:
        """Return the token's text, "" if there is none in what the header has."""
        kind, _, text = self.authorization.partition(" ")
        if self.or_basic and kind.lower() == "basic":
            text = _password(text)
        elif kind.lower() != "bearer":
            return ""
        return text.strip() if len(text) <= TOKEN_CHARS_MAX else ""


class Principal(NamedTuple):
    """An authenticated sender: a token's id, "local" or "user:NAME"; ``node`` is what an agent's token is bound to.

    ``person`` is the name of somebody who signed in, with the site's ``groups``; "" for all others. ``session_ends_s``:
    None unless they did so here. ``owners_only``: they see the jobs alone that they or their groups own.
    """

    who: str
    scope: Scope
    node: str | None = None
    certificate_names: frozenset[str] = frozenset()
    person: str = ""
    groups: frozenset[str] = frozenset()
    session_ends_s: float | None = None
    owners_only: bool = False


class Writer(NamedTuple):
    """A remote-write sender: patterns of the nodes it may write for, and how many new ones it may name.

    ``nodes_max`` None: the setting ``remote_write.token_nodes_max``. ``vouches``: it vouches for every node that it
    names.
    """

    patterns: Sequence[str]
    nodes_max: int | None = None
    vouches: bool = False

    def may_speak_for(self, node: str) -> bool:
        """Return whether the node matches a pattern."""
        return any(fnmatch.fnmatchcase(node, pattern) for pattern in self.patterns)

    def vouches_for(self, node: str) -> bool:
        """Return whether naming the node vouches for it: as an administrator, or by its full name in the token."""
        return self.vouches or (node in self.patterns and not _WILDCARDS.intersection(node))


class Tokens:
    """Authenticates with the store's tokens; a revoked one is refused from the next request on.

    Until the first token is created, everything is allowed if only this machine can reach the server. ``certified``: an
    agent also needs a certificate that names its node. While the records cannot be read, tokens that were read before
    are believed for REMEMBERED_S.
    """

    def __init__(self, store: Store, clock: Clock, loopback: bool, *, certified: bool = False) -> None:
        self._store = store
        self._clock = clock
        self._loopback = loopback
        self._certified = certified
        self._known: dict[str, Token] = {}  # by hash, as they were read last
        self._is_open: bool | None = None  # whether there is no token yet, as it was read last
        self._answered_s = clock.monotonic_s()  # when the records were read last

    def answered(self) -> None:
        """Note that the records were just read."""
        self._answered_s = self._clock.monotonic_s()

    def forget(self) -> None:
        """Tokens have changed: what was read of them counts no more, whatever becomes of the records."""
        self._known.clear()
        self._is_open = None

    def remembers(self) -> bool:
        """Return whether what was read of tokens still counts, while the records cannot be read."""
        return self._clock.monotonic_s() - self._answered_s < REMEMBERED_S

    def authenticate(self, credentials: Credentials) -> Principal:
        """Return the principal. Raises Refusal 401, or 403 for a web page that misuses a browser on this machine."""
        if not credentials.authorization.partition(" ")[2]:
            if self._loopback and self._asks_for_none():
                _check_browser(credentials)
                return Principal(LOCAL, "admin")
            raise Refusal(401, "no_token", f"a token is needed: {credentials.accepted}", _CHALLENGE)
        text = credentials.token()
        if not text:
            raise Refusal(401, "token", f"no token is in the header; expected {credentials.accepted}", _CHALLENGE)
        digest = sha256(text)
        token = self._token(digest)
        # The same answer for unknown, revoked and expired, so as not to reveal which tokens exist.
        if (
            token is None
            or not hmac.compare_digest(token.sha256, digest)
            or token.revoked
            or (token.expires_s is not None and token.expires_s <= self._clock.now_s())
        ):
            raise Refusal(401, "token", "the token is unknown, revoked or expired; make another one", _CHALLENGE)
        principal = Principal(token.id, token.scope, token.node, credentials.certificate_names)
        if token.scope == "agent":
            self._check_certificate(principal, token.node or "")
        return principal

    def _token(self, digest: str) -> Token | None:
        """Return the token with this hash; as it was read last, while the records are away. Raises StoreUnavailable."""
        try:
            token = self._store.token_by_sha256(digest)
        except StoreUnavailable:
            if self.remembers() and (kept := self._known.get(digest)) is not None:
                return kept
            raise
        self.answered()
        if token is not None:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[digest] = token
        else:
            self._known.pop(digest, None)
        return token

    def _asks_for_none(self) -> bool:
        """Return whether there is no token yet; as it was read last, while the records are away."""
        try:
            self._is_open = not self._store.any_token()
        except StoreUnavailable:
            if self._is_open is None or not self.remembers():
                raise
            return self._is_open
        self.answered()
        return self._is_open

    def authorise(self, principal: Principal, needed: Scope) -> None:
        """Raise Refusal 403 unless the principal's scope includes ``needed``."""
        if _RANK[principal.scope] < _RANK[needed]:
            who = principal.person or "the token"
            raise Refusal(403, "scope", f"{who} has scope {principal.scope}; this needs {needed}")

    def authorise_frames(self, principal: Principal, node: str) -> None:
        """Raise Refusal 403 unless the principal may send the node's frames: its own agent or an administrator."""
        if principal.scope == "admin":
            return
        if principal.scope != "agent":
            raise Refusal(403, "scope", f"the token has scope {principal.scope}; frames need agent")
        if principal.node != node:
            raise Refusal(403, "node", f"the token is bound to node {principal.node!r}; it cannot speak for {node!r}")

    def authorise_remote_write(self, principal: Principal) -> Writer:
        """Return what the principal may write by remote write. Raises Refusal 403."""
        if principal.scope == "admin":
            return Writer(("*",), vouches=True)
        token = self._store.get(TOKENS, principal.who)
        if principal.scope != "remote_write" or token is None:
            raise Refusal(403, "scope", f"the token has scope {principal.scope}; remote write needs remote_write")
        return Writer(token.nodes, token.nodes_max)

    def authorise_enrolment(self, principal: Principal, node: str) -> Token | None:
        """Return the join token that pays for the node's token; None for an administrator, who may enrol any node.

        Raises Refusal 403, and 409 where no tokens exist: creating the first would lock out all other senders.
        """
        if principal.who == LOCAL:
            raise Refusal(409, "open", "this server asks for no tokens; agents on this machine need none")
        if principal.scope == "admin":
            return None
        join = self._store.get(TOKENS, principal.who)
        if principal.scope != "join" or join is None:
            raise Refusal(403, "scope", f"the token has scope {principal.scope}; enrolling needs join")
        self._check_certificate(principal, node)
        if join.nodes and not any(fnmatch.fnmatchcase(node, pattern) for pattern in join.nodes):
            raise Refusal(403, "node", f"the token enrols {', '.join(join.nodes)}; {node!r} is none of them")
        return join

    def _check_certificate(self, principal: Principal, node: str) -> None:
        if self._certified and node not in principal.certificate_names:
            shown = ", ".join(sorted(principal.certificate_names))[:200] or "none"
            raise Refusal(
                403,
                "certificate",
                f"node {node!r} needs a client certificate with that common name or DNS name; shown: {shown}",
            )


def _password(text: str) -> str:
    """Return the password in Basic credentials; "" where they are none."""
    try:
        return base64.b64decode(text.strip(), validate=True).decode().partition(":")[2]
    except (binascii.Error, ValueError):
        return ""


def sha256(text: str) -> str:
    """Return the hash under which a token is stored. Tokens are long and random, so a fast hash is enough."""
    return hashlib.sha256(text.encode()).hexdigest()


def mint(
    scope: Scope,
    node: str | None,
    now_s: float,
    lifetime_s: float | None,
    nodes: Sequence[str] = (),
    *,
    replaces: bool = False,
    nodes_max: int | None = None,
) -> tuple[str, Token]:
    """Return a new token's text, which is stored nowhere, and its record.

    Raises ValueError when an agent's token names no valid node or any other token names one; when a join token is not
    short-lived, or another one sets what only a join or remote-write token may.
    """
    if scope == "agent" and not node:
        raise ValueError("an agent's token is bound to its node: --node NAME")
    if node and not is_name(node):
        raise ValueError(f"--node: {node[:80]!a} is no name: {RULE}")
    if scope != "agent" and node:
        raise ValueError(f"only an agent's token is bound to a node; scope is {scope}")
    if scope == "join" and (lifetime_s is None or lifetime_s > JOIN_LIFETIME_S_MAX):
        raise ValueError(f"a join token ends within {JOIN_LIFETIME_S_MAX / 86_400:.0f} days: --expires-days N")
    if scope == "remote_write" and not nodes:
        raise ValueError("a remote-write token says for which nodes it speaks: --nodes GLOB ('*' for any)")
    if (scope not in ("join", "remote_write") and nodes) or (scope != "join" and replaces):
        raise ValueError(f"only join and remote-write tokens say for which nodes they are; scope is {scope}")
    if nodes_max is not None and (scope != "remote_write" or nodes_max < 0):
        raise ValueError(f"--nodes-max: expected 0 or more, of a remote-write token; got {nodes_max}, scope {scope}")
    text = TOKEN_PREFIX + secrets.token_urlsafe(32)
    expires_s = None if lifetime_s is None else now_s + lifetime_s
    token = Token(
        id=f"tok-{secrets.token_hex(6)}",
        sha256=sha256(text),
        scope=scope,
        node=node,
        created_s=now_s,
        expires_s=expires_s,
        nodes=list(nodes),
        replaces=replaces,
        nodes_max=nodes_max,
    )
    return text, token


def _check_browser(credentials: Credentials) -> None:
    """Refuse requests that a foreign web page has a browser on this machine send; without tokens nothing else would."""
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
    if credentials.method not in SAFE_METHODS and origin not in _LOCAL_NAMES:
        raise Refusal(403, "origin", "a web page of another origin may change nothing here")


# The principals of frame senders are cached between requests: a fleet's agents authenticate ten thousand times a
# second. The cache is cleared as soon as any token changes: at once when this server changed it, within
# ``PRINCIPALS_LOOK_EVERY_S`` when ``eagle-eye tokens`` did. While the records are away it stays as it is: frames are
# taken on.

PRINCIPALS_LOOK_EVERY_S = 0.2
PRINCIPALS_KEPT_MAX = 65_536


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
        if now_s - self._looked_s >= PRINCIPALS_LOOK_EVERY_S or self._changed.is_set():
            self._look(now_s)
        known = held
        if known is None or known.version != self._version:
            known = self._known.get(credentials)
        if known is not None and (known.expires_s == math.inf or self._clock.now_s() < known.expires_s):
            return known
        principal = self._tokens.authenticate(credentials)
        token = self._store.get(TOKENS, principal.who)
        expires_s = math.inf if token is None or token.expires_s is None else token.expires_s
        if len(self._known) >= PRINCIPALS_KEPT_MAX:
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


# Rate limits per token and per client address. Excess requests are refused with a retry time, and counted.

RATE_KEYS_MAX = 65_536  # tokens or addresses remembered, about 10 MB; beyond it those unused longest start anew
ROUNDING_S = 1e-6  # tolerance for rounding in sums of many intervals, in seconds since boot
SAID_EVERY_S = 10.0  # at most one log line about excess requests in this time, to avoid a flood of them
V6_HOST_BYTES = 8  # an IPv6 host has a whole /64: its addresses count as one

_log = logging.getLogger(__name__)


class Rates:
    """The generic cell rate algorithm: for each key the time at which all of its requests are paid for."""

    def __init__(self, keys_max: int = RATE_KEYS_MAX) -> None:
        self._paid_s: dict[str, float] = {}  # the longest unused first
        self._keys_max = keys_max
        self._lock = threading.Lock()

    def count_request(self, key: str, per_s: float, burst: int, now_s: float) -> float:
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
        wait_s = self._tokens.count_request(principal.who, per_s, burst, self._clock.monotonic_s())
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
        wait_s = self._addresses.count_request(
            host_of(address), per_s, settings.address_burst, self._clock.monotonic_s()
        )
        if wait_s > 0.0:
            raise self._refusal("address", address, per_s, "limits.address_requests_per_s", wait_s)

    def check_remote_write(self, principal: Principal) -> None:
        """Raise Refusal 503 if the token exceeds its rate: Prometheus drops what is answered with 429."""
        settings = self.settings
        per_s, burst = settings.remote_write_requests_per_s, settings.remote_write_burst
        if principal.who == LOCAL:
            return
        wait_s = self._writers.count_request(principal.who, per_s, burst, self._clock.monotonic_s())
        if wait_s > 0.0:
            raise self._refusal("token", principal.who, per_s, "limits.remote_write_requests_per_s", wait_s, 503)

    def count_bad(self, address: str) -> bool:
        """Count a malformed or unauthenticated request; return whether they come too often."""
        settings, now_s = self.settings, self._clock.monotonic_s()
        return self._bad.count_request(host_of(address), settings.bad_requests_per_s, settings.bad_burst, now_s) > 0.0

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
