"""Writes a change to the store's tables, and creates the deliveries of its events, within a transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeVar

import msgspec

from eagle_eye.server.model.records import Delivery, OutboundEvent, Subscription
from eagle_eye.server.model.subscription_filters import wants
from eagle_eye.server.store.store import (
    ACTIONS,
    ATTEMPTS,
    DELIVERIES,
    DRIVER_ERRORS,
    EVENTS,
    EVIDENCE,
    FORGOTTEN_NODES,
    GPU_CHECKS,
    GPUS,
    INCIDENTS,
    JOBS,
    LAST_CODES,
    MEMBERSHIPS,
    NODE_CHECKS,
    NODES,
    SUBSCRIPTION_HEALTH,
    SUBSCRIPTIONS,
    TICKETS,
    TOKENS,
    Change,
    Kind,
)

RECORDS_AT_ONCE = 500  # SQLite allows 32,766 values per statement

RecordT = TypeVar("RecordT", bound=msgspec.Struct)


def write(writer: sqlite3.Connection, change: Change) -> None:
    """Write the change's records, and each event with its deliveries. The caller has begun a transaction."""
    _put(writer, SUBSCRIPTIONS, change.subscriptions)
    _put(writer, TOKENS, change.tokens, announce=False)
    _put(writer, NODES, change.nodes)
    _put(writer, JOBS, change.jobs)
    _put(writer, INCIDENTS, change.incidents)
    _put(writer, ACTIONS, change.actions)
    _put(writer, DELIVERIES, change.deliveries)
    _put(writer, SUBSCRIPTION_HEALTH, change.subscription_health, announce=False)
    _put(writer, EVIDENCE, change.evidence, announce=False)
    _put(writer, NODE_CHECKS, change.node_checks, announce=False)
    _put(writer, ATTEMPTS, change.attempts, announce=False)
    _put(writer, MEMBERSHIPS, change.memberships, announce=False)
    _put(writer, GPUS, change.gpus, announce=False)
    _put(writer, GPU_CHECKS, change.gpu_checks, announce=False)
    _put(writer, DRIVER_ERRORS, change.driver_errors, announce=False)
    _put(writer, TICKETS, change.tickets, announce=False)
    _put(writer, LAST_CODES, change.last_codes, announce=False)
    _put(writer, FORGOTTEN_NODES, change.forgotten_nodes, announce=False)
    names = [(one.node,) for one in change.forgotten_nodes]
    for kind in (NODES, LAST_CODES):
        writer.executemany(f'DELETE FROM {kind.name} WHERE "{kind.key}" = ?', names)  # noqa: S608 - names are Kind's
    if change.events:
        _announce(writer, change.events)
    writer.executemany("INSERT INTO audit (record) VALUES (?)", [(_encode(entry),) for entry in change.audit])


def _put(writer: sqlite3.Connection, kind: Kind[RecordT], records: Sequence[RecordT], announce: bool = True) -> None:
    columns = (*dict.fromkeys((kind.key, *kind.columns)), "record")
    names = ", ".join(f'"{name}"' for name in columns)
    changes = ", ".join(f'"{name}" = excluded."{name}"' for name in columns if name != kind.key)
    # Many records per statement: each statement releases the GIL and waits to get it back.
    for first in range(0, len(records), RECORDS_AT_ONCE):
        part = records[first : first + RECORDS_AT_ONCE]
        values = [(*(getattr(record, name) for name in columns[:-1]), _encode(record)) for record in part]
        writer.execute(
            f"INSERT INTO {kind.name} ({names}) VALUES {', '.join([marks(columns)] * len(part))}"  # noqa: S608 - Kind's
            f' ON CONFLICT ("{kind.key}") DO UPDATE SET {changes}',
            [*chain.from_iterable(values)],
        )
        if announce:
            keys = [(kind.name, getattr(record, kind.key)) for record in part]
            places = ", ".join(["(?, ?)"] * len(part))
            writer.execute(f'INSERT INTO changes (kind, "key") VALUES {places}', [*chain.from_iterable(keys)])  # noqa: S608


def _announce(writer: sqlite3.Connection, events: Sequence[OutboundEvent]) -> None:
    rows = writer.execute("SELECT record FROM subscriptions WHERE active = 1 ORDER BY rowid").fetchall()
    subscriptions = [msgspec.json.decode(record, type=Subscription) for (record,) in rows]
    for event in events:
        if writer.execute("SELECT 1 FROM events WHERE id = ?", (event.id,)).fetchone():
            continue
        _put(writer, EVENTS, (event,))
        sequence = writer.execute("SELECT rowid FROM events WHERE id = ?", (event.id,)).fetchone()[0]
        numbered = msgspec.structs.replace(event, sequence=sequence)
        writer.execute("UPDATE events SET record = ? WHERE id = ?", (_encode(numbered), event.id))
        wanting = [one for one in subscriptions if wants(one, event) or _goes_on(writer, one, event)]
        _put(writer, DELIVERIES, [_delivery(numbered, subscription) for subscription in wanting])


def reported(connection: sqlite3.Connection, subscription_id: str, group: str) -> bool:
    """Return whether an event of this group went to the subscription."""
    found = connection.execute(
        'SELECT 1 FROM deliveries WHERE "group" = ? AND subscription_id = ? LIMIT 1', (group, subscription_id)
    )
    return group != "" and found.fetchone() is not None


def _goes_on(writer: sqlite3.Connection, subscription: Subscription, event: OutboundEvent) -> bool:
    """Return whether the event continues something that the subscription was sent before."""
    return wants(subscription, event, reported=True) and reported(writer, subscription.id, event.group)


def _delivery(event: OutboundEvent, subscription: Subscription) -> Delivery:
    return Delivery(
        id=f"dlv-{event.sequence}-{subscription.id}",
        event_id=event.id,
        subscription_id=subscription.id,
        type=event.type,
        state="pending",
        attempts=0,
        due_s=event.time_s,
        group=event.group,
        sequence=event.sequence,
        expires_s=event.expires_s,
        created_s=event.time_s,
        updated_s=event.time_s,
    )


def marks(values: Sequence[Any]) -> str:
    """Return as many placeholders as there are values, in parentheses."""
    return f"({', '.join('?' * len(values))})"


def _encode(record: msgspec.Struct) -> str:
    return msgspec.json.encode(record).decode()
