"""Writes a change to the tables, and creates the deliveries of its events, within a transaction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any, TypeVar

import msgspec
from sqlalchemy import bindparam, insert, literal, select, update
from sqlalchemy.sql import Delete, Select

from eagle_eye.server.model.records import Delivery, OutboundEvent, Subscription
from eagle_eye.server.model.subscription_filters import wants
from eagle_eye.server.store.records_database import RecordsDatabase
from eagle_eye.server.store.schema import AUDIT, TABLES
from eagle_eye.server.store.statements import Statements
from eagle_eye.server.store.store import (
    ACTIONS,
    ATTEMPTS,
    CELLS,
    DELIVERIES,
    DRIVER_ERRORS,
    ENDED_SESSIONS,
    EVENTS,
    EVIDENCE,
    FORGOTTEN_NODES,
    GPU_CHECKS,
    GPUS,
    INCIDENTS,
    JOB_CELLS,
    JOBS,
    LAST_CODES,
    MEMBERSHIPS,
    NODE_CHECKS,
    NODES,
    SILENCES,
    SUBSCRIPTION_HEALTH,
    SUBSCRIPTIONS,
    TICKETS,
    TOKENS,
    Change,
    Kind,
)

RECORDS_AT_ONCE = 500  # SQLite allows 32,766 values per statement, PostgreSQL 65,535

RecordT = TypeVar("RecordT", bound=msgspec.Struct)

_SUBSCRIPTIONS, _EVENTS, _DELIVERIES = (TABLES[kind.name].c for kind in (SUBSCRIPTIONS, EVENTS, DELIVERIES))
_WANTING: Select[Any] = select(_SUBSCRIPTIONS.record).where(_SUBSCRIPTIONS.active == 1).order_by(_SUBSCRIPTIONS.rowid)
_EVENT_ROW: Select[Any] = select(_EVENTS.rowid).where(_EVENTS.id == bindparam("event_id"))
_NUMBERED = update(TABLES[EVENTS.name]).where(_EVENTS.id == bindparam("event_id")).values(record=bindparam("numbered"))
REPORTED: Select[Any] = (
    select(literal(1))
    .where(_DELIVERIES.group == bindparam("in_group"), _DELIVERIES.subscription_id == bindparam("to"))
    .limit(1)
)
_AUDIT = insert(AUDIT).values(record=bindparam("record"))


class RecordsWriter:
    """Writes to a database within the transaction that the caller has begun."""

    def __init__(self, database: RecordsDatabase, statements: Statements, cursor: Any) -> None:
        self._database = database
        self._execute = statements.executing(cursor)
        self._cursor = cursor

    def write(self, change: Change) -> None:
        """Write the change's records, and each event with its deliveries."""
        self._put(SUBSCRIPTIONS, change.subscriptions)
        self._put(SILENCES, change.silences)
        self._put(TOKENS, change.tokens, announce=False)
        self._put(ENDED_SESSIONS, change.ended_sessions, announce=False)
        self._put(NODES, change.nodes)
        self._put(JOBS, change.jobs)
        self._put(JOB_CELLS, change.job_cells)
        self._put(CELLS, change.cells)
        self._put(INCIDENTS, change.incidents)
        self._put(ACTIONS, change.actions)
        self._put(DELIVERIES, change.deliveries)
        self._put(SUBSCRIPTION_HEALTH, change.subscription_health, announce=False)
        self._put(EVIDENCE, change.evidence, announce=False)
        self._put(NODE_CHECKS, change.node_checks, announce=False)
        self._put(ATTEMPTS, change.attempts, announce=False)
        self._put(MEMBERSHIPS, change.memberships, announce=False)
        self._put(GPUS, change.gpus, announce=False)
        self._put(GPU_CHECKS, change.gpu_checks, announce=False)
        self._put(DRIVER_ERRORS, change.driver_errors, announce=False)
        self._put(TICKETS, change.tickets, announce=False)
        self._put(LAST_CODES, change.last_codes, announce=False)
        self._put(FORGOTTEN_NODES, change.forgotten_nodes, announce=False)
        for one in change.forgotten_nodes:
            for kind in (NODES, LAST_CODES):
                self._execute(_forgotten(kind), node=self._database.storable(one.node))
        if change.events:
            self._announce(change.events)
        for entry in change.audit:
            self._execute(_AUDIT, record=self._encoded(entry))

    def _put(self, kind: Kind[RecordT], records: Sequence[RecordT], announce: bool = True) -> None:
        # Many records per statement: each statement releases the GIL and waits to get it back. The driver is handed
        # the statement and its values as they are: this is what most of the time of a commit goes by.
        columns, before, one, after = _upsert(kind, self._database.mark)
        for first in range(0, len(records), RECORDS_AT_ONCE):
            # PostgreSQL refuses the same key twice in a statement.
            part = {getattr(record, kind.key): record for record in records[first : first + RECORDS_AT_ONCE]}
            values = [
                (*(self._plain(getattr(record, name)) for name in columns), self._encoded(record))
                for record in part.values()
            ]
            statement = f"{before}{', '.join([one] * len(part))}{after}"
            self._cursor.execute(statement, tuple(chain.from_iterable(values)))
            if announce:
                places = ", ".join([f"({self._database.mark}, {self._database.mark})"] * len(part))
                keys = chain.from_iterable((kind.name, self._plain(key)) for key in part)
                self._cursor.execute(
                    f'INSERT INTO changes (kind, "key") VALUES {places}',  # noqa: S608 - marks
                    tuple(keys),
                )

    def _announce(self, events: Sequence[OutboundEvent]) -> None:
        self._execute(_WANTING)
        subscriptions = [msgspec.json.decode(record, type=Subscription) for (record,) in self._cursor.fetchall()]
        for event in events:
            event_id = self._database.storable(event.id)
            if self._row_of(event_id) is not None:
                continue
            self._put(EVENTS, (event,))
            numbered = msgspec.structs.replace(event, sequence=self._row_of(event_id))
            self._execute(_NUMBERED, event_id=event_id, numbered=self._encoded(numbered))
            wanting = [one for one in subscriptions if wants(one, event) or self._goes_on(one, event)]
            self._put(DELIVERIES, [_delivery(numbered, subscription) for subscription in wanting])

    def _row_of(self, event_id: str) -> int | None:
        self._execute(_EVENT_ROW, event_id=event_id)
        found = self._cursor.fetchone()
        return None if found is None else int(found[0])

    def _goes_on(self, subscription: Subscription, event: OutboundEvent) -> bool:
        """Return whether the event continues something that the subscription was sent before."""
        if not event.group or not wants(subscription, event, reported=True):
            return False
        self._execute(REPORTED, to=subscription.id, in_group=self._database.storable(event.group))
        return self._cursor.fetchone() is not None

    def _plain(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._database.storable(value)
        return int(value) if isinstance(value, bool) else value

    def _encoded(self, record: msgspec.Struct) -> str:
        return self._database.storable(msgspec.json.encode(record).decode())


@cache
def _forgotten(kind: Kind[Any]) -> Delete:
    table = TABLES[kind.name]
    return table.delete().where(table.c[kind.key] == bindparam("node"))


@cache
def _upsert(kind: Kind[Any], mark: str) -> tuple[tuple[str, ...], str, str, str]:
    """Return the columns before ``record``, and the parts of the statement: before, for each row, and after."""
    columns = (*dict.fromkeys((kind.key, *kind.columns)), "record")
    names = ", ".join(f'"{name}"' for name in columns)
    changes = ", ".join(f'"{name}" = excluded."{name}"' for name in columns if name != kind.key)
    return (
        columns[:-1],
        f"INSERT INTO {kind.name} ({names}) VALUES ",  # noqa: S608 - names come from Kind
        f"({', '.join([mark] * len(columns))})",
        f' ON CONFLICT ("{kind.key}") DO UPDATE SET {changes}',
    )


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
