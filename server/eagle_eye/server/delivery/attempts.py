"""One attempt at a delivery: the settings, what is posted, what came of it, and what follows from that. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from eagle_eye.schema.backoff import doubled_s
from eagle_eye.server.model import Count, NotNegative, Positive
from eagle_eye.server.model.errors import IllegalTransition
from eagle_eye.server.model.records import Delivery, OutboundEvent, Subscription, SubscriptionHealth
from eagle_eye.server.store.store import Due


class WebhookSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How deliveries are attempted. Delays double from ``backoff_base_s`` to ``backoff_max_s``, with full jitter."""

    allow_private: bool = False  # whether targets may be loopback, private or link-local addresses
    timeout_s: Positive = 10.0  # for one attempt, from connecting to the end of the answer
    attempts_max: Count = 20
    backoff_base_s: Positive = 1.0
    backoff_max_s: Positive = 3600.0
    heartbeat_s: NotNegative = 60.0  # 0: no heartbeat
    concurrency_per_subscription: Count = 16  # in flight; four more are kept for actions
    target_concurrency: Count = 32  # in flight to one host and port; one subscription takes half
    target_requests_per_s: Positive = 50.0  # likewise
    target_burst: Count = 100  # requests allowed at once after an idle time
    pending_max: Count = 10_000  # per subscription; beyond it the oldest fail with "backlog"
    subscriptions_max: Count = 100
    rotation_overlap_s: NotNegative = 86_400.0  # how long a replaced secret still signs
    disable_after_s: NotNegative = 0.0  # a subscription with nothing delivered for this long ends; 0: never
    alert_refresh_s: Annotated[float, Meta(ge=1, le=3_600)] = 60.0  # how often an Alertmanager gets firing alerts again
    runbook_url: str = ""  # the runbook_url of alerts, "{fault}" is replaced; "": none


class Message(NamedTuple):
    """One request. ``id`` is the same at every attempt, so that the target can recognise repetitions."""

    id: str
    url: str
    content_type: str
    body: bytes


class Format(Protocol):
    """Turns an event into a request. Pure: the same arguments give the same message."""

    def message(self, subscription: Subscription, event: OutboundEvent, now_s: float) -> Message:
        """Return what to post. ``event`` is of one of the types that the format supports (``filters.types_of``)."""
        ...


class Outcome(str, Enum):
    """Whether the target received the event, and if not, whether a retry could help."""

    DELIVERED = "delivered"
    RETRY = "retry"
    REJECTED = "rejected"
    GONE = "gone"  # the target wants no further events


class Receipt(NamedTuple):
    """``status`` is the HTTP status, None without an answer; ``error`` never contains the URL or a secret.

    ``retry_after_s`` is how long the target asked for no requests, None if it did not. ``epoch_seen`` is the epoch that
    it has seen where it refuses a lower one.
    """

    outcome: Outcome
    status: int | None = None
    error: str = ""
    retry_after_s: float | None = None
    epoch_seen: int | None = None


class Notifier(Protocol):
    """Makes one attempt. It does not retry, log or count; the outbox does."""

    async def deliver(
        self, subscription: Subscription, event: OutboundEvent, now_s: float, timeout_s: float
    ) -> Receipt:
        """Return the receipt of one attempt, within ``timeout_s``."""
        ...

    async def post(self, subscription: Subscription, message: Message, now_s: float, timeout_s: float) -> Receipt:
        """Post a message that is not an event; return its receipt, within ``timeout_s``."""
        ...


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


ACTION_PLACES = 4  # reserved for requests to act, beside webhooks.concurrency_per_subscription


class InFlight:
    """Deliveries in flight to one subscription: at most ``usual``, and ``ACTION_PLACES`` more of urgent ones.

    One that hangs occupies its place and delays its incident's later events; nothing else waits for it.
    """

    def __init__(self, usual: int) -> None:
        self._usual = usual
        self._under_way: dict[str, Due] = {}
        self._ended: set[str] = set()
        self._refreshed: frozenset[str] = frozenset()
        self.refreshing = False

    @property
    def busy(self) -> bool:
        """Whether any delivery or refresh is in flight."""
        return self.refreshing or bool(self._under_way)

    @property
    def groups(self) -> frozenset[str]:
        """The incidents that have a delivery in flight."""
        return frozenset(due.delivery.group for due in self._under_way.values())

    @property
    def ask_max(self) -> int:
        """How many due deliveries to fetch, so that those in flight or waiting hide no others."""
        return len(self._under_way) + len(self._refreshed) + self._usual + ACTION_PLACES

    def start(self, due: Sequence[Due]) -> list[Due]:
        """Return those of the due deliveries, urgent ones first, that start now; they are in flight from here on."""
        started = []
        for one in sorted(due, key=lambda one: not one.urgent):
            if one.delivery.id in self._under_way or one.delivery.group in self._refreshed:
                continue
            if self._room(one.urgent):
                self._under_way[one.delivery.id] = one
                started.append(one)
        return started

    def end(self, delivery_id: str) -> None:
        """Record that an attempt is over; its place is free after the next ``clear_ended``."""
        self._ended.add(delivery_id)

    def clear_ended(self) -> None:
        """Free the places of attempts that are over.

        Call it before querying the store for due deliveries: an attempt that ends between query and answer is still
        pending in the answer, and would be made twice.
        """
        for delivery_id in self._ended:
            del self._under_way[delivery_id]
        self._ended.clear()

    def start_refresh(self, incidents: Iterable[str]) -> None:
        """Hold back deliveries of these incidents until ``end_refresh``: the refresh must not undo them."""
        self.refreshing = True
        self._refreshed = frozenset(incidents)

    def end_refresh(self) -> None:
        """Release the deliveries that the refresh held back."""
        self.refreshing = False
        self._refreshed = frozenset()

    def _room(self, urgent: bool) -> bool:
        if len(self._under_way) >= self._usual + ACTION_PLACES:
            return False
        return urgent or sum(not due.urgent for due in self._under_way.values()) < self._usual
