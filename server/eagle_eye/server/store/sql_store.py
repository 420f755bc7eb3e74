"""The store in a SQL database, and SQLite's file, which is the one unless the configuration has another.

A table for each kind of record, JSON beside its indexed columns.
"""

from __future__ import annotations

import base64
import sqlite3
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import sqlalchemy
from sqlalchemy import and_, bindparam, case, delete, exists, func, literal_column, or_, select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import QueuePool
from sqlalchemy.sql import ColumnElement, Delete, Select

from eagle_eye.schema.action import HEARTBEAT, PING
from eagle_eye.server.model.errors import BadCursor, StoreUnavailable
from eagle_eye.server.model.records import (
    Action,
    AuditEntry,
    Delivery,
    Derived,
    Incident,
    Token,
    WantedAction,
    new_id,
)
from eagle_eye.server.store import database, schema
from eagle_eye.server.store.leadership import Leadership, boot_s
from eagle_eye.server.store.schema import (
    ACTION_IDS,
    AUDIT,
    CHANGES,
    TABLES,
    TOKEN_CHANGES,
    JsonMember,
    JsonNumber,
    JsonText,
    RecordsDatabase,
    json_parts,
)
from eagle_eye.server.store.settings import DEFAULT_CELL, RecordsSettings
from eagle_eye.server.store.sql_write import REPORTED, RecordsWriter, Statement, Statements
from eagle_eye.server.store.store import (
    ACTIONS,
    DELIVERIES,
    ENDED_SESSIONS,
    EVENTS,
    INCIDENTS,
    JOB_CELLS,
    JOBS,
    OPEN_INCIDENT_STATES,
    OVER_JOB_STATES,
    PAGE_LIMIT_MAX,
    SILENCES,
    TOKENS,
    Backlog,
    Change,
    Changed,
    Due,
    Filters,
    Kind,
    Marks,
    Page,
    Store,
    Upcoming,
)


def cursor_of(list_name: str, position: int) -> str:
    """Return the cursor of a position in a list."""
    return base64.urlsafe_b64encode(f"{list_name}:{position}".encode()).decode().rstrip("=")


def position_of(cursor: str, list_name: str) -> int:
    """Return the position that a cursor of this list represents. Raises BadCursor."""
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
        name, _, position = text.partition(":")
        number = int(position)
    except ValueError:
        name, number = "", 0
    if name != list_name or not 0 < number < 1 << 62:
        raise BadCursor(
            f"cursor {cursor[:80]!r} is none of this list's; use the next of a page of the same list, unchanged"
        )
    return number


FILE_VERSION = 1  # the files' user_version; that of their tables is Alembic's
TRIGGERS: tuple[str, ...] = (
    *(
        f"CREATE TRIGGER IF NOT EXISTS {name} BEFORE {change} ON audit"
        " BEGIN SELECT RAISE(ABORT, 'the audit trail is append-only'); END"
        for name, change in (("audit_is_kept", "DELETE"), ("audit_is_final", "UPDATE"))
    ),
    *(
        f"CREATE TRIGGER IF NOT EXISTS {name} AFTER {change} ON tokens"  # noqa: S608 - constants
        " BEGIN UPDATE token_changes SET total = total + 1; END"
        for name, change in (("token_made", "INSERT"), ("token_changed", "UPDATE"), ("token_deleted", "DELETE"))
    ),
)
_LAST_ID = sqlalchemy.text("SELECT seq FROM sqlite_sequence WHERE name = :name")
_SET_LAST_ID = sqlalchemy.text("UPDATE sqlite_sequence SET seq = :seq WHERE name = :name")
_NEW_LAST_ID = sqlalchemy.text("INSERT INTO sqlite_sequence (name, seq) VALUES (:name, :seq)")


class SqliteFile:
    """A file with records: one process writes at a time, any number read meanwhile."""

    readers = 1  # what asks first is answered first
    mark = "?"
    failures: tuple[type[Exception], ...] = (DBAPIError, sqlite3.Error)
    triggers = TRIGGERS

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = str(path)
        self._condition = database.DatabaseCondition(path)

    @property
    def damage(self) -> str | None:
        """What is known to be damaged."""
        return self._condition.damage

    def connections(self, most: int, *, writing: bool = False) -> sqlalchemy.Engine:  # noqa: ARG002 - all may write
        """Return a pool of at most so many connections, opened when they are needed."""
        return sqlalchemy.create_engine(
            "sqlite://",
            creator=lambda: database.connect(self.path),
            poolclass=QueuePool,
            pool_size=most,
            max_overflow=0,
            pool_reset_on_return=None,  # reads are no transactions, and a transaction ends where it began
        )

    def check(self, connection: sqlalchemy.Connection) -> None:
        """Raise StoreUnavailable for a file of a newer server; what else is wrong with one shows as it is opened."""
        version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
        if version > FILE_VERSION:
            raise StoreUnavailable(
                f"{self.path} has version {version}, this server knows up to {FILE_VERSION}: start the newer server"
            )

    def is_lost(self, driver: Any) -> bool:  # noqa: ARG002 - as the other engine's
        """Return False: a file's connection is not lost."""
        return False

    def ensure_leading(self) -> None:
        """Do nothing: a file's folder is locked for one server."""

    def begin_writing(self, driver: Any) -> None:
        """Begin the only transaction that writes, of all processes. Nothing is written to a file that was deleted."""
        driver.check_files()
        driver.execute("BEGIN IMMEDIATE")

    def last_id(self, connection: sqlalchemy.Connection, column: sqlalchemy.Column[int]) -> int:
        """Return the last id that the column of a table gave out, of rows that are deleted since, too; 0 for none."""
        found: int | None = connection.execute(_LAST_ID, {"name": column.table.name}).scalar()
        return found or 0

    def set_last_id(self, connection: sqlalchemy.Connection, column: sqlalchemy.Column[int], last_id: int) -> None:
        """Have the column give out ids after this one."""
        values = {"name": column.table.name, "seq": last_id}
        if connection.execute(_SET_LAST_ID, values).rowcount == 0:
            connection.execute(_NEW_LAST_ID, values)

    def storable(self, text: str) -> str:
        """Return the text: SQLite stores any."""
        return text

    def unavailable(self, doing: str, error: Exception) -> StoreUnavailable:
        """Return what to raise for a failure: what could not be done, and why."""
        cause = error.orig if isinstance(error, DBAPIError) and isinstance(error.orig, Exception) else error
        self._condition.record_error(cause)
        return StoreUnavailable(self.damage or f"the records cannot be {doing}: {cause}")

    def note_damage(self, how: str) -> None:
        """Record that the file is damaged; it is logged once."""
        self._condition.note_damage(how)


@compiles(JsonText, "sqlite")
@compiles(JsonNumber, "sqlite")
def _field(element: JsonText | JsonNumber, compiler: Any, **options: Any) -> str:
    record, field, _ = json_parts(element, compiler, **options)
    return f"json_extract({record}, '$.{field}')"


@compiles(JsonMember, "sqlite")
def _member(element: JsonMember, compiler: Any, **options: Any) -> str:
    record, path, value = json_parts(element, compiler, **options)
    names, _, inside = path.partition("[*].")
    one = f"json_extract(value, '$.{inside}')" if inside else "value"
    return f"EXISTS (SELECT 1 FROM json_each({record}, '$.{names}') WHERE {one} = {value})"  # noqa: S608 - of Kinds


RecordT = TypeVar("RecordT", bound=msgspec.Struct)

CHANGES_KEPT = 20_000  # how far back a reader of /api/v1/events can resume
HEARTBEATS_KEPT_S = 3_600.0
ACTION_TYPES = "eagle_eye.action."  # what the types of an action's events begin with
PRUNE_BATCH = 500  # events deleted in one transaction: bounds how long other writers wait
KEYS_AT_ONCE = 5_000  # in one statement
ESCAPE = "!"  # before a sign of a pattern that stands for itself

_DELIVERIES = TABLES[DELIVERIES.name].c
_EVENTS = TABLES[EVENTS.name].c
_JOB_CELLS = TABLES[JOB_CELLS.name].c
_JOBS = TABLES[JOBS.name].c
_SILENCES = TABLES[SILENCES.name].c
_TOKENS = TABLES[TOKENS.name].c
# Literally in the statement: an index of some states is not used for a state that is a parameter.
_PENDING: ColumnElement[str] = literal_column("'pending'")
_FAILED: ColumnElement[str] = literal_column("'failed'")
_LIMIT = bindparam("at_most", type_=sqlalchemy.Integer)
_NOW_S: ColumnElement[float] = bindparam("now_s")
_OF: ColumnElement[str] = bindparam("of")


def _another(name: str, *conditions: Callable[[Any], ColumnElement[bool]]) -> ColumnElement[bool]:
    """Return whether another pending delivery of the same incident meets the conditions."""
    other = TABLES[DELIVERIES.name].alias(name).c
    same = other.subscription_id == _DELIVERIES.subscription_id, other.group == _DELIVERIES.group
    return exists().where(other.state == _PENDING, *same, *(condition(other) for condition in conditions))


def _of_action(columns: Any) -> ColumnElement[bool]:
    return func.substr(columns.type, 1, len(ACTION_TYPES)) == ACTION_TYPES


# A delivery that may be made: no earlier one of its incident is still pending.
_FIRST_OF_GROUP = or_(
    _DELIVERIES.group == literal_column("''"),
    ~_another("earlier", lambda other: other.sequence < _DELIVERIES.sequence),
)
# A delivery that an action depends on: its own event, or a later one of its incident, is an action's. A ping tells who
# leads, and is judged by: what hangs must not hold it up.
_URGENT = or_(
    _of_action(_DELIVERIES),
    _DELIVERIES.type == PING,
    and_(_DELIVERIES.group != literal_column("''"), _another("later", _of_action)),
)

_DUE: Select[Any] = (
    select(_DELIVERIES.record, case((_URGENT, 1), else_=0).label("urgent"))
    .where(_DELIVERIES.state == _PENDING, _DELIVERIES.subscription_id == _OF)
    .where(_DELIVERIES.due_s <= _NOW_S, _FIRST_OF_GROUP)
    .order_by(sqlalchemy.desc("urgent"), _DELIVERIES.sequence)
    .limit(_LIMIT)
)
_UPCOMING: Select[Any] = (
    select(
        _DELIVERIES.subscription_id,
        func.min(_DELIVERIES.due_s),
        func.min(case((_DELIVERIES.due_s > _NOW_S, _DELIVERIES.due_s))),
    )
    .where(_DELIVERIES.state == _PENDING, _FIRST_OF_GROUP)
    .group_by(_DELIVERIES.subscription_id)
)
_BACKLOG: Select[Any] = (
    select(_DELIVERIES.subscription_id, func.count(), func.min(_DELIVERIES.created_s))
    .where(_DELIVERIES.state == _PENDING)
    .group_by(_DELIVERIES.subscription_id)
)
_TOKEN: Select[Any] = select(_TOKENS.record).where(_TOKENS.sha256 == bindparam("sha256"))
_ANY_TOKEN: Select[Any] = select(_TOKENS.rowid).limit(1)
_SALT: Select[Any] = select(ACTION_IDS.c.salt)
_CHANGED: Select[Any] = (
    select(CHANGES.c.sequence, CHANGES.c.kind, CHANGES.c.key)
    .where(CHANGES.c.sequence > bindparam("after"))
    .order_by(CHANGES.c.sequence)
    .limit(_LIMIT)
)
_CHANGE_RANGE: Select[Any] = select(
    # Two look-ups in the index; min and max of one statement would read the whole table.
    select(func.min(CHANGES.c.sequence)).scalar_subquery(),
    select(func.max(CHANGES.c.sequence)).scalar_subquery(),
)
_MARKS: Select[Any] = select(TOKEN_CHANGES.c.total, select(func.max(CHANGES.c.sequence)).scalar_subquery())
# Rewrites a row as it is: an empty transaction would not touch the disk.
_PROBE = update(TOKEN_CHANGES).values(total=TOKEN_CHANGES.c.total)

_SETTLED: Select[Any] = (
    select(_EVENTS.id)
    .where(
        or_(
            _EVENTS.time_s < bindparam("before_s"),
            and_(_EVENTS.type == HEARTBEAT, _EVENTS.time_s < bindparam("heartbeats_before_s")),
        ),
        ~exists().where(_DELIVERIES.event_id == _EVENTS.id, _DELIVERIES.state == _PENDING),
    )
    .limit(_LIMIT)
)
_EVENTS_DELIVERIES = delete(TABLES[DELIVERIES.name]).where(_DELIVERIES.event_id == bindparam("event_id"))
_EVENT = delete(TABLES[EVENTS.name]).where(_EVENTS.id == bindparam("event_id"))
# A scheduler names thousands of jobs a day; those that are over are kept as long as events.
_OVER = delete(TABLES[JOBS.name]).where(
    _JOBS.rowid.in_(
        select(_JOBS.rowid)
        .where(
            _JOBS.state.in_([literal_column(f"'{state}'") for state in OVER_JOB_STATES]),
            JsonNumber(_JOBS.record, "updated_s") < bindparam("before_s"),
        )
        .limit(_LIMIT)
    )
)
_OLD_SILENCES = delete(TABLES[SILENCES.name]).where(
    _SILENCES.state == literal_column("'ended'"), _SILENCES.until_s < bindparam("before_s")
)
_OLD_ENDED_SESSIONS = delete(TABLES[ENDED_SESSIONS.name]).where(
    TABLES[ENDED_SESSIONS.name].c.ended_s < bindparam("before_s")
)
_OLD_CHANGES = delete(CHANGES).where(
    CHANGES.c.sequence <= select(func.max(CHANGES.c.sequence)).scalar_subquery() - bindparam("kept")
)
_Term = tuple[str, Callable[[], ColumnElement[bool]]]  # a condition, by a name for its shape


class SqlStore:
    """A Store in a database. One writer at a time, concurrent readers; each commit is on disk when it returns."""

    def __init__(self, database: RecordsDatabase) -> None:
        self._database = database
        self._writes = database.connections(1, writing=True)
        self._reads = database.connections(database.readers)
        # Tokens are looked up on the event loop and must not wait for a long page query.
        self._token_reads = database.connections(1)
        self._statements = Statements(self._reads.dialect)
        self._write_lock = threading.RLock()
        self._within: tuple[int, Any] | None = None  # the thread that is within an update, and the driver's connection
        self._listeners: list[Callable[[], None]] = []
        self._listener_lock = threading.Lock()
        self._salt = ""  # of the ids of actions, once it was read
        try:
            schema.migrate(database, self._writes)
        except BaseException:
            self.close()
            raise

    @property
    def where(self) -> str:
        """The file or the database, for people."""
        return self._database.where

    def ensure_leading(self) -> None:
        """Raise NotLeading where another server of the same records leads, or may lead by now."""
        self._database.ensure_leading()

    def commit(self, change: Change) -> None:
        """Make the whole change durable, or nothing of it."""
        if not change.empty:
            with self._writing() as cursor:
                RecordsWriter(self._database, self._statements, cursor).write(change)
            self.call_listeners()

    def update(self, work: Callable[[Store], Change]) -> Change:
        """Commit what ``work`` returns, with no other commit between its reads and the write; return it."""
        with self._write_lock:
            with self._writing() as cursor:
                self._within = threading.get_ident(), cursor.connection
                try:
                    change = work(self)
                finally:
                    self._within = None
                if wanted := not change.empty:
                    RecordsWriter(self._database, self._statements, cursor).write(change)
            if wanted:
                self.call_listeners()
        return change

    def get(self, kind: Kind[RecordT], key: str) -> RecordT | None:
        """Return the record, or None if there is none of that id."""
        rows = self._rows(_by_key(kind), key=self._database.storable(key))
        return self._decoded(rows[0][0], kind.record) if rows else None

    def missing(self, kind: Kind[RecordT], keys: Sequence[str]) -> list[str]:
        """Return those of the keys that no record has."""
        there: set[str] = set()
        for first in range(0, len(keys), KEYS_AT_ONCE):
            part = self._named("key", keys[first : first + KEYS_AT_ONCE])
            statement = self._statements.of(("missing", kind.name, len(part)), partial(_known, kind, part))
            there.update(key for (key,) in self._run(statement, part))
        return [key for key in keys if self._database.storable(key) not in there]

    def new_id(self, what: Derived, given: Container[str] = ()) -> str:
        """Return the id of what is to be made now, not one of those ``given`` out and not written yet."""
        if not self._salt:
            ((self._salt,),) = self._rows(_SALT)
        kind: Kind[Any] = ACTIONS if isinstance(what, WantedAction) else INCIDENTS
        free = partial(self.missing, kind)
        return new_id(self._salt, what, lambda ids: [one for one in free(ids) if one not in given])

    def page(
        self,
        kind: Kind[RecordT],
        filters: Filters,
        cursor: str | None = None,
        limit: int = 100,
        search: str = "",
        since_s: float | None = None,
    ) -> Page[RecordT]:
        """Return the newest records that match, at most ``limit``, and a cursor to the next page."""
        limit = min(limit, PAGE_LIMIT_MAX)
        columns = TABLES[kind.name].c
        values: dict[str, Any] = {"at_most": limit + 1}
        terms = [*self._matching(kind, filters, values)]
        if search:
            values["search"] = _pattern(self._database.storable(search.lower()))
            terms.append(("search", lambda: func.lower(columns[kind.key]).like(bindparam("search"), escape=ESCAPE)))
        if since_s is not None:
            values["since_s"] = since_s
            terms.append(("since", lambda: JsonNumber(columns.record, kind.time) >= bindparam("since_s")))
        if cursor is not None:
            values["before"] = position_of(cursor, kind.name)
            terms.append(("before", lambda: columns.rowid < bindparam("before")))
        rows = self._run(self._newest_first(kind.name, columns.rowid, columns.record, terms), values)
        items = [self._decoded(record, kind.record) for _, record in rows[:limit]]
        return Page(items, cursor_of(kind.name, rows[limit - 1][0]) if len(rows) > limit else None)

    def all(self, kind: Kind[RecordT]) -> list[RecordT]:
        """Return all records of a kind, oldest first; for the small kinds."""
        return self._records(kind, _oldest_first(kind))

    def open_incidents(self) -> list[Incident]:
        """Return the incidents in state suspected, confirmed, acting or recovered, oldest first."""
        return self._records(INCIDENTS, _OPEN)

    def actions_since(self, since_s: float) -> list[Action]:
        """Return the actions created at ``since_s`` or later, oldest first."""
        return self._records(ACTIONS, _ACTIONS_SINCE, since_s=since_s)

    def actions_of(self, incident_id: str) -> list[Action]:
        """Return an incident's actions, oldest first."""
        return self._records(ACTIONS, _ACTIONS_OF, of=self._database.storable(incident_id))

    def due_deliveries(self, subscription_id: str, now_s: float, limit: int) -> list[Due]:
        """Return the pending deliveries that are due and first of their group: urgent ones first, then oldest first."""
        rows = self._rows(_DUE, of=subscription_id, now_s=now_s, at_most=limit)
        return [Due(self._decoded(record, DELIVERIES.record), bool(urgent)) for record, urgent in rows]

    def upcoming(self, now_s: float) -> dict[str, Upcoming]:
        """Return for each subscription with pending deliveries whether any is due, and when the next will be."""
        rows = self._rows(_UPCOMING, now_s=now_s)
        return {name: Upcoming(first_s <= now_s, next_s) for name, first_s, next_s in rows}

    def subscription_deliveries(self, subscription_id: str) -> list[Delivery]:
        """Return a subscription's pending deliveries, oldest first."""
        return self._records(DELIVERIES, _WAITING, of=subscription_id)

    def expired_deliveries(self, now_s: float, limit: int) -> list[Delivery]:
        """Return pending deliveries whose event is stale."""
        return self._records(DELIVERIES, _EXPIRED, now_s=now_s, at_most=limit)

    def failed_deliveries(self, subscription_id: str, since_s: float, now_s: float, limit: int) -> list[Delivery]:
        """Return a subscription's failed deliveries of events since ``since_s`` that are not stale, oldest first."""
        return self._records(DELIVERIES, _FAILURES, of=subscription_id, since_s=since_s, now_s=now_s, at_most=limit)

    def backlog(self) -> list[Backlog]:
        """Return the backlog of each subscription that has one."""
        return [Backlog(*row) for row in self._rows(_BACKLOG)]

    def reported(self, subscription_id: str, group: str) -> bool:
        """Return whether an event of this group, an incident's id, went to the subscription."""
        return group != "" and bool(self._rows(REPORTED, to=subscription_id, in_group=self._database.storable(group)))

    def token_by_sha256(self, sha256: str) -> Token | None:
        """Return the token with this hash, even if it is revoked or expired."""
        rows = self._rows(_TOKEN, self._token_reads, sha256=sha256)
        return self._decoded(rows[0][0], TOKENS.record) if rows else None

    def any_token(self) -> bool:
        """Return whether any token was ever created, including revoked and expired ones."""
        return bool(self._rows(_ANY_TOKEN, self._token_reads))

    def marks(self) -> Marks:
        """Return how far the records have changed, whoever changed them: one question for all who wait for it."""
        ((tokens, newest),) = self._rows(_MARKS, self._token_reads)
        return Marks(int(tokens), newest or 0)

    def changes_since(self, sequence: int, limit: int) -> list[Changed]:
        """Return what changed after ``sequence``, oldest first."""
        return [Changed(*row) for row in self._rows(_CHANGED, after=sequence, at_most=limit)]

    def change_range(self) -> tuple[int, int]:
        """Return the sequences of the oldest change kept and of the newest; (0, 0) if nothing ever changed."""
        ((oldest, newest),) = self._rows(_CHANGE_RANGE)
        return (oldest or 0, newest or 0)

    def audit(
        self,
        cursor: str | None = None,
        limit: int = 100,
        subject: str | Sequence[str] | None = None,
        who: str | None = None,
        verb: str | None = None,
        since_s: float | None = None,
    ) -> Page[AuditEntry]:
        """Return the audit trail, newest first; all given filters must match, with several subjects any of them."""
        limit = min(limit, PAGE_LIMIT_MAX)
        record = AUDIT.c.record
        values: dict[str, Any] = {"at_most": limit + 1}
        terms: list[_Term] = []
        for name, value in (("who", who), ("verb", verb)):
            if value is not None:
                values[name] = self._database.storable(value)
                terms.append((name, partial(_same_text, record, name)))
        if since_s is not None:
            values["since_s"] = since_s
            terms.append(("since", lambda: JsonNumber(record, "time_s") >= bindparam("since_s")))
        if subject is not None:
            subjects = self._named("subject", (subject,) if isinstance(subject, str) else subject)
            values |= subjects
            terms.append((f"subjects {len(subjects)}", lambda: _among(JsonText(record, "subject"), subjects)))
        if cursor is not None:
            values["before"] = position_of(cursor, "audit")
            terms.append(("before", lambda: AUDIT.c.sequence < bindparam("before")))
        rows = self._run(self._newest_first("audit", AUDIT.c.sequence, record, terms), values)
        items = [self._decoded(entry, AuditEntry) for _, entry in rows[:limit]]
        return Page(items, cursor_of("audit", rows[limit - 1][0]) if len(rows) > limit else None)

    def count(self, kind: Kind[RecordT]) -> int:
        """Return how many records of a kind there are."""
        ((found,),) = self._rows(_count(kind))
        return int(found)

    def retire(self, kind: Kind[RecordT], column: str, before_s: float, limit: int) -> int:
        """Delete at most ``limit`` records of a kind whose time in ``column`` is older; return how many."""
        if column not in kind.columns:
            raise KeyError(f"{kind.name} has no column {column}; only {', '.join(kind.columns)}")
        statement = self._statements.of(("retire", kind.name, column), lambda: _retired(kind, column))
        with self._writing() as cursor:
            cursor.execute(statement.text, statement.values({"before_s": before_s, "at_most": limit}))
            return int(cursor.rowcount)

    def prune(self, now_s: float, retention_s: float) -> int:
        """Delete what is older than ``retention_s`` and settled, old heartbeats and changes; return how many events."""
        old_s = now_s - retention_s
        with self._writing() as cursor:
            execute = self._statements.executing(cursor)
            execute(_SETTLED, before_s=old_s, heartbeats_before_s=now_s - HEARTBEATS_KEPT_S, at_most=PRUNE_BATCH)
            doomed = [name for (name,) in cursor.fetchall()]
            for event_id in doomed:
                execute(_EVENTS_DELIVERIES, event_id=event_id)
                execute(_EVENT, event_id=event_id)
            execute(_OVER, before_s=old_s, at_most=PRUNE_BATCH)
            execute(_OLD_SILENCES, before_s=old_s)
            execute(_OLD_ENDED_SESSIONS, before_s=old_s)
            execute(_OLD_CHANGES, kept=CHANGES_KEPT)
        return len(doomed)

    def probe(self) -> None:
        """Raise StoreUnavailable unless a transaction can be written."""
        if self._database.damage is not None:
            raise StoreUnavailable(self._database.damage)
        with self._writing() as cursor:
            self._statements.executing(cursor)(_PROBE)

    def note_damage(self, how: str) -> None:
        """Make ``probe`` report that records are damaged."""
        self._database.note_damage(how)

    def listen(self, callback: Callable[[], None]) -> None:
        """Register ``callback`` for each commit, called in the thread that committed; it must not block."""
        with self._listener_lock:
            self._listeners.append(callback)

    def close(self) -> None:
        """Release the connections; one that a thread still reads by once it has read."""
        with self._write_lock:
            for engine in (self._token_reads, self._reads, self._writes):
                engine.pool.dispose()  # the engine's own ``dispose`` makes another pool, which nobody closes

    def call_listeners(self) -> None:
        """Call who listens, as after a commit: another server may have committed."""
        with self._listener_lock:
            listeners = tuple(self._listeners)
        for callback in listeners:
            callback()

    def _records(self, kind: Kind[RecordT], statement: Select[Any], **values: Any) -> list[RecordT]:
        return [self._decoded(record, kind.record) for (record,) in self._rows(statement, **values)]

    def _named(self, name: str, values: Sequence[str]) -> dict[str, str]:
        """Return the values, each with a name of its own."""
        return {f"{name}_{at}": self._database.storable(value) for at, value in enumerate(values)}

    def _matching(self, kind: Kind[Any], filters: Filters, values: dict[str, Any]) -> Iterator[_Term]:
        """Yield the terms of the filters, and add their values."""
        columns = TABLES[kind.name].c
        for name, value in filters.items():
            mine = self._named(name, (value,) if isinstance(value, str) else value)
            paths = [path for known, path in kind.lists if known == name]
            if name == "cell" and "job" in (*kind.columns, kind.key):
                yield f"cell {value == DEFAULT_CELL}", partial(_of_cell, columns.job, value)
            elif paths:
                yield name, partial(_in_lists, columns.record, paths, f"{name}_0")
            elif name in kind.columns:
                yield f"{name} {len(mine)}", partial(_among, columns[name], mine)
            else:
                raise KeyError(f"{kind.name} cannot be filtered by {name}; only by {', '.join(kind.filters)}")
            values |= mine

    def _newest_first(
        self, name: str, row_id: ColumnElement[int], record: ColumnElement[str], terms: Sequence[_Term]
    ) -> Statement:
        """Return the statement that lists rows that meet all terms; terms of the same names make the same."""

        def made() -> Select[Any]:
            columns: tuple[ColumnElement[Any], ...] = (row_id, record)
            matching: Select[Any] = select(*columns).where(*(make() for _, make in terms))
            return matching.order_by(row_id.desc()).limit(_LIMIT)

        return self._statements.of((name, *(term for term, _ in terms)), made)

    def _rows(self, statement: Select[Any], pool: sqlalchemy.Engine | None = None, **values: Any) -> list[Any]:
        return self._run(self._statements.of(statement, lambda: statement), values, pool)

    def _run(self, statement: Statement, values: dict[str, Any], pool: sqlalchemy.Engine | None = None) -> list[Any]:
        within = self._within
        try:
            if within is not None and within[0] == threading.get_ident():
                # By the transaction itself, which needs no other connection.
                return list(within[1].execute(statement.text, statement.values(values)).fetchall())
            pool = pool or self._reads
            if (found := self._asked(pool, statement, values)) is not None:
                return found
            pool.dispose()  # the database was restarted since: the others of the pool are lost, too
            return self._asked(pool, statement, values, again=True) or []
        except self._database.failures as error:
            raise self._database.unavailable("read", error) from error

    def _asked(
        self, pool: sqlalchemy.Engine, statement: Statement, values: dict[str, Any], *, again: bool = False
    ) -> list[Any] | None:
        """Return the rows; None where the connection was lost, unless it is asked ``again``."""
        connection = pool.raw_connection()
        driver: Any = connection.driver_connection
        try:
            return list(driver.execute(statement.text, statement.values(values)).fetchall())
        except self._database.failures as error:
            lost = self._database.is_lost(driver)
            connection.invalidate(error)
            if lost and not again:
                return None
            raise
        finally:
            connection.close()

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        """Yield a driver's cursor in the one transaction that writes."""
        with self._write_lock:
            try:
                connection = self._writes.raw_connection()
                driver: Any = connection.driver_connection
                try:
                    self._database.begin_writing(driver)
                    yield driver.cursor()
                    driver.commit()
                except BaseException:
                    # A lost connection cannot roll back, which is not to hide the reason.
                    try:
                        driver.rollback()
                    except self._database.failures as error:
                        connection.invalidate(error)
                    raise
                finally:
                    connection.close()
            except self._database.failures as error:
                raise self._database.unavailable("written", error) from error

    def _decoded(self, record: str, kind: type[RecordT]) -> RecordT:
        try:
            return msgspec.json.decode(record, type=kind)
        except msgspec.DecodeError as error:
            self.note_damage(f"a record cannot be read as {kind.__name__}: {error}")
            raise StoreUnavailable(f"{self._database.damage}") from error


def _among(column: ColumnElement[Any], names: Iterable[str]) -> ColumnElement[bool]:
    """Return whether the column is one of the values of these names."""
    return column.in_([bindparam(name) for name in names])


def _of_cell(job: ColumnElement[str], cell: str | Sequence[str]) -> ColumnElement[bool]:
    """Return whether the job is the cell's; one that no record gives to a cell is the default cell's."""
    known: Select[Any] = select(_JOB_CELLS.job)
    if cell == DEFAULT_CELL:
        return job.not_in(known.where(_JOB_CELLS.cell != bindparam("cell_0")))
    return job.in_(known.where(_JOB_CELLS.cell == bindparam("cell_0")))


def _same_text(record: ColumnElement[str], name: str) -> ColumnElement[bool]:
    return JsonText(record, name) == bindparam(name)


def _in_lists(record: ColumnElement[str], paths: Sequence[str], name: str) -> ColumnElement[bool]:
    """Return whether any of the record's lists contains the value of this name."""
    return or_(*(JsonMember(record, path, bindparam(name, type_=sqlalchemy.Text)) for path in paths))


def _pattern(text: str) -> str:
    """Return the pattern of what contains the text."""
    for sign in (ESCAPE, "%", "_"):
        text = text.replace(sign, ESCAPE + sign)
    return f"%{text}%"


def _known(kind: Kind[Any], names: Iterable[str]) -> Select[Any]:
    key = TABLES[kind.name].c[kind.key]
    return select(key).where(_among(key, names))


def _retired(kind: Kind[Any], column: str) -> Delete:
    table = TABLES[kind.name]
    old = select(table.c.rowid).where(table.c[column] < bindparam("before_s")).limit(_LIMIT)
    return delete(table).where(table.c.rowid.in_(old))


@cache
def _count(kind: Kind[Any]) -> Select[Any]:
    return select(func.count()).select_from(TABLES[kind.name])


@cache
def _by_key(kind: Kind[Any]) -> Select[Any]:
    columns = TABLES[kind.name].c
    return select(columns.record).where(columns[kind.key] == bindparam("key"))


@cache
def _oldest_first(kind: Kind[Any]) -> Select[Any]:
    columns = TABLES[kind.name].c
    return select(columns.record).order_by(columns.rowid)


_INCIDENTS, _ACTIONS = TABLES[INCIDENTS.name].c, TABLES[ACTIONS.name].c
_OPEN = _oldest_first(INCIDENTS).where(_INCIDENTS.state.in_(OPEN_INCIDENT_STATES))
_ACTIONS_SINCE = _oldest_first(ACTIONS).where(_ACTIONS.created_s >= bindparam("since_s"))
_ACTIONS_OF = _oldest_first(ACTIONS).where(_ACTIONS.incident_id == _OF)
_OLDEST_DELIVERIES = _oldest_first(DELIVERIES)
_WAITING = _OLDEST_DELIVERIES.where(_DELIVERIES.state == _PENDING, _DELIVERIES.subscription_id == _OF)
_EXPIRED = _OLDEST_DELIVERIES.where(_DELIVERIES.state == _PENDING, _DELIVERIES.expires_s <= _NOW_S).limit(_LIMIT)
_FAILURES = (
    select(_DELIVERIES.record)
    .where(_DELIVERIES.state == _FAILED, _DELIVERIES.subscription_id == _OF)
    .where(_DELIVERIES.created_s >= bindparam("since_s"))
    .where(or_(_DELIVERIES.expires_s.is_(None), _DELIVERIES.expires_s > _NOW_S))
    .order_by(_DELIVERIES.sequence)
    .limit(_LIMIT)
)


RECORDS_FILE = "records.db"  # in data_dir, unless the records are in another database


def open_records(settings: RecordsSettings, data: Path, leadership: Leadership | None = None) -> SqlStore:
    """Return the records, brought to this version. Raises StoreUnavailable.

    With ``leadership`` they are written while this server leads. Who has a file is said by the lock of its folder
    (``admin/data_folder.py``).
    """
    if not settings.url:
        return open_file(data / RECORDS_FILE)
    from eagle_eye.server.store.postgresql import PostgresqlDatabase

    return SqlStore(PostgresqlDatabase(settings, alone=False, leadership=leadership))


def leadership_of(settings: RecordsSettings, public_url: str, now_s: Callable[[], float] = boot_s) -> Leadership:
    """Return this server's part in leading those on one PostgreSQL database, not started. Raises StoreUnavailable."""
    from eagle_eye.server.store.postgresql import PostgresqlDatabase, PostgresqlLease

    SqlStore(PostgresqlDatabase(settings, alone=False)).close()  # makes the tables
    keeper = PostgresqlLease(PostgresqlDatabase(settings, alone=False))
    keeper.found_cell()
    return Leadership(keeper, settings.server_url.rstrip("/") or public_url, settings.lease_s, now_s)


def open_file(path: Path) -> SqlStore:
    """Return the records in a SQLite file, made if it is not there. Raises StoreUnavailable."""
    return SqlStore(SqliteFile(path))
