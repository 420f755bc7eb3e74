"""/api/v1/deliveries: the state of every event's delivery to every subscription."""

from __future__ import annotations

from typing import Annotated, Protocol

from fastapi import APIRouter, Depends, Query, Response

from eagle_eye.server.api import views
from eagle_eye.server.api.requests import (
    Cursor,
    EventType,
    Limit,
    Operator,
    Reader,
    answer,
    audited,
    found,
    given,
    listing,
    missing,
    services,
)
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.delivery.delivery_states import again
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import IllegalTransition
from eagle_eye.server.model.records import DeliveryState
from eagle_eye.server.store.store import DELIVERIES, EVENTS, SUBSCRIPTIONS, Change, Store

router = APIRouter(prefix="/api/v1/deliveries", tags=["deliveries"])


class Needs(Protocol):
    """The server's components that this module uses."""

    clock: Clock
    config: ServerConfig
    store: Store


Parts = Annotated[Needs, Depends(services)]


@router.get("")
def list_deliveries(
    parts: Parts,
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


@router.get("/{delivery}")
def get_delivery(parts: Parts, _: Reader, delivery: str) -> Response:
    """One delivery and the event it carries; ``event`` is null when it is no longer kept."""
    record = found(parts, DELIVERIES, delivery)
    event = parts.store.get(EVENTS, record.event_id)
    shown = None if event is None else views.event(event, parts.config.public_url)
    return answer({**views.delivery(record), "event": shown})


@router.post("/{delivery}/redeliver")
def redeliver(parts: Parts, principal: Operator, delivery: str) -> Response:
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
