"""Withholds news of silenced incidents, and sends what still goes on once a silence is over."""

from __future__ import annotations

from msgspec.structs import replace

from eagle_eye.schema.action import INCIDENT_OPENED, INCIDENT_RESOLVED
from eagle_eye.server.delivery import events as outbound
from eagle_eye.server.delivery.delivery_states import silenced
from eagle_eye.server.model.records import AuditEntry, Delivery, Incident, NewsSilence, OutboundEvent
from eagle_eye.server.model.silences import covering, covering_incident, described
from eagle_eye.server.model.subscription_filters import INCIDENT_TYPES
from eagle_eye.server.store.store import DELIVERIES, EVENTS, PAGE_LIMIT_MAX, SILENCES, SUBSCRIPTIONS, Change, Store

ACTIVE_MAX = 100  # silences at a time, all of which a person must still be able to read
WHO = "server"  # in the audit trail


def in_force(store: Store, now_s: float) -> list[NewsSilence]:
    """Return the silences whose time is not over, newest first."""
    return [one for one in _active(store) if now_s < one.until_s]


def silence_of(store: Store, incident: Incident, now_s: float) -> NewsSilence | None:
    """Return the silence in force that covers an incident that is not over for good, or None."""
    return None if incident.state in ("closed", "false") else covering_incident(in_force(store, now_s), incident)


def withhold(store: Store, delivery: Delivery, event: OutboundEvent, now_s: float) -> Delivery | None:
    """Settle the delivery if a silence withholds its event, and return it; else return None.

    Only news of incidents is withheld, never what asks for an action or takes it back. An end is delivered to whoever
    was told of the beginning: there the incident would go on for ever.
    """

    def settled(store: Store) -> Change:
        fault, nodes = str(event.data.get("fault", "")), event.data.get("nodes", ())
        found = covering(in_force(store, now_s), fault, event.job, nodes)
        if found is None:
            return Change()
        if event.type == INCIDENT_RESOLVED and told(store, delivery.subscription_id, event.group) is not None:
            return Change()
        return Change(deliveries=(silenced(delivery, described(found), now_s),))

    if event.type not in INCIDENT_TYPES or settled(store).empty:
        return None
    # In one transaction: a silence that ends meanwhile must find the delivery withheld, or not withhold it.
    return next(iter(store.update(settled).deliveries), None)


def told(store: Store, subscription_id: str, incident_id: str) -> Delivery | None:
    """Return the delivery by which the subscription last learnt that the incident goes on, None if it did not."""
    filters = {"group": incident_id, "subscription_id": subscription_id, "state": "delivered"}
    newest = store.page(DELIVERIES, filters, limit=1).items
    return newest[0] if newest and newest[0].type != INCIDENT_RESOLVED else None


def end_silences(store: Store, now_s: float) -> None:
    """End the silences whose time is over, and announce the incidents that go on and of which they withheld news."""
    if all(now_s < one.until_s for one in _active(store)):
        return

    def ended(store: Store) -> Change:
        over = [one for one in _active(store) if one.until_s <= now_s]
        left = in_force(store, now_s)
        wanting = frozenset(one.id for one in store.all(SUBSCRIPTIONS) if one.active)
        going_on = [one for one in store.open_incidents() if one.ended_s is None]
        news = (_news(store, one, wanting, now_s) for one in going_on if covering_incident(left, one) is None)
        return Change(
            silences=tuple(replace(one, state="ended") for one in over),
            events=tuple(event for event in news if event is not None),
            audit=tuple(
                AuditEntry(time_s=now_s, who=WHO, verb="end silence", subject=one.id)
                for one in over
                if not one.ended_by
            ),
        )

    store.update(ended)


def _news(store: Store, incident: Incident, wanting: frozenset[str], now_s: float) -> OutboundEvent | None:
    """Return the incident as it is now if the newest of it was withheld from any of the subscriptions, else None."""
    withheld: list[Delivery] = []
    heard: set[str] = set()
    for delivery in store.page(DELIVERIES, {"group": incident.id}, limit=PAGE_LIMIT_MAX).items:
        if delivery.state != "silenced":
            heard.add(delivery.subscription_id)
        elif delivery.subscription_id in wanting - heard:
            withheld.append(delivery)
    if not withheld:
        return None
    opening = any(delivery.type == INCIDENT_OPENED for delivery in withheld)
    first = store.get(EVENTS, withheld[-1].event_id)
    return outbound.incident_unsilenced(incident, opening, {} if first is None else first.data.get("was", {}), now_s)


def _active(store: Store) -> list[NewsSilence]:
    return store.page(SILENCES, {"state": "active"}, limit=PAGE_LIMIT_MAX).items
