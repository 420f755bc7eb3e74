"""/api/v1/subscriptions: destinations of events."""

from __future__ import annotations

import asyncio
import secrets
from typing import Annotated, Protocol

import msgspec
from fastapi import APIRouter, Depends, Response
from msgspec.structs import replace

from eagle_eye.schema.times import unix_seconds
from eagle_eye.server.api import views
from eagle_eye.server.api.constraints import TIME
from eagle_eye.server.api.requests import (
    Body,
    Cursor,
    Limit,
    Operator,
    Reader,
    answer,
    audited,
    body_of,
    decoded,
    found,
    missing,
    services,
)
from eagle_eye.server.api.subscription_bodies import (
    CHANGING,
    ROTATING,
    SIGNING_MAX,
    SUBSCRIBING,
    NewSubscription,
    Redelivery,
    Rotation,
    SubscriptionChange,
    check_filters,
    check_overlap,
    usable_secret,
)
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.delivery import events as outbound
from eagle_eye.server.delivery.delivery_states import again
from eagle_eye.server.delivery.notifiers import signing
from eagle_eye.server.delivery.notifiers.guard import Guard
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import IllegalTransition, Refusal
from eagle_eye.server.model.records import Subscription, SubscriptionHealth
from eagle_eye.server.model.timestamps import rfc3339
from eagle_eye.server.store.store import SUBSCRIPTION_HEALTH, SUBSCRIPTIONS, Change, Store

RESOLVE_S = 10.0
PAUSED = "paused"
REDELIVER_MAX = 1_000  # at a time

router = APIRouter(prefix="/api/v1/subscriptions", tags=["subscriptions"])


class Needs(Protocol):
    """The server's components that this module uses."""

    clock: Clock
    config: ServerConfig
    guard: Guard
    store: Store


Parts = Annotated[Needs, Depends(services)]


@router.get("")
def list_subscriptions(parts: Parts, _: Reader, cursor: Cursor = None, limit: Limit = 100) -> Response:
    """Subscriptions, newest first, ended ones too; ``secrets`` is how many sign, ``health`` how deliveries fare."""
    page = parts.store.page(SUBSCRIPTIONS, {}, cursor, limit)
    pending = _pending(parts)
    return answer({"items": [_shown(parts, record, pending) for record in page.items], "next": page.next})


@router.get("/{subscription}")
def get_subscription(parts: Parts, _: Reader, subscription: str) -> Response:
    """One subscription."""
    return answer(_shown(parts, found(parts, SUBSCRIPTIONS, subscription), _pending(parts)))


@router.post("", status_code=201, openapi_extra=body_of(NewSubscription, SUBSCRIBING))
async def subscribe(parts: Parts, principal: Operator, body: Body) -> Response:
    """Make a subscription. The answer holds the signing secret, this once.

    Who sends a secret of his own may repeat the request: an active subscription that is the same in all is answered.
    """
    wanted = decoded(body, NewSubscription)
    record = Subscription(
        id=f"sub-{secrets.token_hex(6)}",
        url=wanted.url,
        format=wanted.format,
        types=wanted.types,
        jobs=wanted.jobs,
        faults=wanted.faults,
        matchers=wanted.matchers,
        secrets=[],
        active=True,
        created_s=parts.clock.now_s(),
    )
    check_filters(record)
    await _check_url(parts, wanted.url)
    record = replace(record, secrets=[usable_secret(wanted.secret)])

    def made(store: Store) -> Change:
        active = [known for known in store.all(SUBSCRIPTIONS) if known.active]
        same = [one for one in active if replace(one, id=record.id, created_s=record.created_s, retiring=[]) == record]
        if wanted.secret and same:
            return Change(subscriptions=(same[0],))
        _check_room(parts, len(active))
        return Change(subscriptions=(record,), audit=(audited(parts, principal, "subscribe", record.id, wanted.url),))

    change = await asyncio.to_thread(parts.store.update, made)
    made_or_known = change.subscriptions[0]
    return answer({**_shown(parts, made_or_known, _pending(parts)), "secret": record.secrets[0]}, 201)


@router.patch("/{subscription}", openapi_extra=body_of(SubscriptionChange, CHANGING, required=False))
async def change(parts: Parts, principal: Operator, subscription: str, body: Body) -> Response:
    """Change where events go or which, pause or go on. What waits goes to the new URL; pausing fails it.

    Filters count for later events; an incident that was reported already is reported to its end. 409 for a
    subscription that was deleted.
    """
    wanted = decoded(body, SubscriptionChange)
    given = {name: value for name, value in msgspec.structs.asdict(wanted).items() if value is not msgspec.UNSET}
    if isinstance(wanted.url, str):
        await _check_url(parts, wanted.url)

    def changed(store: Store) -> Change:
        old = _not_deleted(store, subscription)
        new = replace(old, **given)
        health: tuple[SubscriptionHealth, ...] = ()
        if new.active and not old.active:
            _check_room(parts, sum(known.active for known in store.all(SUBSCRIPTIONS)))
            new = replace(new, ended_reason="")
            fared = store.get(SUBSCRIPTION_HEALTH, old.id) or SubscriptionHealth(subscription_id=old.id)
            health = (replace(fared, failures=0, failing_since_s=None),)
        elif old.active and not new.active:
            new = replace(new, ended_reason=PAUSED)
        check_filters(new)
        if new == old:
            return Change()
        entry = audited(parts, principal, "change subscription", subscription, ", ".join(sorted(given)))
        return Change(subscriptions=(new,), subscription_health=health, audit=(entry,))

    await asyncio.to_thread(parts.store.update, changed)
    return answer(_shown(parts, found(parts, SUBSCRIPTIONS, subscription), _pending(parts)))


@router.delete("/{subscription}", status_code=204)
def unsubscribe(parts: Parts, principal: Operator, subscription: str) -> Response:
    """End the subscription; what was not delivered fails. Its past deliveries stay listed."""

    def ended(store: Store) -> Change:
        old = _subscription(store, subscription)
        if not old.active and not old.secrets:
            return Change()
        reason = "deleted" if old.active else old.ended_reason
        new = replace(old, active=False, ended_reason=reason, secrets=[], retiring=[])
        return Change(subscriptions=(new,), audit=(audited(parts, principal, "unsubscribe", subscription),))

    parts.store.update(ended)
    return Response(status_code=204)


@router.post("/{subscription}/ping", status_code=202)
def ping(parts: Parts, principal: Operator, subscription: str) -> Response:
    """Send the subscription a ping; its id comes back, GET /api/v1/deliveries?event=ID tells what became of it."""
    nonce = secrets.token_hex(8)

    def pinged(store: Store) -> Change:
        old = _active(store, subscription)
        event = outbound.ping(old, nonce, parts.clock.now_s())
        return Change(events=(event,), audit=(audited(parts, principal, "ping", subscription),))

    done = parts.store.update(pinged)
    return answer({"event_id": done.events[0].id}, 202)


@router.post("/{subscription}/rotate", openapi_extra=body_of(Rotation, ROTATING, required=False))
def rotate(parts: Parts, principal: Operator, subscription: str, body: Body) -> Response:
    """Have a new secret, shown this once. The one before signs too until ``overlap_seconds`` are over.

    Who sends a secret of his own may repeat the request. 409 when so many secrets sign already.
    """
    wanted = decoded(body, Rotation)
    secret = usable_secret(wanted.secret)
    seconds = wanted.overlap_seconds
    overlap_s = parts.config.webhooks.rotation_overlap_s if seconds is None else check_overlap(seconds)

    def rotated(store: Store) -> Change:
        now_s = parts.clock.now_s()
        old = _active(store, subscription)
        if old.secrets[:1] == [secret]:
            return Change(subscriptions=(old,))
        new = signing.without_expired(signing.rotated(old, secret, now_s + overlap_s), now_s, overlap_s)
        if len(signing.signing_secrets(new, now_s)) > SIGNING_MAX:
            raise Refusal(
                409, "limit", f"{SIGNING_MAX} secrets would sign beside the new one; wait until one ends (retiring)"
            )
        return Change(subscriptions=(new,), audit=(audited(parts, principal, "rotate", subscription),))

    done = parts.store.update(rotated)
    return answer({**_shown(parts, done.subscriptions[0], _pending(parts)), "secret": secret})


@router.post("/{subscription}/redeliver", openapi_extra=body_of(Redelivery, {"since": TIME}))
def redeliver(parts: Parts, principal: Operator, subscription: str, body: Body) -> Response:
    """Deliver again what failed of the events since a time, oldest first; at most 1000 (``more``: ask again).

    Events that have expired are not sent any more.
    """
    try:
        since_s = unix_seconds(decoded(body, Redelivery).since)
    except ValueError as error:
        raise Refusal(400, "time", f"since: {error}") from None
    more = False

    def redelivered(store: Store) -> Change:
        nonlocal more
        _active(store, subscription)
        now_s = parts.clock.now_s()
        failed = store.failed_deliveries(subscription, since_s, now_s, REDELIVER_MAX + 1)
        more = len(failed) > REDELIVER_MAX
        due = tuple(again(one, now_s) for one in failed[:REDELIVER_MAX])
        entry = audited(parts, principal, "redeliver", subscription, f"{len(due)} since {rfc3339(since_s)}")
        return Change(deliveries=due, audit=(entry,) if due else ())

    done = parts.store.update(redelivered)
    return answer({"redelivered": len(done.deliveries), "more": more})


async def _check_url(parts: Needs, url: str) -> None:
    try:
        async with asyncio.timeout(RESOLVE_S):
            await parts.guard.check(url)
    except (OSError, UnicodeError):
        # TimeoutError is an OSError: the name server did not answer either.
        raise Refusal(400, "target", "the URL's host does not resolve; check its name") from None


def _check_room(parts: Needs, active: int) -> None:
    limit = parts.config.webhooks.subscriptions_max
    if active >= limit:
        raise Refusal(409, "limit", f"{limit} subscriptions are active, which is the most (webhooks.subscriptions_max)")


def _shown(parts: Needs, record: Subscription, pending: dict[str, int]) -> dict[str, object]:
    health = parts.store.get(SUBSCRIPTION_HEALTH, record.id) or SubscriptionHealth(subscription_id=record.id)
    return {
        **views.subscription(record),
        "health": {**views.subscription_health(health), "pending": pending.get(record.id, 0)},
    }


def _pending(parts: Needs) -> dict[str, int]:
    return {backlog.subscription_id: backlog.pending for backlog in parts.store.backlog()}


def _subscription(store: Store, key: str) -> Subscription:
    record = store.get(SUBSCRIPTIONS, key)
    if record is None:
        raise missing("subscriptions", key)
    return record


def _active(store: Store, key: str) -> Subscription:
    record = _subscription(store, key)
    if not record.active:
        raise IllegalTransition(f"subscription {key} has ended ({record.ended_reason}); make a new one")
    return record


def _not_deleted(store: Store, key: str) -> Subscription:
    record = _subscription(store, key)
    if not record.secrets:
        raise IllegalTransition(f"subscription {key} was deleted and has no secret any more; make a new one")
    return record
