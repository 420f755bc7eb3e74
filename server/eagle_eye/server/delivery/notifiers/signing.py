"""Webhook secrets, and signatures according to Standard Webhooks."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime

from msgspec.structs import replace
from standardwebhooks import Webhook as Signer

from eagle_eye.server.model.records import Retiring, Subscription

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
