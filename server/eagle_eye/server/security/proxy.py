"""Reads who signed in from the headers of a reverse proxy, and believes them of that proxy alone."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.names import RULE, is_name
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.security.auth import CERTIFICATE_NAMES, PEER
from eagle_eye.server.security.settings import ProxySettings

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
