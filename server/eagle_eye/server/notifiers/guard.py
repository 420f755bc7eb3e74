"""Keeps deliveries away from addresses that only this machine's network can reach (SSRF).

Redirects are followed nowhere, user names in URLs are refused, and what was checked is what is connected to.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx

from eagle_eye.server.errors import TargetRefused

URL_CHARS_MAX = 2_048
ADDRESSES_MAX = 3  # of one name; tried in turn
_RESOLVER_THREADS = 128  # a name that nobody answers for holds one until the system gives up; made as needed
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_NAT64_LOCAL = ipaddress.IPv6Network("64:ff9b:1::/48")
_ALLOWABLE = frozenset({"loopback", "link_local", "private", "no_public"})  # by allow_private
# Where clouds tell a machine its own credentials. No webhook lives there, whatever is allowed.
_METADATA = frozenset(
    ipaddress.ip_address(text) for text in ("169.254.169.254", "169.254.170.2", "100.100.100.200", "fd00:ec2::254")
)
# Ports of services that would take a line of a request for a command; a part of the Fetch standard's bad ports.
BAD_PORTS = frozenset(
    {0, 7, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95, 101, 102, 103, 104, 109}
    | {110, 111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161, 179, 389, 427, 465, 512, 513, 514, 515, 526, 530}
    | {531, 532, 540, 548, 554, 556, 563, 587, 601, 636, 989, 990, 993, 995, 1719, 1720, 1723, 2049, 3659, 4045, 4190}
    | {5060, 5061, 6000, 6566, 6665, 6666, 6667, 6668, 6669, 6679, 6697, 10080}
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]
LookUp = Callable[..., Iterable[tuple[Any, Any, Any, Any, tuple[Any, ...]]]]


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
        for address in addresses:
            kind = not_public(ipaddress.ip_address(address.partition("%")[0]))
            if not kind or (self._allow_private and kind in _ALLOWABLE):
                continue
            # The address itself stays out of the message: it would map our network for the asker.
            raise TargetRefused(f"host {host!r} has a {kind.replace('_', '-')} address; {_remedy(kind)}")
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
    if parsed.port in BAD_PORTS:
        raise TargetRefused(f"port {parsed.port} is another protocol's; expected one that serves HTTP")
    if parsed.userinfo:
        raise TargetRefused("the URL holds a user name or password, which would be shown; check signatures instead")
    return parsed


def _remedy(kind: str) -> str:
    if kind in _ALLOWABLE:
        return "deliveries go to public addresses only unless webhooks.allow_private is true"
    return "deliveries never go there; give the address of a subscriber"


def not_public(address: Address) -> str:
    """Return what kind of non-public address this is, "" for a public one. Embedded IPv4 addresses count.

    One of loopback, link_local, private, no_public (shared or unassigned), metadata, multicast, unspecified, reserved.
    """
    inner = _embedded(address) if isinstance(address, ipaddress.IPv6Address) else None
    if inner is not None:
        return not_public(inner)
    if address in _NAT64_LOCAL:
        return "private"  # a network's own translation: who knows where to
    if address in _METADATA:
        return "metadata"
    for kind in ("loopback", "link_local", "multicast", "unspecified", "reserved", "private"):
        if getattr(address, f"is_{kind}"):
            return kind
    return "" if address.is_global else "no_public"


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that packets to this one end at, None where there is none."""
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)


def system_resolver(look_up: LookUp = socket.getaddrinfo) -> Resolve:
    """Return a resolver on threads of its own: a slow name server must not hold up the rest of the server.

    Who asks for a name that is being looked up already waits for the same answer, so that one dead name holds one
    thread, however many deliveries go there.
    """
    executor = ThreadPoolExecutor(_RESOLVER_THREADS, thread_name_prefix="resolve")
    asked: dict[tuple[str, int], asyncio.Future[list[str]]] = {}

    def addresses(host: str, port: int) -> list[str]:
        return [str(item[4][0]) for item in look_up(host, port, type=socket.SOCK_STREAM)]

    async def resolve(host: str, port: int) -> list[str]:
        key = (host, port)
        answer = asked.get(key)
        if answer is None or answer.get_loop() is not asyncio.get_running_loop():
            answer = asyncio.get_running_loop().run_in_executor(executor, addresses, host, port)
            asked[key] = answer
            answer.add_done_callback(lambda _: asked.pop(key, None))
        # Shielded: one who gives up waiting must not take the answer from the others.
        return await asyncio.shield(answer)

    return resolve
