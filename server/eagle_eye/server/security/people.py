"""Authenticates API requests: by token, else as the person who signed in with the site's accounts.

A person is known by the headers of a reverse proxy that is believed, or by the signed cookie of a sign-in.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.names import RULE, is_name
from eagle_eye.server.model.clock import Clock, rfc3339
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.model.records import Scope
from eagle_eye.server.security.auth import (
    CERTIFICATE_NAMES,
    PEER,
    SAFE_METHODS,
    TOKEN_PREFIX,
    Credentials,
    Principal,
    Tokens,
)
from eagle_eye.server.security.settings import ProxySettings, SignInSettings
from eagle_eye.server.store.store import ENDED_SESSIONS, Store

# Who signed in, from the headers of a reverse proxy, which are believed of that proxy alone.

GROUPS_MAX = 1_000
SECRET_CHARS_MIN = 16

RawHeaders = Iterable[tuple[bytes, bytes]]


class Person(NamedTuple):
    """Somebody whom the site's accounts name."""

    name: str
    groups: frozenset[str]


class Proxy:
    """The trusted proxy. ``refused(reason)`` counts what is not believed. Raises ConfigurationError."""

    def __init__(self, settings: ProxySettings, refused: Callable[[str], None]) -> None:
        self._settings = settings
        self._refused = refused
        self._networks = [ipaddress.ip_network(text) for text in settings.addresses]
        self._secret = read_secret("sign_in.proxy.secret_file", settings.secret_file) if settings.secret_file else ""
        self._own = frozenset(
            name.lower().encode()
            for name in (settings.user_header, settings.groups_header, settings.secret_header)
            if name
        )

    def person(self, headers: RawHeaders, state: Mapping[str, Any]) -> Person | None:
        """Return whom the headers name, None for nobody. Raises Refusal 401 unless the trusted proxy sent them."""
        settings = self._settings
        headers = list(headers)
        users = _values(headers, settings.user_header)
        if not users:
            return None
        why = self._why_not(headers, state)
        if why:
            raise self._refusal("untrusted_proxy", f"{settings.user_header} is accepted only from the proxy: {why}")
        lines = _values(headers, settings.groups_header) if settings.groups_header else []
        if len(users) > 1 or len(lines) > 1:
            twice = settings.user_header if len(users) > 1 else settings.groups_header
            why = f"{twice} came {max(len(users), len(lines))} times; have the proxy replace what its clients send"
            raise self._refusal("proxy_headers", why)
        listed = lines[0].split(settings.groups_separator) if lines else []
        groups = frozenset(group for text in listed if (group := text.strip()))
        return checked_person(users[0], groups, settings.user_header, self._refused)

    def trusted_only(self, headers: RawHeaders, state: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
        """Return the headers to pass on to another server: those that name people only from the trusted proxy."""
        headers = list(headers)
        if not _values(headers, self._settings.user_header) or not self._why_not(headers, state):
            return headers
        self._refused("untrusted_proxy")
        return [one for one in headers if one[0].lower() not in self._own]

    def _why_not(self, headers: RawHeaders, state: Mapping[str, Any]) -> str:
        """Return why the sender is not the trusted proxy; "" if it is."""
        settings = self._settings
        peer = _address(state.get(PEER, ""))
        if self._networks and (peer is None or not any(peer in network for network in self._networks)):
            return f"{state.get(PEER) or 'an unknown address'} is not in sign_in.proxy.addresses"
        if settings.secret_header:
            shown = _values(headers, settings.secret_header)
            if len(shown) != 1 or not hmac.compare_digest(shown[0].encode(), self._secret.encode()):
                return f"{settings.secret_header} is not what sign_in.proxy.secret_file holds"
        if settings.certificate_names:
            names = state.get(CERTIFICATE_NAMES, frozenset())
            if not names & frozenset(settings.certificate_names):
                shown_names = ", ".join(sorted(names))[:200] or "none"
                return f"the client certificate is not of sign_in.proxy.certificate_names; shown: {shown_names}"
        return ""

    def _refusal(self, reason: str, detail: str) -> Refusal:
        self._refused(reason)
        return Refusal(401, reason, detail)


def checked_person(name: str, groups: Iterable[str], where: str, refused: Callable[[str], None]) -> Person:
    """Return the person if the names are names: they reach the audit trail and pages. Raises Refusal 401."""
    groups = frozenset(groups)
    wrong = next((text for text in (name, *groups) if not is_name(text)), None)
    if wrong is not None or len(groups) > GROUPS_MAX:
        refused("name")
        why = f"{len(groups)} groups; at most {GROUPS_MAX}" if wrong is None else f"{wrong[:80]!a} is no name: {RULE}"
        raise Refusal(401, "name", f"{where}: {why}")
    return Person(name, groups)


def read_secret(key: str, file: str) -> str:
    """Return the text of a secret's file without its line end. Raises ConfigurationError naming the key."""
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{key}: {file} cannot be read: {error}") from None
    if len(text) < SECRET_CHARS_MIN:
        raise ConfigurationError(
            f"{key}: {file} has {len(text)} characters; expected a random secret of at least {SECRET_CHARS_MIN}:"
            " openssl rand -base64 32"
        )
    return text


def _values(headers: RawHeaders, name: str) -> list[str]:
    wanted = name.lower().encode()
    return [value.decode("utf-8", "replace").strip() for key, value in headers if key.lower() == wanted]


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


# Signed cookies: who is signed in, and what a sign-in under way must find again. No session is kept at the server, so
# that each server of a site knows one that another began. The key comes from the provider's client secret, which all of
# them have: a new secret ends all sessions. Those of one person are ended by a record that says until when they had
# begun (``EndedSessions``).

COOKIE_BYTES_MAX = 4_000  # browsers drop larger ones
PLAIN_BYTES_MAX = 1 << 16


class Ending(msgspec.Struct, frozen=True):
    """What a cookie holds; it counts until ``ends_s`` (Unix seconds)."""

    ends_s: float


class Session(Ending, frozen=True):
    """Somebody who is signed in; ``begun_s`` is 0 in a cookie of a server that did not say."""

    name: str
    groups: tuple[str, ...]
    begun_s: float = 0.0


class Begun(Ending, frozen=True):
    """A sign-in that the provider has not answered yet."""

    state: str
    nonce: str
    verifier: str


ContentT = TypeVar("ContentT", bound=Ending)


class Cookie(Generic[ContentT]):
    """One kind of cookie. ``__Host-``: no other host, and nobody without TLS, can set it."""

    def __init__(self, name: str, content: type[ContentT], same_site: str, secret: str, clock: Clock) -> None:
        self.name = f"__Host-{name}"
        self._content = content
        self._same_site = same_site
        self._key = hmac.digest(secret.encode(), f"eagle-eye cookie {name}".encode(), "sha256")
        self._clock = clock

    def header(self, content: ContentT) -> str:
        """Return the Set-Cookie header. Raises Refusal 403 if the content does not fit into a cookie."""
        packed = _base64(zlib.compress(msgspec.json.encode(content), 9))
        value = f"{packed}.{self._signature(packed)}"
        if len(value) > COOKIE_BYTES_MAX:
            limit = f"{len(value)} bytes of cookie, {COOKIE_BYTES_MAX} at most"
            raise Refusal(403, "groups", f"you are in too many groups ({limit}): have the provider send fewer")
        return f"{self.name}={value}; Max-Age={max(0, int(content.ends_s - self._clock.now_s()))}; {self._attributes}"

    def gone(self) -> str:
        """Return the Set-Cookie header that deletes it."""
        return f"{self.name}=; Max-Age=0; {self._attributes}"

    def read(self, cookies: str) -> ContentT | None:
        """Return the content from a Cookie header; None if there is none, it was not made here, or has ended."""
        found = (part.strip().partition("=") for part in cookies.split(";"))
        value = next((value for name, _, value in found if name == self.name), "")
        packed, _, signature = value.partition(".")
        if not hmac.compare_digest(signature.encode(), self._signature(packed).encode()):
            return None
        try:
            plain = zlib.decompressobj().decompress(base64.urlsafe_b64decode(packed), PLAIN_BYTES_MAX)
            content = msgspec.json.decode(plain, type=self._content)
        except (binascii.Error, ValueError, zlib.error, msgspec.DecodeError):  # of an earlier version
            return None
        return content if self._clock.now_s() < content.ends_s else None

    @property
    def _attributes(self) -> str:
        return f"Path=/; Secure; HttpOnly; SameSite={self._same_site}"

    def _signature(self, packed: str) -> str:
        return _base64(hmac.digest(self._key, packed.encode(), hashlib.sha256))


def _base64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode()


# Both, and tokens.

USER = "user:"  # before a person's name in the audit trail: no person can be called like a token
EVERYBODY = "*"
# Browsers send a header of a page's own to its own server alone, so that no foreign page can use a person's sign-in.
REQUEST_HEADER = "Eagle-Eye-Request"


class People:
    """Who sends a request. A token decides if there is one; nobody else's headers then count."""

    def __init__(
        self,
        settings: SignInSettings,
        store: Store,
        tokens: Tokens,
        proxy: Proxy | None,
        session: Cookie[Session] | None = None,
    ) -> None:
        self.settings = settings
        self._store = store
        self._session = session
        self._tokens = tokens
        self._proxy = proxy

    def authenticate(self, method: str, headers: RawHeaders, state: Mapping[str, Any]) -> Principal:
        """Return the principal.

        Raises Refusal 401, or 403 for a person who may do nothing, or a foreign page; StoreUnavailable.
        """
        headers = list(headers)
        named = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
        credentials = Credentials.of(method, named, state)
        # A proxy may send an Authorization of its own, with the site's password or token.
        if TOKEN_PREFIX in credentials.authorization:
            self.forwardable(headers, state)  # an untrusted header beside a token is counted
            return self._tokens.authenticate(credentials)
        person = None if self._proxy is None else self._proxy.person(headers, state)
        ends_s = None
        if person is None and (session := self._signed_in(headers)) is not None:
            person, ends_s = Person(session.name, frozenset(session.groups)), session.ends_s
        if person is None:
            return self._tokens.authenticate(credentials)
        refuse_foreign(method, named)
        return self.principal(person, ends_s)

    def principal(self, person: Person, session_ends_s: float | None = None) -> Principal:
        """Return the principal with the highest scope that the person's groups have. Raises Refusal 403."""
        settings = self.settings
        granted: Iterable[tuple[Scope, tuple[str, ...]]] = (
            ("admin", settings.admin_groups),
            ("operate", settings.operate_groups),
            ("read", settings.read_groups),
        )
        for scope, groups in granted:
            if EVERYBODY in groups or not person.groups.isdisjoint(groups):
                return Principal(
                    USER + person.name,
                    scope,
                    person=person.name,
                    groups=person.groups,
                    session_ends_s=session_ends_s,
                    owners_only=scope == "read" and settings.jobs_visible == "owners",
                )
        detail = f"{person.name} is signed in but in none of the groups that have access (sign_in.read_groups)"
        raise Refusal(403, "no_group", detail)

    def forwardable(self, headers: RawHeaders, state: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
        """Return the headers to pass on to the server that leads, which cannot see who sent them to this one."""
        return list(headers) if self._proxy is None else self._proxy.trusted_only(headers, state)

    def _signed_in(self, headers: RawHeaders) -> Session | None:
        if self._session is None:
            return None
        cookies = "; ".join(value.decode("latin-1") for name, value in headers if name == b"cookie")
        session = self._session.read(cookies)
        if session is None:
            return None
        ended = self._store.get(ENDED_SESSIONS, session.name)
        if ended is not None and session.begun_s <= ended.ended_s:
            who = "you" if ended.by == USER + session.name else ended.by
            why = f"{who} ended the sessions of {session.name} at {rfc3339(ended.ended_s)}; sign in again"
            raise Refusal(401, "session", why)
        return session


def refuse_foreign(method: str, headers: Mapping[str, str]) -> None:
    """Raise Refusal 403 for a change that a page of another origin may have had a person's browser send."""
    if method not in SAFE_METHODS and REQUEST_HEADER.lower() not in headers:
        why = f"a person's change needs the header {REQUEST_HEADER}: 1, which no foreign page can send"
        raise Refusal(403, "foreign_page", why)
