"""/api/v1/subscriptions, /api/v1/deliveries and /api/v1/events: events, their destinations and deliveries."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Protocol

import msgspec
from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from eagle_eye.schema.names import NAME_CHARS_MAX
from eagle_eye.schema.times import unix_seconds
from eagle_eye.server.api import views
from eagle_eye.server.api.requests import (
    EVENT_TYPE,
    SECRET,
    TIME,
    WEBHOOK_URL,
    Body,
    Constraint,
    Cursor,
    EventType,
    Limit,
    OpenStreams,
    Operator,
    Reader,
    answer,
    audited,
    body_of,
    decoded,
    found,
    given,
    list_of,
    listing,
    matcher,
    missing,
    services,
)
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.delivery import events as outbound
from eagle_eye.server.delivery import webhook
from eagle_eye.server.delivery.attempts import again
from eagle_eye.server.delivery.webhook import Guard
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.clock import Clock, rfc3339
from eagle_eye.server.model.errors import IllegalTransition, Refusal, StoreUnavailable
from eagle_eye.server.model.event_filters import parse_matcher, types_of
from eagle_eye.server.model.records import DeliveryState, Subscription, SubscriptionHealth, WebhookFormat
from eagle_eye.server.monitor.cells import Cells
from eagle_eye.server.monitor.watcher import Outlook
from eagle_eye.server.security.people import People
from eagle_eye.server.store.store import (
    ACTIONS,
    DELIVERIES,
    EVENTS,
    INCIDENTS,
    JOBS,
    NODES,
    SILENCES,
    SUBSCRIPTION_HEALTH,
    SUBSCRIPTIONS,
    Change,
    Changed,
    ChangeSignal,
    Store,
    wait_for_change,
)
from eagle_eye.server.telemetry.counters import Telemetry

# Bodies of requests about subscriptions, and what they may hold.

PATTERNS_MAX = 1_000  # of jobs or faults
MATCHERS_MAX = 20
MATCHER_CHARS_MAX = 500
OVERLAP_MAX_S = 30 * 86_400.0
# Constraints of the bodies, for /openapi.json.
_GLOBS = list_of({"minLength": 1, "maxLength": NAME_CHARS_MAX}, PATTERNS_MAX)
CHANGING: Mapping[str, Constraint] = MappingProxyType(
    {
        "url": WEBHOOK_URL,
        "types": {"items": EVENT_TYPE},
        "jobs": _GLOBS,
        "faults": _GLOBS,
        "matchers": list_of(matcher(MATCHER_CHARS_MAX), MATCHERS_MAX),
    }
)
SUBSCRIBING: Mapping[str, Constraint] = MappingProxyType({**CHANGING, "secret": SECRET})
ROTATING: Mapping[str, Constraint] = MappingProxyType(
    {"secret": SECRET, "overlap_seconds": {"minimum": 0, "maximum": OVERLAP_MAX_S}}
)
SIGNING_MAX = 5  # secrets that sign at a time: each adds a signature to every request


class NewSubscription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``types``, ``jobs``, ``faults`` and ``matchers`` filter, empty means all (heartbeats only by name).

    ``secret`` "": the server makes one.
    """

    url: str
    types: list[str] = []
    jobs: list[str] = []
    faults: list[str] = []
    matchers: list[str] = []
    format: WebhookFormat = "cloudevents"
    secret: str = ""


class SubscriptionChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is left out stays. ``active`` false pauses the subscription, true has it go on."""

    url: str | UnsetType = UNSET
    types: list[str] | UnsetType = UNSET
    jobs: list[str] | UnsetType = UNSET
    faults: list[str] | UnsetType = UNSET
    matchers: list[str] | UnsetType = UNSET
    active: bool | UnsetType = UNSET


class Rotation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``secret`` "": the server makes one. ``overlap_seconds`` None: ``webhooks.rotation_overlap_s``; 0: none."""

    secret: str = ""
    overlap_seconds: float | None = None


class Redelivery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``since``: RFC 3339 or Unix seconds; what failed of the events from then on is delivered again."""

    since: str


def check_filters(subscription: Subscription) -> None:
    """Raise Refusal 400, naming the field and what was expected, unless the filters are usable."""
    known = types_of(subscription.format)
    for name in subscription.types:
        if name not in known:
            raise Refusal(
                400,
                "types",
                f"type {name[:80]!r} is not for format {subscription.format}; expected some of {', '.join(known)}",
            )
    _check_patterns("jobs", subscription.jobs)
    _check_patterns("faults", subscription.faults)
    if len(subscription.matchers) > MATCHERS_MAX or any(len(m) > MATCHER_CHARS_MAX for m in subscription.matchers):
        raise Refusal(
            400,
            "matchers",
            f"matchers may hold at most {MATCHERS_MAX} entries of {MATCHER_CHARS_MAX} characters; leave it out for all",
        )
    try:
        for text in subscription.matchers:
            parse_matcher(text)
    except ValueError as error:
        raise Refusal(400, "matchers", str(error)) from None


def check_overlap(seconds: float) -> float:
    """Return the overlap in seconds. Raises Refusal 400."""
    if not 0.0 <= seconds <= OVERLAP_MAX_S:
        raise Refusal(400, "overlap", f"overlap_seconds is {seconds!r}; expected 0 to {OVERLAP_MAX_S:.0f}")
    return seconds


def usable_secret(wanted: str) -> str:
    """Return the secret, or a new one for "". Raises Refusal 400."""
    secret = wanted or webhook.new_secret()
    try:
        webhook.check_secret(secret)
    except ValueError as error:
        raise Refusal(400, "secret", str(error)) from None
    return secret


def _check_patterns(field: str, patterns: Sequence[str]) -> None:
    if len(patterns) > PATTERNS_MAX or any(not 0 < len(pattern) <= NAME_CHARS_MAX for pattern in patterns):
        raise Refusal(
            400,
            field,
            f"{field} may hold {PATTERNS_MAX} names or globs of 1 to {NAME_CHARS_MAX} characters; leave it out for all",
        )


# Subscriptions: destinations of events.

RESOLVE_S = 10.0
PAUSED = "paused"
REDELIVER_MAX = 1_000  # at a time

router = APIRouter(prefix="/api/v1/subscriptions", tags=["subscriptions"])


class SubscriptionNeeds(Protocol):
    """The server's components that the endpoints of subscriptions use."""

    clock: Clock
    config: ServerConfig
    guard: Guard
    store: Store


SubscriptionParts = Annotated[SubscriptionNeeds, Depends(services)]


@router.get("")
def list_subscriptions(parts: SubscriptionParts, _: Reader, cursor: Cursor = None, limit: Limit = 100) -> Response:
    """Subscriptions, newest first, ended ones too; ``secrets`` is how many sign, ``health`` how deliveries fare."""
    page = parts.store.page(SUBSCRIPTIONS, {}, cursor, limit)
    pending = _pending(parts)
    return answer({"items": [_shown_subscription(parts, record, pending) for record in page.items], "next": page.next})


@router.get("/{subscription}")
def get_subscription(parts: SubscriptionParts, _: Reader, subscription: str) -> Response:
    """One subscription."""
    return answer(_shown_subscription(parts, found(parts, SUBSCRIPTIONS, subscription), _pending(parts)))


@router.post("", status_code=201, openapi_extra=body_of(NewSubscription, SUBSCRIBING))
async def subscribe(parts: SubscriptionParts, principal: Operator, body: Body) -> Response:
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
    return answer({**_shown_subscription(parts, made_or_known, _pending(parts)), "secret": record.secrets[0]}, 201)


@router.patch("/{subscription}", openapi_extra=body_of(SubscriptionChange, CHANGING, required=False))
async def change(parts: SubscriptionParts, principal: Operator, subscription: str, body: Body) -> Response:
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
    return answer(_shown_subscription(parts, found(parts, SUBSCRIPTIONS, subscription), _pending(parts)))


@router.delete("/{subscription}", status_code=204)
def unsubscribe(parts: SubscriptionParts, principal: Operator, subscription: str) -> Response:
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
def ping(parts: SubscriptionParts, principal: Operator, subscription: str) -> Response:
    """Send the subscription a ping; its id comes back, GET /api/v1/deliveries?event=ID tells what became of it."""
    nonce = secrets.token_hex(8)

    def pinged(store: Store) -> Change:
        old = _active(store, subscription)
        event = outbound.ping(old, nonce, parts.clock.now_s())
        return Change(events=(event,), audit=(audited(parts, principal, "ping", subscription),))

    done = parts.store.update(pinged)
    return answer({"event_id": done.events[0].id}, 202)


@router.post("/{subscription}/rotate", openapi_extra=body_of(Rotation, ROTATING, required=False))
def rotate(parts: SubscriptionParts, principal: Operator, subscription: str, body: Body) -> Response:
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
        new = webhook.without_expired(webhook.rotated(old, secret, now_s + overlap_s), now_s, overlap_s)
        if len(webhook.signing_secrets(new, now_s)) > SIGNING_MAX:
            raise Refusal(
                409, "limit", f"{SIGNING_MAX} secrets would sign beside the new one; wait until one ends (retiring)"
            )
        return Change(subscriptions=(new,), audit=(audited(parts, principal, "rotate", subscription),))

    done = parts.store.update(rotated)
    return answer({**_shown_subscription(parts, done.subscriptions[0], _pending(parts)), "secret": secret})


@router.post("/{subscription}/redeliver", name="redeliver", openapi_extra=body_of(Redelivery, {"since": TIME}))
def redeliver_failed(parts: SubscriptionParts, principal: Operator, subscription: str, body: Body) -> Response:
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


async def _check_url(parts: SubscriptionNeeds, url: str) -> None:
    try:
        async with asyncio.timeout(RESOLVE_S):
            await parts.guard.check(url)
    except (OSError, UnicodeError):
        # TimeoutError is an OSError: the name server did not answer either.
        raise Refusal(400, "target", "the URL's host does not resolve; check its name") from None


def _check_room(parts: SubscriptionNeeds, active: int) -> None:
    limit = parts.config.webhooks.subscriptions_max
    if active >= limit:
        raise Refusal(409, "limit", f"{limit} subscriptions are active, which is the most (webhooks.subscriptions_max)")


def _shown_subscription(parts: SubscriptionNeeds, record: Subscription, pending: dict[str, int]) -> dict[str, object]:
    health = parts.store.get(SUBSCRIPTION_HEALTH, record.id) or SubscriptionHealth(subscription_id=record.id)
    return {
        **views.subscription(record),
        "health": {**views.subscription_health(health), "pending": pending.get(record.id, 0)},
    }


def _pending(parts: SubscriptionNeeds) -> dict[str, int]:
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


# The state of every event's delivery to every subscription.

deliveries_router = APIRouter(prefix="/api/v1/deliveries", tags=["deliveries"])


class DeliveryNeeds(Protocol):
    """The server's components that the endpoints of deliveries use."""

    clock: Clock
    config: ServerConfig
    store: Store


DeliveryParts = Annotated[DeliveryNeeds, Depends(services)]


@deliveries_router.get("")
def list_deliveries(
    parts: DeliveryParts,
    _: Reader,
    subscription: Annotated[str | None, Query(description="A subscription's id.")] = None,
    event: Annotated[str | None, Query(description="An event's id.")] = None,
    state: DeliveryState | None = None,
    type: EventType = None,  # noqa: A002 - the filter's public name
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Response:
    """Deliveries, newest first."""
    filters = given(subscription_id=subscription, event_id=event, state=state, type=type)
    return listing(parts.store.page(DELIVERIES, filters, cursor, limit), views.delivery)


@deliveries_router.get("/{delivery}")
def get_delivery(parts: DeliveryParts, _: Reader, delivery: str) -> Response:
    """One delivery and the event it carries; ``event`` is null when it is no longer kept."""
    record = found(parts, DELIVERIES, delivery)
    event = parts.store.get(EVENTS, record.event_id)
    shown = None if event is None else views.event(event, parts.config.public_url)
    return answer({**views.delivery(record), "event": shown})


@deliveries_router.post("/{delivery}/redeliver")
def redeliver(parts: DeliveryParts, principal: Operator, delivery: str) -> Response:
    """Deliver again, now. 409 for an event past its expiry and for a subscription that has ended."""

    def change(store: Store) -> Change:
        old = store.get(DELIVERIES, delivery)
        if old is None:
            raise missing("deliveries", delivery)
        subscription = store.get(SUBSCRIPTIONS, old.subscription_id)
        if subscription is None or not subscription.active:
            raise IllegalTransition(f"subscription {old.subscription_id} has ended; make a new one")
        new = again(old, parts.clock.now_s())
        return Change(deliveries=(new,), audit=(audited(parts, principal, "redeliver", delivery),))

    parts.store.update(change)
    return answer(views.delivery(found(parts, DELIVERIES, delivery)))


# Changes as server-sent events; resumable.

KEEPALIVE_S = 15.0
STREAM_BATCH = 500

stream_router = APIRouter(prefix="/api/v1", tags=["events"])


class StreamNeeds(Protocol):
    """The server's components that the stream of events uses."""

    cells: Cells | None
    clock: Clock
    config: ServerConfig
    fleet: Fleet
    open_streams: OpenStreams
    outlook: Outlook
    people: People
    signal: ChangeSignal
    stopping: threading.Event
    store: Store
    telemetry: Telemetry


StreamParts = Annotated[StreamNeeds, Depends(services)]


@stream_router.get("/events")
async def events(
    request: Request,
    parts: StreamParts,
    _: Reader,
    last_event_id: Annotated[str | None, Header(max_length=20)] = None,
) -> Response:
    """Changes of incidents, actions, jobs, nodes, deliveries, subscriptions and silences, and events that went out.

    ``event`` is the kind, ``data`` the record as the API shows it. With Last-Event-ID the stream goes on after it;
    ``event: reset`` says that it is too old and that everything should be read anew. Without it, it starts now,
    and first says, with an id alone, where that is.
    """
    streams = parts.telemetry.streams
    if parts.open_streams.count >= parts.config.streams_max:
        raise Refusal(
            503,
            "busy",
            f"{parts.config.streams_max} readers are connected, which is the most (streams_max)",
            {"Retry-After": "10"},
        )
    oldest, newest = await asyncio.to_thread(parts.store.change_range)
    position, reset = newest, False
    if last_event_id is not None:
        if not last_event_id.isascii() or not last_event_id.isdigit():
            raise Refusal(400, "cursor", f"Last-Event-ID {last_event_id!r} is none of this stream's ids")
        position = int(last_event_id)
        # An id above the newest one comes from another server's file.
        reset = position + 1 < oldest or position > newest
        position = newest if reset else position

    def identify() -> None:
        parts.people.authenticate(request.method, request.scope["headers"], request.scope["state"])

    async def body() -> AsyncIterator[bytes]:
        woken = parts.signal.waiter()
        parts.open_streams.count += 1
        streams.set(parts.open_streams.count)
        try:
            yield _message("reset", position, {}) if reset else b": hello\nid: %d\n\n" % position
            async for chunk in _follow(parts, position, woken, identify):
                yield chunk
        finally:
            parts.signal.forget(woken)
            parts.open_streams.count -= 1
            streams.set(parts.open_streams.count)

    return StreamingResponse(body(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _follow(
    parts: StreamNeeds, position: int, woken: asyncio.Event, identify: Callable[[], None]
) -> AsyncIterator[bytes]:
    """Yield changes until the server stops, or ``identify`` raises Refusal: a token is revoked, a session ended."""
    asked_s = parts.clock.monotonic_s()
    while not parts.stopping.is_set():
        try:
            if parts.clock.monotonic_s() - asked_s >= KEEPALIVE_S:
                await asyncio.to_thread(identify)
                asked_s = parts.clock.monotonic_s()
            changes = await asyncio.to_thread(parts.store.changes_since, position, STREAM_BATCH)
            messages = await asyncio.to_thread(_messages, parts, changes)
        except (StoreUnavailable, Refusal):
            # The reader reconnects with its Last-Event-ID and misses nothing, or is told why it may no longer read.
            return
        for message in messages:
            yield message
        if changes:
            position = changes[-1].sequence
            continue
        if not await wait_for_change(woken, KEEPALIVE_S):
            yield b": still here\n\n"


def _messages(parts: StreamNeeds, changes: list[Changed]) -> list[bytes]:
    # Of several changes of one record only the last is sent: each message shows the record's current state.
    last = {(change.kind, change.key): change.sequence for change in changes}
    found = []
    for change in changes:
        if last[change.kind, change.key] == change.sequence:
            shown = _shown_change(parts, change)
            if shown is not None:
                found.append(_message(shown[0], change.sequence, shown[1]))
    return found


def _shown_change(parts: StreamNeeds, change: Changed) -> tuple[str, dict[str, Any]] | None:
    """Return the kind's singular and the record, or None when it is no longer kept."""
    store, url, now_s = parts.store, parts.config.public_url, parts.clock.now_s()
    offsets = parts.fleet.offsets() if change.kind == NODES.name else {}
    record: Any
    match change.kind:
        case INCIDENTS.name:
            record = store.get(INCIDENTS, change.key)
            return None if record is None else ("incident", _of_cell(parts, views.incident(record)))
        case ACTIONS.name:
            record = store.get(ACTIONS, change.key)
            return None if record is None else ("action", _of_cell(parts, views.action(record, url)))
        case JOBS.name:
            record = store.get(JOBS, change.key)
            return None if record is None else ("job", _of_cell(parts, views.job(record, parts.outlook)))
        case NODES.name:
            record = store.get(NODES, change.key)
            return None if record is None else ("node", views.node(record, parts.fleet, offsets, now_s))
        case DELIVERIES.name:
            record = store.get(DELIVERIES, change.key)
            return None if record is None else ("delivery", views.delivery(record))
        case SUBSCRIPTIONS.name:
            record = store.get(SUBSCRIPTIONS, change.key)
            return None if record is None else ("subscription", views.subscription(record))
        case SILENCES.name:
            record = store.get(SILENCES, change.key)
            return None if record is None else ("silence", views.silence(record, store.open_incidents(), now_s))
        case EVENTS.name:
            record = store.get(EVENTS, change.key)
            return None if record is None else ("event", views.event(record, url))
    return None


def _of_cell(parts: StreamNeeds, shown: dict[str, Any]) -> dict[str, Any]:
    """Return the record with the cell that judges its job, where there are several, as in answers."""
    if parts.cells is None or not parts.cells.several:
        return shown
    return {**shown, "cell": parts.cells.cell_of(shown["job"])}


def _message(kind: str, sequence: int, data: dict[str, Any]) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (sequence, kind.encode(), msgspec.json.encode(data))
