"""Keeps deliveries away from addresses that only this machine's network can reach (SSRF)."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpx

from eagle_eye.server.errors import TargetRefused

URL_CHARS_MAX = 2_048
ADDRESSES_MAX = 3  # of one name; tried in turn
_RESOLVER_THREADS = 16
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]


class Target(NamedTuple):
    """A URL and the checked addresses of its host. Connect to these: a second look-up could answer otherwise."""

    url: httpx.URL
    addresses: tuple[str, ...]


class Guard:
    """Checks webhook URLs. ``resolve(host, port)`` returns addresses or raises OSError."""

    def __init__(self, allow_private: bool, resolve: Resolve) -> None:
        self._allow_private = allow_private
        self._resolve = resolve

    def allow_private(self, allowed: bool) -> None:
        """Judge by this from now on."""
        self._allow_private = allowed

    async def check(self, url: str) -> Target:
        """Return the target. Raises TargetRefused, and OSError when the name does not resolve."""
        parsed = parse(url)
        host, port = parsed.host, parsed.port or (443 if parsed.scheme == "https" else 80)
        try:
            addresses = [str(ipaddress.ip_address(host))]
        except ValueError:
            addresses = await self._resolve(host, port)
        if not self._allow_private:
            for address in addresses:
                kind = not_public(ipaddress.ip_address(address.partition("%")[0]))
                if kind:
                    # The address itself stays out of the message: it would map our network for the asker.
                    raise TargetRefused(
                        f"host {host!r} is {kind}; deliveries go to public addresses only"
                        " unless webhooks.allow_private is true"
                    )
        return Target(parsed, tuple(dict.fromkeys(addresses))[:ADDRESSES_MAX])


def parse(url: str) -> httpx.URL:
    """Return the URL. Raises TargetRefused unless it is http or https with a host and no user name."""
    if len(url) > URL_CHARS_MAX:
        raise TargetRefused(f"the URL has {len(url)} characters; at most {URL_CHARS_MAX}")
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        raise TargetRefused("the URL cannot be read; expected https://host/path") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise TargetRefused(f"the URL's scheme is {parsed.scheme[:20]!r}; expected https://host/path or http://")
    if parsed.userinfo:
        raise TargetRefused("the URL holds a user name or password, which would be shown; check signatures instead")
    return parsed


def not_public(address: Address) -> str:
    """Return what kind of non-public address this is, "" for a public one. Embedded IPv4 addresses count."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return not_public(inner)
    for kind in ("loopback", "link_local", "multicast", "unspecified", "reserved", "private"):
        if getattr(address, f"is_{kind}"):
            return f"a {kind.replace('_', '-')} address"
    return "" if address.is_global else "no public address"


def system_resolver() -> Resolve:
    """Return a resolver on threads of its own: a slow name server must not hold up the rest of the server."""
    executor = ThreadPoolExecutor(_RESOLVER_THREADS, thread_name_prefix="resolve")

    async def resolve(host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(executor, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        return [str(item[4][0]) for item in found]

    return resolve
