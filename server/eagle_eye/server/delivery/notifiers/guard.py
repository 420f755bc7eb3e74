"""Blocks deliveries to addresses that only this machine's network can reach (SSRF protection).

Redirects are never followed, user names in URLs are refused, and connections go to the address that was checked.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx

from eagle_eye.server.delivery.notifiers.special_addresses import not_public
from eagle_eye.server.model.errors import TargetRefused

URL_CHARS_MAX = 2_048
ADDRESSES_MAX = 3  # per name; tried in turn
_RESOLVER_THREADS = 128  # a name without an answer holds one until the system gives up; started as needed
_NO_PART_OF_A_URL = re.compile(r"[\x00-\x20\x7f-\xa0\\\s]")
_HOST_NAME = re.compile(
    r"(?=.{1,253}\.?\Z)[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*\.?", re.ASCII
)
_ALLOWABLE = frozenset({"loopback", "link_local", "private", "no_public"})  # by allow_private
# Ports of services that could take a line of a request for a command; part of the Fetch standard's bad ports.
BAD_PORTS = frozenset(
    {7, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95, 101, 102, 103, 104, 109}
    | {110, 111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161, 179, 389, 427, 465, 512, 513, 514, 515, 526, 530}
    | {531, 532, 540, 548, 554, 556, 563, 587, 601, 636, 989, 990, 993, 995, 1719, 1720, 1723, 2049, 3659, 4045, 4190}
    | {5060, 5061, 6000, 6566, 6665, 6666, 6667, 6668, 6669, 6679, 6697, 10080}
)

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
        """Set whether private addresses are allowed from now on."""
        self._allow_private = allowed

    async def check(self, url: str) -> Target:
        """Return the target. Raises TargetRefused, and OSError when the name does not resolve."""
        parsed = parse(url)
        host, port = parsed.host, parsed.port or (443 if parsed.scheme == "https" else 80)
        addresses = [host] if _is_address(host) else await self._resolve(host, port)
        for address in addresses:
            kind = not_public(ipaddress.ip_address(address.partition("%")[0]))
            if not kind or (self._allow_private and kind in _ALLOWABLE):
                continue
            # The message omits the address: it would reveal our network to the requester.
            raise TargetRefused(f"host {host!r} has a {kind.replace('_', '-')} address; {_remedy(kind)}")
        return Target(parsed, tuple(dict.fromkeys(addresses))[:ADDRESSES_MAX])


def parse(url: str) -> httpx.URL:
    """Return the URL. Raises TargetRefused unless it is http or https with a host, and without a user name.

    What other programs might parse differently (spaces, backslashes) is refused as well. The message repeats only the
    URL's scheme and port: the invalid part may be a misplaced password.
    """
    if len(url) > URL_CHARS_MAX:
        raise TargetRefused(f"the URL has {len(url)} characters; at most {URL_CHARS_MAX}")
    found = _NO_PART_OF_A_URL.search(url)
    if found is not None:
        raise TargetRefused(f"the URL holds {found[0]!r} at position {found.start()}; write it as %{ord(found[0]):02X}")
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        raise TargetRefused("the URL cannot be read; expected https://host/path") from None
    if parsed.scheme not in ("http", "https"):
        raise TargetRefused(f"the URL's scheme is {parsed.scheme[:20]!r}; expected https://host/path or http://")
    if parsed.userinfo or "@" in url.partition("://")[2].partition("/")[0]:
        raise TargetRefused("the URL holds a user name or password, which would be shown; check signatures instead")
    if not parsed.host:
        raise TargetRefused("the URL has no host; expected https://host/path")
    if parsed.port is not None and not 0 < parsed.port < 65_536:
        raise TargetRefused(f"port {parsed.port} does not exist; expected 1 to 65535")
    if parsed.port in BAD_PORTS:
        raise TargetRefused(f"port {parsed.port} is another protocol's; expected one that serves HTTP")
    if not _is_address(parsed.host) and not _HOST_NAME.fullmatch(parsed.raw_host.decode("ascii")):
        raise TargetRefused("the URL's host is no name and no address; expected letters, digits, hyphens and dots")
    return parsed


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _remedy(kind: str) -> str:
    if kind in _ALLOWABLE:
        return "deliveries go to public addresses only unless webhooks.allow_private is true"
    return "deliveries never go there; give the address of a subscriber"


def system_resolver(look_up: LookUp = socket.getaddrinfo) -> Resolve:
    """Return a resolver with threads of its own: a slow name server must not block the rest of the server.

    Concurrent look-ups of a name share one answer, so that a dead name occupies one thread, however many deliveries go
    there.
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
        # Shielded: a waiter that gives up must not cancel it for the others.
        return await asyncio.shield(answer)

    return resolve
