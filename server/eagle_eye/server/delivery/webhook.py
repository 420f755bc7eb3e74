"""Posts messages over HTTP: signed, within each target's limits, with a receipt for each attempt.

They go to checked addresses only: never to those that this machine's network alone can reach (SSRF protection).
Redirects are never followed, user names in URLs are refused, and connections go to the address that was checked.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import ipaddress
import re
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import certifi
import httpx
from msgspec.structs import replace
from standardwebhooks import Webhook as Signer

from eagle_eye.schema.action import EPOCH_HEADER, EPOCH_MAX
from eagle_eye.server.delivery.attempts import Format, Message, Outcome, Receipt, WebhookSettings
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import TargetRefused
from eagle_eye.server.model.records import OutboundEvent, Retiring, Subscription, WebhookFormat
from eagle_eye.server.security.auth import Rates

# Addresses that no webhook may go to, as data, with the kind of each.
#
# From IANA's special-purpose address registries (iana-ipv4-special-registry and iana-ipv6-special-registry): those that
# are not globally reachable, and all of 2001::/23. Also multicast and unassigned parts of both address spaces, and the
# cloud metadata addresses that serve a machine's credentials, some of which are public addresses.

REGISTRIES_OF = "2024-10-22"  # the registries' date

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# The first entry that contains an address gives its kind.
_SPECIAL: tuple[tuple[str, str], ...] = (
    # Most clouds; AWS's containers; Tencent; Scaleway; Alibaba; Azure's host; Oracle; AWS; Google; Scaleway; Oracle.
    ("169.254.169.0/24", "metadata"),
    ("169.254.170.0/24", "metadata"),
    ("169.254.0.23/32", "metadata"),
    ("169.254.42.42/32", "metadata"),
    ("100.100.100.200/32", "metadata"),
    ("168.63.129.16/32", "metadata"),
    ("192.0.0.192/32", "metadata"),
    ("fd00:ec2::/32", "metadata"),
    ("fd20:ce::254/128", "metadata"),
    ("fd00:42::42/128", "metadata"),
    ("fd00:c1::a9fe:a9fe/128", "metadata"),
    # IPv4
    ("0.0.0.0/8", "unspecified"),
    ("10.0.0.0/8", "private"),
    ("100.64.0.0/10", "no_public"),
    ("127.0.0.0/8", "loopback"),
    ("169.254.0.0/16", "link_local"),
    ("172.16.0.0/12", "private"),
    ("192.0.0.0/24", "no_public"),
    ("192.0.2.0/24", "no_public"),
    ("192.88.99.0/24", "no_public"),
    ("192.168.0.0/16", "private"),
    ("198.18.0.0/15", "no_public"),
    ("198.51.100.0/24", "no_public"),
    ("203.0.113.0/24", "no_public"),
    ("224.0.0.0/4", "multicast"),
    ("240.0.0.0/4", "reserved"),
    # IPv6
    ("::/128", "unspecified"),
    ("::1/128", "loopback"),
    ("64:ff9b:1::/48", "private"),  # a network's own translation: its destinations are unknown
    ("100::/64", "no_public"),
    ("2001:2::/48", "no_public"),
    ("2001:10::/28", "no_public"),
    ("2001:db8::/32", "no_public"),
    ("2001::/23", "no_public"),
    ("3fff::/20", "no_public"),
    ("5f00::/16", "no_public"),
    ("fc00::/7", "private"),
    ("fe80::/10", "link_local"),
    ("fec0::/10", "private"),
    ("ff00::/8", "multicast"),
)
SPECIAL: tuple[tuple[Network, str], ...] = tuple((ipaddress.ip_network(text), kind) for text, kind in _SPECIAL)
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")  # the rest of IPv6 is not assigned for global unicast
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)


def not_public(address: Address) -> str:
    """Return the kind of special address, "" for a public one. An embedded special address counts as itself.

    metadata, loopback, link_local, private, no_public (documentation, benchmarks, shared and the like), multicast,
    unspecified, reserved.
    """
    inner = _embedded(address) if isinstance(address, ipaddress.IPv6Address) else None
    if inner is not None:
        return not_public(inner)
    for network, kind in SPECIAL:
        if address in network:
            return kind
    return "" if isinstance(address, ipaddress.IPv4Address) or address in _GLOBAL_UNICAST else "reserved"


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that packets to this address reach, None if there is none."""
    if address in _NAT64 or (int(address) >> 32) & 0xFFFF_FFFF in _ISATAP:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)


# The check of a target's URL and addresses.

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
        parsed = parse_url(url)
        host, port = parsed.host, parsed.port or (443 if parsed.scheme == "https" else 80)
        addresses = [host] if _is_address(host) else await self._resolve(host, port)
        for address in addresses:
            kind = not_public(ipaddress.ip_address(address.partition("%")[0]))
            if not kind or (self._allow_private and kind in _ALLOWABLE):
                continue
            # The message omits the address: it would reveal our network to the requester.
            raise TargetRefused(f"host {host!r} has a {kind.replace('_', '-')} address; {_remedy(kind)}")
        return Target(parsed, tuple(dict.fromkeys(addresses))[:ADDRESSES_MAX])


def parse_url(url: str) -> httpx.URL:
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


# Secrets, and signatures according to Standard Webhooks.

SECRET_PREFIX = "whsec_"  # noqa: S105 - the specification's
SECRET_BYTES = 32


def signing_secrets(subscription: Subscription, now_s: float) -> list[str]:
    """Return the secrets that sign now, newest first."""
    return [*subscription.secrets, *(old.secret for old in subscription.retiring if old.until_s > now_s)]


def rotated(subscription: Subscription, secret: str, until_s: float) -> Subscription:
    """Return the subscription with a new secret; its previous one also signs until ``until_s``."""
    old = [Retiring(former, until_s) for former in subscription.secrets]
    return replace(subscription, secrets=[secret], retiring=[*old, *subscription.retiring])


def without_expired(subscription: Subscription, now_s: float, overlap_s: float) -> Subscription:
    """Return the subscription without expired secrets; the same object if there are none.

    Former secrets in records from before secrets had an end stay for ``overlap_s`` from now.
    """
    former = [Retiring(secret, now_s + overlap_s) for secret in subscription.secrets[1:]]
    valid = [old for old in subscription.retiring if old.until_s > now_s]
    if not former and len(valid) == len(subscription.retiring):
        return subscription
    return replace(subscription, secrets=subscription.secrets[:1], retiring=[*former, *valid])


def signature_headers(message_id: str, body: bytes, signing: Sequence[str], now_s: float) -> dict[str, str]:
    """Return the Standard Webhooks headers, with one signature for each secret."""
    moment = datetime.fromtimestamp(int(now_s), UTC)
    text = body.decode()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(int(now_s)),
        "webhook-signature": " ".join(Signer(secret).sign(message_id, moment, text) for secret in signing),
    }


def new_secret() -> str:
    """Return a fresh signing secret."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def check_secret(secret: str) -> None:
    """Raise ValueError, without repeating the text, unless it is a usable signing secret."""
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except ValueError:
        key = b""
    if not secret.startswith(SECRET_PREFIX) or not 24 <= len(key) <= 64:
        raise ValueError("the secret must be whsec_ and the base64 of 24 to 64 random bytes")


# Limits on requests to one host and port, however many subscriptions send there.


@dataclass(slots=True)
class _Lane:
    room: asyncio.Semaphore
    users: int = 0  # in flight or waiting


class Targets:
    """Grants turns. Waiting for one target does not delay requests to another. On one event loop only."""

    def __init__(
        self, settings: WebhookSettings, clock: Clock, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._lanes: dict[str, _Lane] = {}  # only those in use
        self._rates = Rates()

    @asynccontextmanager
    async def turn(self, url: str, urgent: bool = False) -> AsyncIterator[None]:
        """Wait until the URL's target has room and its rate limit allows a request; first come, first served.

        Urgent requests have their own places and rate, so that others never delay them.
        """
        target = f"{target_of(url)} urgent" if urgent else target_of(url)
        lane = self._lanes.setdefault(target, _Lane(asyncio.Semaphore(self._settings.target_concurrency)))
        lane.users += 1
        try:
            async with lane.room:
                while (wait_s := self._take(target)) > 0.0:
                    await self._sleep(wait_s)
                yield
        finally:
            lane.users -= 1
            if not lane.users:
                del self._lanes[target]

    def _take(self, target: str) -> float:
        settings = self._settings
        now_s = self._clock.monotonic_s()
        return self._rates.count_request(target, settings.target_requests_per_s, settings.target_burst, now_s)


def target_of(url: str) -> str:
    """Return the host and port of a URL in normalized form."""
    parsed = httpx.URL(url)
    port = parsed.port or (443 if parsed.scheme == "https" else 80)
    return f"{parsed.host.rstrip('.').lower()}:{port}"


# The requests.

RETRY_AFTER_MAX_S = 86_400.0
_GONE = 410
_CONFLICT = 409
_RETRIABLE_4XX = frozenset({408, 429})


class Webhook:
    """A Notifier that posts each event in its subscription's format."""

    def __init__(
        self, guard: Guard, formats: Mapping[WebhookFormat, Format], client: httpx.AsyncClient | None = None
    ) -> None:
        self._guard = guard
        self._formats = formats
        self._client = client or _client()

    async def deliver(
        self, subscription: Subscription, event: OutboundEvent, now_s: float, timeout_s: float
    ) -> Receipt:
        """Return the receipt of one attempt, within ``timeout_s``."""
        message = self._formats[subscription.format].message(subscription, event, now_s)
        return await self.post(subscription, message, now_s, timeout_s)

    async def post(self, subscription: Subscription, message: Message, now_s: float, timeout_s: float) -> Receipt:
        """Post the message signed with the subscription's secrets; return its receipt, within ``timeout_s``."""
        headers = {
            "Content-Type": message.content_type,
            "User-Agent": "eagle-eye",
            **signature_headers(message.id, message.body, signing_secrets(subscription, now_s), now_s),
        }
        try:
            async with asyncio.timeout(timeout_s):
                target = await self._guard.check(message.url)
                return await self._post(target, message.body, headers, now_s)
        except TargetRefused as error:
            return Receipt(Outcome.REJECTED, error=str(error))
        except (TimeoutError, httpx.TimeoutException):
            return Receipt(Outcome.RETRY, error=f"no answer within {timeout_s:g} s")
        except (OSError, httpx.HTTPError) as error:
            # Only the type of error: its text may contain the URL or an address.
            return Receipt(Outcome.RETRY, error=type(error).__name__)

    async def close(self) -> None:
        """Release the connections."""
        await self._client.aclose()

    async def _post(self, target: Target, body: bytes, headers: dict[str, str], now_s: float) -> Receipt:
        last = len(target.addresses) - 1
        for index, address in enumerate(target.addresses):
            # Connects to the checked address; the host name is still used for Host, SNI and
            # certificate verification.
            request = self._client.build_request(
                "POST",
                target.url.copy_with(host=address),
                content=body,
                headers={**headers, "Host": target.url.netloc.decode("ascii")},
                extensions={"sni_hostname": target.url.host},
            )
            try:
                response = await self._client.send(request, stream=True)
            except httpx.ConnectError:
                if index == last:
                    raise
                continue
            # The answer's body is not needed and may be endless: it is never read.
            await response.aclose()
            said = response.headers
            return receipt(response.status_code, said.get("retry-after"), now_s, said.get(EPOCH_HEADER))
        raise httpx.ConnectError("the name has no address")


def receipt(status: int, retry_after: str | None, now_s: float, epoch: str | None = None) -> Receipt:
    """Return the meaning of an HTTP status: 2xx delivered, 410 gone, 408, 429, 3xx and 5xx retried, others failed.

    409 with ``epoch``, the header of that name, is retried: once this server's epoch is above it.
    """
    if 200 <= status < 300:
        return Receipt(Outcome.DELIVERED, status)
    if status == _GONE:
        return Receipt(Outcome.GONE, status, "the target answered 410 Gone")
    if status == _CONFLICT and (seen := epoch_seen(epoch)) is not None:
        return Receipt(Outcome.RETRY, status, f"the target has seen epoch {seen}", epoch_seen=seen)
    if 400 <= status < 500 and status not in _RETRIABLE_4XX:
        return Receipt(Outcome.REJECTED, status, f"the target answered {status}")
    error = f"the target answered {status}"
    if 300 <= status < 400:
        error += "; redirects are not followed"
    return Receipt(Outcome.RETRY, status, error, retry_after_s(retry_after, now_s))


def epoch_seen(value: str | None) -> int | None:
    """Return the epoch in the header of a refusal, None if it is none."""
    if value is None or not re.fullmatch(r"[0-9]{1,19}", value.strip(), re.ASCII):
        return None
    seen = int(value)
    return seen if 0 < seen <= EPOCH_MAX else None


def retry_after_s(value: str | None, now_s: float) -> float | None:
    """Return a Retry-After header (seconds or an HTTP date) as seconds from now, at most a day; None if unusable."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return min(float(text), RETRY_AFTER_MAX_S)
    try:
        moment = parsedate_to_datetime(text)
        at_s = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
    return min(max(at_s - now_s, 0.0), RETRY_AFTER_MAX_S)


@functools.cache
def _trusted() -> ssl.SSLContext:
    """Return the context for the authorities of the system and of certifi: to read them takes a tenth of a second."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(
        verify=_trusted(),
        # A proxy from the environment would resolve the name itself and so bypass the guard.
        trust_env=False,
        follow_redirects=False,
        timeout=None,  # noqa: S113 - deliver() limits the whole attempt
        # Connections are pooled by address, not by name: one opened for a name must not serve another.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    )
