"""Settings for rate limits, TLS and signing in."""

from __future__ import annotations

import ipaddress
import re
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.model import Count, Positive

_HEADER = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*")
_RESERVED_HEADERS = frozenset({"authorization", "cookie", "host", "origin"})


class LimitSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rate limits; a burst is what may arrive at once after a pause. Frames are limited by token only."""

    agent_requests_per_s: Positive = 20.0  # per agent token: twice what the fastest agent sends
    agent_burst: Count = 100
    token_requests_per_s: Positive = 50.0  # per other token, except for frames and join tokens
    token_burst: Count = 500
    address_requests_per_s: Positive = 200.0  # per client address, except for frames: a proxy may serve a fleet
    address_burst: Count = 2_000
    remote_write_requests_per_s: Positive = 2_000.0  # per token; Prometheus sends about 2,000 samples per request
    remote_write_burst: Count = 10_000
    # Per client address: malformed requests, and unauthenticated telemetry. Beyond it its connections are closed.
    bad_requests_per_s: Positive = 100.0
    bad_burst: Count = 1_000
    connections: Count = 50_000  # concurrent, within the process's limit on open files
    address_connections: Count = 4_096  # per client address, counting unauthenticated connections only
    head_timeout_s: Positive = 30.0  # for a request's head to arrive, including a new connection's first


class TlsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """PEM files, reread when they change. ``certificate_file`` "": plain HTTP."""

    certificate_file: str = ""  # the server's certificate chain
    key_file: str = ""  # "": the key is in certificate_file
    client_ca_file: str = ""  # CA of client certificates; "": none are requested
    client_certificates: Literal["agents", "all"] = "agents"  # who must have one; an agent's names its node


class ProxySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A reverse proxy that has signed people in and names them in headers. ``user_header`` "": none.

    Of ``addresses``, ``secret_header`` and ``certificate_names`` at least one is set; whatever is set must hold.
    """

    user_header: str = ""  # X-Forwarded-User, Remote-User, X-Auth-Request-Preferred-Username
    groups_header: str = ""  # "": the proxy names no groups
    groups_separator: str = ","
    addresses: tuple[str, ...] = ()  # the proxy's own addresses or networks
    secret_header: str = ""  # a header that the proxy sets to what secret_file holds
    secret_file: str = ""
    certificate_names: tuple[str, ...] = ()  # of the proxy's client certificate (tls.client_ca_file)


class ProviderSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The site's OpenID Connect provider. ``issuer`` "": none."""

    issuer: str = ""  # what stands before /.well-known/openid-configuration
    client_id: str = ""
    client_secret_file: str = ""  # also signs sessions: a new secret ends them all
    scopes: tuple[str, ...] = ("openid", "profile", "email")
    user_claim: str = "preferred_username"
    groups_claim: str = "groups"
    session_s: Positive = 8 * 3_600.0  # how long somebody stays signed in
    ca_file: str = ""  # CA certificates that are trusted besides the system's
    timeout_s: Positive = 10.0  # for one answer of the provider


class SignInSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """People who sign in with the site's accounts, and which of their groups may do what; "*" is everybody."""

    read_groups: tuple[str, ...] = ()
    operate_groups: tuple[str, ...] = ()
    admin_groups: tuple[str, ...] = ()
    # What people see who may only look: all jobs, or those whose owner is called like them or one of their groups.
    jobs_visible: Literal["all", "owners"] = "all"
    proxy: ProxySettings = ProxySettings()
    provider: ProviderSettings = ProviderSettings()

    @property
    def on(self) -> bool:
        """Whether anybody can sign in."""
        return bool(self.proxy.user_header or self.provider.issuer)


def check(settings: SignInSettings, tls: TlsSettings, public_url: str, records_retention_s: float) -> None:
    """Raise ConfigurationError, naming the first inconsistent key, unless the settings are consistent."""
    proxy = settings.proxy
    if settings.on and not (settings.read_groups or settings.operate_groups or settings.admin_groups):
        raise ConfigurationError(
            "sign_in.read_groups: expected groups, since people can sign in; got none, so nobody could see anything;"
            ' ["*"] lets everybody look'
        )
    _check_provider(settings.provider, public_url, records_retention_s)
    if proxy.user_header and not (proxy.addresses or proxy.secret_header or proxy.certificate_names):
        raise ConfigurationError(
            f"sign_in.proxy.addresses: expected the proxy's addresses, secret_header or certificate_names, since"
            f" {proxy.user_header} would otherwise be accepted from anybody; got none"
        )
    for key in ("user_header", "groups_header", "secret_header"):
        name: str = getattr(proxy, key)
        if name and (not _HEADER.fullmatch(name) or name.lower() in _RESERVED_HEADERS):
            raise ConfigurationError(f"sign_in.proxy.{key}: expected a header such as X-Forwarded-User, got {name!r}")
    for text in proxy.addresses:
        try:
            ipaddress.ip_network(text)
        except ValueError as error:
            raise ConfigurationError(f"sign_in.proxy.addresses: expected addresses or networks: {error}") from None
    if bool(proxy.secret_header) != bool(proxy.secret_file):
        raise ConfigurationError("sign_in.proxy.secret_file: expected a file if and only if secret_header is set")
    if proxy.certificate_names and not tls.client_ca_file:
        raise ConfigurationError("tls.client_ca_file: expected a file, since sign_in.proxy.certificate_names is set")
    if not proxy.groups_separator:
        raise ConfigurationError("sign_in.proxy.groups_separator: expected what stands between two groups, got ''")


def is_private(url: str) -> bool:
    """Return whether nobody on the way reads what is sent to the URL: https, or this machine."""
    parts = urlsplit(url)
    return bool(parts.hostname) and (parts.scheme == "https" or (parts.scheme == "http" and _is_here(parts.hostname)))


def _is_here(host: str | None) -> bool:
    return host in ("localhost", "127.0.0.1", "::1")


def _check_provider(provider: ProviderSettings, public_url: str, records_retention_s: float) -> None:
    if not provider.issuer:
        return
    for key, url in (("sign_in.provider.issuer", provider.issuer), ("public_url", public_url)):
        if not is_private(url):
            raise ConfigurationError(f"{key}: expected https://, since people sign in with it; got {url!r}")
    for key in ("client_id", "client_secret_file", "user_claim"):
        if not getattr(provider, key):
            raise ConfigurationError(f"sign_in.provider.{key}: expected a value, since issuer is set; got none")
    if "openid" not in provider.scopes:
        raise ConfigurationError("sign_in.provider.scopes: expected openid among them")
    if provider.session_s > records_retention_s:
        raise ConfigurationError(
            f"sign_in.provider.session_s: expected at most history.records_retention_s, {records_retention_s:g}, for as"
            f" long as it is remembered whose sessions were ended; got {provider.session_s:g}"
        )
