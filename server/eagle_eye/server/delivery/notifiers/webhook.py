"""Posts messages over HTTP: signed, to checked addresses only, with a receipt for each attempt."""

from __future__ import annotations

import asyncio
import functools
import re
import ssl
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime

import certifi
import httpx

from eagle_eye.schema.action import EPOCH_HEADER, EPOCH_MAX
from eagle_eye.server.delivery.notifiers.guard import Guard, Target
from eagle_eye.server.delivery.notifiers.message import Format, Message
from eagle_eye.server.delivery.notifiers.receipts import Outcome, Receipt
from eagle_eye.server.delivery.notifiers.signing import signature_headers, signing_secrets
from eagle_eye.server.model.errors import TargetRefused
from eagle_eye.server.model.records import OutboundEvent, Subscription, WebhookFormat

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
