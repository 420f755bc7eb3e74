"""State transitions of a delivery and of its subscription's health after an attempt. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from eagle_eye.schema.backoff import doubled_s
from eagle_eye.server.delivery.notifiers.receipts import Outcome, Receipt
from eagle_eye.server.delivery.settings import WebhookSettings
from eagle_eye.server.model.errors import IllegalTransition
from eagle_eye.server.model.records import Delivery, SubscriptionHealth


def after(delivery: Delivery, receipt: Receipt, now_s: float, settings: WebhookSettings, jitter: float) -> Delivery:
    """Return the delivery after an attempt: delivered, failed, or due again.

    The delay is ``jitter`` (0 to 1) times the doubling backoff, but never less than the target asked for. It does not
    extend past the event's expiry, at which the delivery is voided.
    """
    tried = replace(
        delivery,
        attempts=delivery.attempts + 1,
        last_status=receipt.status,
        last_error=receipt.error,
        reason="",
        updated_s=now_s,
    )
    if receipt.outcome is Outcome.DELIVERED:
        return replace(tried, state="delivered")
    if receipt.outcome is not Outcome.RETRY:
        return replace(tried, state="failed", reason=receipt.outcome.value)
    if tried.attempts >= settings.attempts_max:
        return failed(tried, "attempts", f"gave up after {tried.attempts} attempts: {receipt.error}", now_s)
    ceiling_s = doubled_s(settings.backoff_base_s, settings.backoff_max_s, tried.attempts)
    delay_s = max(jitter * ceiling_s, receipt.retry_after_s or 0.0)
    due_s = now_s + delay_s
    return replace(tried, due_s=due_s if delivery.expires_s is None else min(due_s, delivery.expires_s))


def again(delivery: Delivery, now_s: float) -> Delivery:
    """Return the delivery as due now, keeping its earlier attempts. Raises IllegalTransition for a stale event."""
    if delivery.expires_s is not None and delivery.expires_s <= now_s:
        raise IllegalTransition(f"delivery {delivery.id} is of an event past its expiry; stale events are not sent")
    return replace(delivery, state="pending", attempts=0, due_s=now_s, last_error="", reason="", updated_s=now_s)


def fared(health: SubscriptionHealth, receipt: Receipt, now_s: float) -> SubscriptionHealth:
    """Return a subscription's health after one more attempt."""
    if receipt.outcome is Outcome.DELIVERED:
        return SubscriptionHealth(subscription_id=health.subscription_id, delivered_s=now_s, last_status=receipt.status)
    return replace(
        health,
        failures=health.failures + 1,
        failing_since_s=now_s if health.failing_since_s is None else health.failing_since_s,
        last_status=receipt.status,
        last_error=receipt.error,
    )


def hopeless(health: SubscriptionHealth, now_s: float, limit_s: float) -> bool:
    """Return whether all attempts over at least ``limit_s`` have failed; ``limit_s`` 0: never."""
    since_s = health.failing_since_s
    return limit_s > 0.0 and since_s is not None and now_s - since_s >= limit_s


def failed(delivery: Delivery, reason: str, error: str, now_s: float) -> Delivery:
    """Return the delivery as given up; ``reason`` is one stable word, ``error`` a sentence."""
    return replace(delivery, state="failed", reason=reason, last_error=error, updated_s=now_s)


def silenced(delivery: Delivery, why: str, now_s: float) -> Delivery:
    """Return the delivery as withheld by a silence; ``why`` says which."""
    return replace(delivery, state="silenced", last_error=why, updated_s=now_s)


def expired(delivery: Delivery, error: str, now_s: float) -> Delivery:
    """Return the delivery as void; ``error`` says why."""
    return replace(delivery, state="expired", reason="expired", last_error=error, updated_s=now_s)
