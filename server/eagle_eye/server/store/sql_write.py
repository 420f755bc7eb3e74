"""Writes changes to the records, with statements that SQLAlchemy makes once for each engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import msgspec
from sqlalchemy import Dialect, bindparam, literal, select, update
from sqlalchemy.sql import Delete, Executable, Select
from sqlalchemy.sql.compiler import SQLCompiler

from eagle_eye.server.model.event_filters import wants
from eagle_eye.server.model.records import Delivery, OutboundEvent, Subscription
from eagle_eye.server.store.schema import TABLES, RecordsDatabase
from eagle_eye.server.store.store import (
    ACTIONS,
    CELLS,
    DELIVERIES,
    EVENTS,
    INCIDENTS,
    JOB_CELLS,
    JOBS,
    KINDS,
    LAST_CODES,
    NODES,
    SILENCES,
    SUBSCRIPTIONS,
    Change,
    Kind,
)

# Statements are run without SQLAlchemy: run by it, a look-up of one record took three times the CPU.

Values = Sequence[Any] | Mapping[str, Any]
# Beyond it they are made anew: those with lists of values have as many shapes as lists have lengths.
STATEMENTS_MAX = 2_000


class Statement(NamedTuple):
    """The text for the driver, the names of its places, None where it takes names, and values of its own."""

    text: str
    places: tuple[str, ...] | None
    own: Mapping[str, Any]

    def values(self, given: Mapping[str, Any]) -> Values:
        """Return the values as the driver takes them."""
        if self.places is None:
            return {**self.own, **given}
        return [given[name] if name in given else self.own[name] for name in self.places]


class Statements:
    """The statements of one engine, each made when it is first needed."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._made: dict[Hashable, Statement] = {}

    def of(self, key: Hashable, make: Callable[[], Executable]) -> Statement:
        """Return the statement of this key, which ``make`` returns the first time."""
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= STATEMENTS_MAX:
                self._made.clear()
            found = self._made[key] = self._compiled(make())
        return found

    def executing(self, cursor: Any) -> Callable[..., None]:
        """Return what executes a statement with a driver's cursor, its values given by name."""

        def execute(statement: Executable, **values: Any) -> None:
            prepared = self.of(statement, lambda: statement)
            cursor.execute(prepared.text, prepared.values(values))

        return execute

    def _compiled(self, statement: Any) -> Statement:
        compiled: SQLCompiler = statement.compile(dialect=self._dialect, compile_kwargs={"render_postcompile": True})
        places = tuple(compiled.positiontup) if compiled.positional and compiled.positiontup is not None else None
        return Statement(str(compiled), places, compiled.params)


RECORDS_AT_ONCE = 500  # SQLite allows 32,766 values per statement, PostgreSQL 65,535
ROW_STATEMENTS_MAX = 64  # kept of those with so many rows: most write few

RecordT = TypeVar("RecordT", bound=msgspec.Struct)

# What readers of the trail of changes hear of.
_ANNOUNCED = frozenset({SUBSCRIPTIONS, SILENCES, NODES, JOBS, JOB_CELLS, CELLS, INCIDENTS, ACTIONS, DELIVERIES})

_SUBSCRIPTIONS, _EVENTS, _DELIVERIES = (TABLES[kind.name].c for kind in (SUBSCRIPTIONS, EVENTS, DELIVERIES))
_WANTING: Select[Any] = select(_SUBSCRIPTIONS.record).where(_SUBSCRIPTIONS.active == 1).order_by(_SUBSCRIPTIONS.rowid)
_NUMBERED = update(TABLES[EVENTS.name]).where(_EVENTS.id == bindparam("event_id")).values(record=bindparam("numbered"))
REPORTED: Select[Any] = (
    select(literal(1))
    .where(_DELIVERIES.group == bindparam("in_group"), _DELIVERIES.subscription_id == bindparam("to"))
    .limit(1)
)


class RecordsWriter:
    """Writes to a database within the transaction that the caller has begun."""

    def __init__(self, database: RecordsDatabase, statements: Statements, cursor: Any) -> None:
        self._database = database
        self._execute = statements.executing(cursor)
        self._cursor = cursor
        self._changed: list[tuple[str, str]] = []  # kind and key of what is announced

    def write(self, change: Change) -> None:
        """Write the change's records, and each event with its deliveries."""
        for kind in KINDS:
            if kind is not EVENTS and (records := getattr(change, kind.name)):
                self._put(kind, records, announce=kind in _ANNOUNCED)
        for one in change.forgotten_nodes:
            for kind in (NODES, LAST_CODES):
                self._execute(_forgotten(kind), node=self._database.storable(one.node))
        if change.events:
            self._announce(change.events)
        self._insert('changes (kind, "key")', self._changed)
        self._insert("audit (record)", [(self._encoded(entry),) for entry in change.audit])

    def _put(self, kind: Kind[RecordT], records: Sequence[RecordT], announce: bool) -> None:
        # Many records per statement: each statement releases the GIL and waits to get it back. The driver is handed
        # the statement and its values as they are: this is what most of the time of a commit goes by.
        for first in range(0, len(records), RECORDS_AT_ONCE):
            # PostgreSQL refuses the same key twice in a statement.
            part = {getattr(record, kind.key): record for record in records[first : first + RECORDS_AT_ONCE]}
            rows = [(*self._columns(kind, record), self._encoded(record)) for record in part.values()]
            self._cursor.execute(_upsert(kind, self._database.mark, len(rows)), (*chain(*rows),))
            if announce:
                self._changed += [(kind.name, self._database.storable(key)) for key in part]

    def _insert(self, into: str, rows: Sequence[tuple[str, ...]]) -> None:
        for first in range(0, len(rows), RECORDS_AT_ONCE):
            part = rows[first : first + RECORDS_AT_ONCE]
            self._cursor.execute(_rows_into(into, self._database.mark, len(part[0]), len(part)), (*chain(*part),))

    def _announce(self, events: Sequence[OutboundEvent]) -> None:
        self._execute(_WANTING)
        subscriptions = [msgspec.json.decode(record, type=Subscription) for (record,) in self._cursor.fetchall()]
        deliveries: list[Delivery] = []
        told: defaultdict[str, set[str]] = defaultdict(set)  # subscriptions by group
        for event_id, event in self._numbered(events).items():
            self._execute(_NUMBERED, event_id=event_id, numbered=self._encoded(event))
            self._changed.append((EVENTS.name, event_id))
            for one in subscriptions:
                if wants(one, event) or self._goes_on(one, event, told[event.group]):
                    told[event.group].add(one.id)
                    deliveries.append(_delivery(event, one))
        self._put(DELIVERIES, deliveries, announce=True)

    def _numbered(self, events: Sequence[OutboundEvent]) -> dict[str, OutboundEvent]:
        """Return by id those of the events that are new, with their sequence.

        Their rows are there afterwards, still without the records, which name the sequence.
        """
        numbered: dict[str, OutboundEvent] = {}
        for first in range(0, len(events), RECORDS_AT_ONCE):
            part: dict[str, OutboundEvent] = {}
            for event in events[first : first + RECORDS_AT_ONCE]:
                part.setdefault(self._database.storable(event.id), event)
            rows = [(*self._columns(EVENTS, event), "") for event in part.values()]
            self._cursor.execute(_new_events(self._database.mark, len(rows)), (*chain(*rows),))
            self._cursor.execute(_sequences(self._database.mark, len(rows)), (*part,))
            sequences = dict(self._cursor.fetchall())
            for event_id, event in part.items():
                if event_id in sequences:
                    numbered[event_id] = msgspec.structs.replace(event, sequence=int(sequences[event_id]))
        return numbered

    def _goes_on(self, subscription: Subscription, event: OutboundEvent, told: Container[str]) -> bool:
        """Return whether the event continues something that the subscription was sent before, or is ``told`` now."""
        if not event.group or not wants(subscription, event, reported=True):
            return False
        if subscription.id in told:
            return True
        self._execute(REPORTED, to=subscription.id, in_group=self._database.storable(event.group))
        return self._cursor.fetchone() is not None

    def _columns(self, kind: Kind[Any], record: msgspec.Struct) -> tuple[Any, ...]:
        """Return what is in the columns before ``record``."""
        return tuple([self._plain(value) for value in _fields(kind)(record)])

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
def _fields(kind: Kind[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return what reads the fields of a record that have columns."""
    names = kind.column_names
    return attrgetter(*names) if len(names) > 1 else lambda record: (getattr(record, names[0]),)


@lru_cache(ROW_STATEMENTS_MAX)
def _rows_into(into: str, mark: str, columns: int, rows: int) -> str:
    """Return the statement that inserts so many rows."""
    row = f"({', '.join([mark] * columns)})"
    return f"INSERT INTO {into} VALUES {', '.join([row] * rows)}"  # noqa: S608 - names of tables and columns


@lru_cache(ROW_STATEMENTS_MAX)
def _upsert(kind: Kind[Any], mark: str, rows: int) -> str:
    """Return the statement that writes so many records."""
    changes = ", ".join(f'"{name}" = excluded."{name}"' for name in (*kind.column_names, "record") if name != kind.key)
    return f'{_inserted(kind, mark, rows)} ON CONFLICT ("{kind.key}") DO UPDATE SET {changes}'


@lru_cache(ROW_STATEMENTS_MAX)
def _new_events(mark: str, rows: int) -> str:
    """Return the statement that makes a row for each of so many events that has none."""
    return f'{_inserted(EVENTS, mark, rows)} ON CONFLICT ("id") DO NOTHING'


@lru_cache(ROW_STATEMENTS_MAX)
def _sequences(mark: str, ids: int) -> str:
    """Return the statement that reads the ids and sequences of those of so many events that have no record yet.

    Not by RETURNING: RHEL 9 has SQLite 3.34, and that came with 3.35.
    """
    marks = ", ".join([mark] * ids)
    return f'SELECT "id", rowid FROM {EVENTS.name} WHERE record = \'\' AND "id" IN ({marks})'  # noqa: S608 - names


def _inserted(kind: Kind[Any], mark: str, rows: int) -> str:
    names = (*kind.column_names, "record")
    columns = ", ".join(f'"{name}"' for name in names)
    return _rows_into(f"{kind.name} ({columns})", mark, len(names), rows)


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
