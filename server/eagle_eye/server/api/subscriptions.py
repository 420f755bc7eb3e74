"""/api/v1/subscriptions: where events go."""

from __future__ import annotations

import asyncio
import secrets
from typing import Literal

import msgspec
from fastapi import APIRouter, Response
from msgspec.structs import replace

from eagle_eye.schema.action import EVENT_TYPES
from eagle_eye.schema.frame import NAME_CHARS_MAX
from eagle_eye.server import outbound
from eagle_eye.server.api import views
from eagle_eye.server.api.requests import (
    Body,
    Cursor,
    Limit,
    Operator,
    Parts,
    Reader,
    answer,
    audited,
    body_of,
    decoded,
    found,
    listing,
    missing,
)
from eagle_eye.server.errors import IllegalTransition, Refusal
from eagle_eye.server.notifiers import webhook
from eagle_eye.server.records import Subscription
from eagle_eye.server.services import Services
from eagle_eye.server.store import SUBSCRIPTIONS, Change, Store

JOBS_MAX = 1_000
RESOLVE_S = 10.0

router = APIRouter(prefix="/api/v1/subscriptions", tags=["subscriptions"])


class NewSubscription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``types`` and ``jobs`` filter, empty means all (heartbeats only by name). ``secret`` "": the server makes one."""

    url: str
    types: list[str] = []
    jobs: list[str] = []
    format: Literal["cloudevents"] = "cloudevents"
    secret: str = ""


@router.get("")
def list_subscriptions(parts: Parts, _: Reader, cursor: Cursor = None, limit: Limit = 100) -> Response:
    """Subscriptions, newest first, ended ones too; ``secrets`` is how many sign."""
    return listing(parts.store.page(SUBSCRIPTIONS, {}, cursor, limit), views.subscription)


@router.get("/{subscription}")
def get_subscription(parts: Parts, _: Reader, subscription: str) -> Response:
    """One subscription."""
    return answer(views.subscription(found(parts, SUBSCRIPTIONS, subscription)))


@router.post("", status_code=201, openapi_extra=body_of(NewSubscription))
async def subscribe(parts: Parts, principal: Operator, body: Body) -> Response:
    """Make a subscription. The answer holds the signing secret, this once."""
    wanted = decoded(body, NewSubscription)
    _check_filters(wanted)
    await _check_url(parts, wanted.url)
    try:
        secret = wanted.secret or webhook.new_secret()
        webhook.check_secret(secret)
    except ValueError as error:
        raise Refusal(400, "secret", str(error)) from None
    record = Subscription(
        id=f"sub-{secrets.token_hex(6)}",
        url=wanted.url,
        format=wanted.format,
        types=wanted.types,
        jobs=wanted.jobs,
        secrets=[secret],
        active=True,
        created_s=parts.clock.now_s(),
    )

    def made(store: Store) -> Change:
        limit = parts.config.webhooks.subscriptions_max
        if sum(known.active for known in store.all(SUBSCRIPTIONS)) >= limit:
            raise Refusal(
                409, "limit", f"{limit} subscriptions are active, which is the most (webhooks.subscriptions_max)"
            )
        return Change(subscriptions=(record,), audit=(audited(parts, principal, "subscribe", record.id, wanted.url),))

    await asyncio.to_thread(parts.store.update, made)
    return answer({**views.subscription(record), "secret": secret}, 201)


@router.delete("/{subscription}", status_code=204)
def unsubscribe(parts: Parts, principal: Operator, subscription: str) -> Response:
    """End the subscription; what was not delivered fails. Its past deliveries stay listed."""

    def ended(store: Store) -> Change:
        old = _subscription(store, subscription)
        if not old.active:
            return Change()
        new = replace(old, active=False, ended_reason="deleted", secrets=[])
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

    change = parts.store.update(pinged)
    return answer({"event_id": change.events[0].id}, 202)


@router.post("/{subscription}/rotate")
def rotate(parts: Parts, principal: Operator, subscription: str) -> Response:
    """Make a new secret, shown this once. Both sign until the next rotation, so that a receiver can follow."""
    secret = webhook.new_secret()

    def rotated(store: Store) -> Change:
        old = _active(store, subscription)
        new = replace(old, secrets=[secret, *old.secrets[:1]])
        return Change(subscriptions=(new,), audit=(audited(parts, principal, "rotate", subscription),))

    change = parts.store.update(rotated)
    return answer({**views.subscription(change.subscriptions[0]), "secret": secret})


def _check_filters(wanted: NewSubscription) -> None:
    for name in wanted.types:
        if name not in EVENT_TYPES:
            raise Refusal(400, "types", f"type {name[:80]!r} is unknown; expected some of {', '.join(EVENT_TYPES)}")
    if len(wanted.jobs) > JOBS_MAX or any(not 0 < len(job) <= NAME_CHARS_MAX for job in wanted.jobs):
        raise Refusal(
            400, "jobs", f"jobs may hold {JOBS_MAX} names of 1 to {NAME_CHARS_MAX} characters; leave it out for all"
        )


async def _check_url(parts: Services, url: str) -> None:
    try:
        async with asyncio.timeout(RESOLVE_S):
            await parts.guard.check(url)
    except (OSError, UnicodeError):
        # TimeoutError is an OSError: the name server did not answer either.
        raise Refusal(400, "target", "the URL's host does not resolve; check its name") from None


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
