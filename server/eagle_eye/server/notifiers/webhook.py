"""Deliveries over HTTP: CloudEvents 1.0 in structured mode, signed by the Standard Webhooks specification."""

from __future__ import annotations

import asyncio
import base64
import secrets
import ssl
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import certifi
import httpx
import msgspec
from standardwebhooks import Webhook as Signer

from eagle_eye.server.errors import TargetRefused
from eagle_eye.server.notifiers.guard import Guard, Target
from eagle_eye.server.notifiers.receipts import Outcome, Receipt
from eagle_eye.server.records import OutboundEvent, Subscription
from eagle_eye.server.timestamps import rfc3339

CONTENT_TYPE = "application/cloudevents+json"
SECRET_PREFIX = "whsec_"  # noqa: S105 - the specification's
SECRET_BYTES = 32
RETRY_AFTER_MAX_S = 86_400.0
_GONE = 410
_RETRIABLE_4XX = frozenset({408, 429})


class Webhook:
    """A Notifier for subscriptions of format "cloudevents". ``source`` names this server in every event."""

    def __init__(self, guard: Guard, source: str, client: httpx.AsyncClient | None = None) -> None:
        self._guard = guard
        self._source = source
        self._client = client or _client()

    async def deliver(
        self, subscription: Subscription, event: OutboundEvent, now_s: float, timeout_s: float
    ) -> Receipt:
        """Return what came of one attempt, within ``timeout_s``."""
        body = envelope(event, self._source)
        headers = {
            "Content-Type": CONTENT_TYPE,
            "User-Agent": "eagle-eye",
            **signature_headers(event.id, body, subscription.secrets, now_s),
        }
        try:
            async with asyncio.timeout(timeout_s):
                target = await self._guard.check(subscription.url)
                return await self._post(target, body, headers, now_s)
        except TargetRefused as error:
            return Receipt(Outcome.REJECTED, error=str(error))
        except (TimeoutError, httpx.TimeoutException):
            return Receipt(Outcome.RETRY, error=f"no answer within {timeout_s:g} s")
        except (OSError, httpx.HTTPError) as error:
            # Only the kind of error: its text may hold the URL or an address.
            return Receipt(Outcome.RETRY, error=type(error).__name__)

    async def close(self) -> None:
        """Release the connections."""
        await self._client.aclose()

    async def _post(self, target: Target, body: bytes, headers: dict[str, str], now_s: float) -> Receipt:
        last = len(target.addresses) - 1
        for index, address in enumerate(target.addresses):
            # The address that was checked is the one connected to; the name still goes into Host, SNI and
            # the certificate's check.
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
            # The answer's body is of no use to us and may be endless: it is never read.
            await response.aclose()
            return receipt(response.status_code, response.headers.get("retry-after"), now_s)
        raise httpx.ConnectError("the name has no address")


def receipt(status: int, retry_after: str | None, now_s: float) -> Receipt:
    """Return what an HTTP status means: 2xx has it, 410 wants no more, 408, 429, 3xx and 5xx are tried again."""
    if 200 <= status < 300:
        return Receipt(Outcome.DELIVERED, status)
    if status == _GONE:
        return Receipt(Outcome.GONE, status, "the target answered 410 Gone")
    if 400 <= status < 500 and status not in _RETRIABLE_4XX:
        return Receipt(Outcome.REJECTED, status, f"the target answered {status}")
    error = f"the target answered {status}"
    if 300 <= status < 400:
        error += "; redirects are not followed"
    return Receipt(Outcome.RETRY, status, error, retry_after_s(retry_after, now_s))


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


def envelope(event: OutboundEvent, source: str) -> bytes:
    """Return the event as a CloudEvent in structured JSON; the same bytes at every attempt."""
    return msgspec.json.encode(
        {
            "specversion": "1.0",
            "id": event.id,
            "source": source,
            "type": event.type,
            "subject": event.subject,
            "time": rfc3339(event.time_s),
            "datacontenttype": "application/json",
            "data": event.data,
        }
    )


def signature_headers(event_id: str, body: bytes, signing_secrets: list[str], now_s: float) -> dict[str, str]:
    """Return the Standard Webhooks headers, with one signature for each secret."""
    moment = datetime.fromtimestamp(int(now_s), UTC)
    text = body.decode()
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(int(now_s)),
        "webhook-signature": " ".join(Signer(secret).sign(event_id, moment, text) for secret in signing_secrets),
    }


def new_secret() -> str:
    """Return a fresh signing secret."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def check_secret(secret: str) -> None:
    """Return if the text is a usable signing secret. Raises ValueError without repeating it."""
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except ValueError:
        key = b""
    if not secret.startswith(SECRET_PREFIX) or not 24 <= len(key) <= 64:
        raise ValueError("the secret must be whsec_ and the base64 of 24 to 64 random bytes")


def _client() -> httpx.AsyncClient:
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return httpx.AsyncClient(
        verify=context,
        # A proxy from the environment would resolve the name itself and so bypass the guard.
        trust_env=False,
        follow_redirects=False,
        timeout=None,  # noqa: S113 - deliver() limits the whole attempt
        # Connections are kept by address, not by name: one opened for a name must not serve another.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    )
