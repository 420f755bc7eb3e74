"""The store in one SQLite file: a table for each kind of record, JSON beside its indexed columns."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from eagle_eye.schema.action import HEARTBEAT
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.records import (
    Action,
    AuditEntry,
    Delivery,
    Incident,
    Token,
)
from eagle_eye.server.store import database
from eagle_eye.server.store.cursors import cursor_of, position_of
from eagle_eye.server.store.schema import MIGRATIONS
from eagle_eye.server.store.sqlite_write import marks, reported, write
from eagle_eye.server.store.store import (
    ACTIONS,
    DELIVERIES,
    INCIDENTS,
    OPEN_INCIDENT_STATES,
    OVER_JOB_STATES,
    PAGE_LIMIT_MAX,
    TOKENS,
    Backlog,
    Change,
    Changed,
    Due,
    Filters,
    Kind,
    Page,
    Store,
    Upcoming,
)

RecordT = TypeVar("RecordT", bound=msgspec.Struct)

RECORDS_FILE = "records.db"  # in data_dir
CHANGES_KEPT = 20_000  # how far back a reader of /api/v1/events can resume
HEARTBEATS_KEPT_S = 3_600.0
PRUNE_BATCH = 500  # events deleted in one transaction: bounds how long other writers wait

# A delivery that may be made: no earlier one of its incident is still pending.
_FIRST_OF_GROUP = (
    "(\"group\" = '' OR NOT EXISTS (SELECT 1 FROM deliveries AS earlier WHERE earlier.state = 'pending'"
    " AND earlier.subscription_id = deliveries.subscription_id"
    ' AND earlier."group" = deliveries."group" AND earlier.sequence < deliveries.sequence))'
)
# A delivery that an action depends on: its own event, or a later one of its incident, is an action's.
_URGENT = (
    "(type GLOB 'eagle_eye.action.*' OR (\"group\" != '' AND EXISTS (SELECT 1 FROM deliveries AS later"
    " WHERE later.state = 'pending' AND later.subscription_id = deliveries.subscription_id"
    ' AND later."group" = deliveries."group" AND later.type GLOB \'eagle_eye.action.*\')))'
)


class SqliteStore:
    """A Store in ``path``. One writer at a time, concurrent readers; each commit is on disk when it returns."""

    def __init__(self, path: Path) -> None:
        self._condition = database.Condition(path)
        self._writer = database.connect(path)
        database.migrate(self._writer, MIGRATIONS, path)
        self._reader = database.connect(path)
        # Tokens are looked up on the event loop and must not wait for a long page query.
        self._token_reader = database.connect(path)
        self._write_lock = threading.RLock()
        self._read_lock = threading.Lock()
        self._token_lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []
        self._listener_lock = threading.Lock()

    def commit(self, change: Change) -> None:
        """Make the whole change durable, or nothing of it."""
        if change.empty:
            return
        with self._writing():
            write(self._writer, change)
        with self._listener_lock:
            listeners = tuple(self._listeners)
        for callback in listeners:
            callback()

    def update(self, work: Callable[[Store], Change]) -> Change:
        """Commit what ``work`` returns, with no other commit between its reads and the write; return it."""
        with self._write_lock:
            change = work(self)
            self.commit(change)
        return change

    def get(self, kind: Kind[RecordT], key: str) -> RecordT | None:
        """Return the record, or None if there is none of that id."""
        found = self._records(kind, f'"{kind.key}" = ?', (key,))
        return found[0] if found else None

    def missing(self, kind: Kind[RecordT], keys: Sequence[str]) -> list[str]:
        """Return those of the keys that no record has."""
        with self._reading() as reader:
            (found,) = reader.execute(
                "SELECT json_group_array(value) FROM json_each(?)"  # noqa: S608 - names come from Kind
                f' WHERE NOT EXISTS (SELECT 1 FROM {kind.name} WHERE "{kind.key}" = value)',
                (msgspec.json.encode(keys).decode(),),
            ).fetchone()
        missing: list[str] = msgspec.json.decode(found)
        return missing

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
        where, values = _where(kind, filters)
        if search:
            where += f' AND instr(lower("{kind.key}"), ?) > 0'
            values.append(search.lower())
        if since_s is not None:
            where += " AND json_extract(record, ?) >= ?"
            values += [f"$.{kind.time}", since_s]
        if cursor is not None:
            where += " AND rowid < ?"
            values.append(position_of(cursor, kind.name))
        with self._reading() as reader:
            rows = reader.execute(
                f"SELECT rowid, record FROM {kind.name} WHERE {where} ORDER BY rowid DESC LIMIT ?",  # noqa: S608
                (*values, limit + 1),
            ).fetchall()
        items = [self._decoded(record, kind.record) for _, record in rows[:limit]]
        return Page(items, cursor_of(kind.name, rows[limit - 1][0]) if len(rows) > limit else None)

    def all(self, kind: Kind[RecordT]) -> list[RecordT]:
        """Return all records of a kind, oldest first; for the small kinds."""
        return self._records(kind, "1")

    def open_incidents(self) -> list[Incident]:
        """Return the incidents in state suspected, confirmed, acting or recovered, oldest first."""
        return self._records(INCIDENTS, f"state IN {marks(OPEN_INCIDENT_STATES)}", OPEN_INCIDENT_STATES)

    def actions_since(self, since_s: float) -> list[Action]:
        """Return the actions created at ``since_s`` or later, oldest first."""
        return self._records(ACTIONS, "created_s >= ?", (since_s,))

    def actions_of(self, incident_id: str) -> list[Action]:
        """Return an incident's actions, oldest first."""
        return self._records(ACTIONS, "incident_id = ?", (incident_id,))

    def due_deliveries(self, subscription_id: str, now_s: float, limit: int) -> list[Due]:
        """Return the pending deliveries that are due and first of their group: urgent ones first, then oldest first."""
        with self._reading() as reader:
            rows = reader.execute(
                f"SELECT record, {_URGENT} AS urgent FROM deliveries"  # noqa: S608 - constants
                f" WHERE state = 'pending' AND subscription_id = ? AND due_s <= ? AND {_FIRST_OF_GROUP}"
                " ORDER BY urgent DESC, sequence LIMIT ?",
                (subscription_id, now_s, limit),
            ).fetchall()
        return [Due(msgspec.json.decode(record, type=DELIVERIES.record), bool(urgent)) for record, urgent in rows]

    def upcoming(self, now_s: float) -> dict[str, Upcoming]:
        """Return for each subscription with pending deliveries whether any is due, and when the next will be."""
        with self._reading() as reader:
            rows = reader.execute(
                "SELECT subscription_id, min(due_s) <= ?, min(CASE WHEN due_s > ? THEN due_s END)"  # noqa: S608
                f" FROM deliveries WHERE state = 'pending' AND {_FIRST_OF_GROUP} GROUP BY subscription_id",
                (now_s, now_s),
            ).fetchall()
        return {name: Upcoming(bool(due), next_s) for name, due, next_s in rows}

    def subscription_deliveries(self, subscription_id: str) -> list[Delivery]:
        """Return a subscription's pending deliveries, oldest first."""
        return self._records(DELIVERIES, "state = 'pending' AND subscription_id = ?", (subscription_id,))

    def expired_deliveries(self, now_s: float, limit: int) -> list[Delivery]:
        """Return pending deliveries whose event is stale."""
        return self._records(DELIVERIES, "state = 'pending' AND expires_s <= ?", (now_s,), limit=limit)

    def failed_deliveries(self, subscription_id: str, since_s: float, now_s: float, limit: int) -> list[Delivery]:
        """Return a subscription's failed deliveries of events since ``since_s`` that are not stale, oldest first."""
        where = "state = 'failed' AND subscription_id = ? AND created_s >= ? AND (expires_s IS NULL OR expires_s > ?)"
        return self._records(DELIVERIES, where, (subscription_id, since_s, now_s), order="sequence", limit=limit)

    def backlog(self) -> list[Backlog]:
        """Return the backlog of each subscription that has one."""
        with self._reading() as reader:
            rows = reader.execute(
                "SELECT subscription_id, count(*), min(created_s) FROM deliveries WHERE state = 'pending'"
                " GROUP BY subscription_id"
            ).fetchall()
        return [Backlog(*row) for row in rows]

    def reported(self, subscription_id: str, group: str) -> bool:
        """Return whether an event of this group, an incident's id, went to the subscription."""
        with self._reading() as reader:
            return reported(reader, subscription_id, group)

    def token_by_sha256(self, sha256: str) -> Token | None:
        """Return the token with this hash, even if it is revoked or expired."""
        with self._reading(self._token_reader, self._token_lock) as reader:
            row = reader.execute("SELECT record FROM tokens WHERE sha256 = ?", (sha256,)).fetchone()
        return None if row is None else self._decoded(row[0], TOKENS.record)

    def any_token(self) -> bool:
        """Return whether any token was ever created, including revoked and expired ones."""
        with self._reading(self._token_reader, self._token_lock) as reader:
            return reader.execute("SELECT 1 FROM tokens LIMIT 1").fetchone() is not None

    def tokens_version(self) -> int:
        """Return a number that increases with every change of any token, whoever makes it."""
        with self._reading(self._token_reader, self._token_lock) as reader:
            version: int = reader.execute("SELECT total FROM token_changes").fetchone()[0]
        return version

    def changes_since(self, sequence: int, limit: int) -> list[Changed]:
        """Return what changed after ``sequence``, oldest first."""
        with self._reading() as reader:
            rows = reader.execute(
                'SELECT sequence, kind, "key" FROM changes WHERE sequence > ? ORDER BY sequence LIMIT ?',
                (sequence, limit),
            ).fetchall()
        return [Changed(*row) for row in rows]

    def change_range(self) -> tuple[int, int]:
        """Return the sequences of the oldest change kept and of the newest; (0, 0) if nothing ever changed."""
        with self._reading() as reader:
            oldest, newest = reader.execute("SELECT min(sequence), max(sequence) FROM changes").fetchone()
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
        subjects = (subject,) if isinstance(subject, str) else subject
        given = (("who", "=", who), ("verb", "=", verb), ("time_s", ">=", since_s))
        terms = [
            f"json_extract(record, '$.{name}') {compared} ?" for name, compared, value in given if value is not None
        ]
        values: list[str | float] = [value for _, _, value in given if value is not None]
        if subjects is not None:
            terms.append(f"json_extract(record, '$.subject') IN {marks(subjects)}")
            values += subjects
        terms.append("sequence < ?")
        values += [position_of(cursor, "audit") if cursor is not None else 1 << 62, limit + 1]
        with self._reading() as reader:
            rows = reader.execute(
                f"SELECT sequence, record FROM audit WHERE {' AND '.join(terms)} ORDER BY sequence DESC LIMIT ?",  # noqa: S608
                values,
            ).fetchall()
        items = [self._decoded(record, AuditEntry) for _, record in rows[:limit]]
        return Page(items, cursor_of("audit", rows[limit - 1][0]) if len(rows) > limit else None)

    def count(self, kind: Kind[RecordT]) -> int:
        """Return how many records of a kind there are."""
        with self._reading() as reader:
            found: int = reader.execute(f"SELECT count(*) FROM {kind.name}").fetchone()[0]  # noqa: S608
        return found

    def retire(self, kind: Kind[RecordT], column: str, before_s: float, limit: int) -> int:
        """Delete at most ``limit`` records of a kind whose time in ``column`` is older; return how many."""
        if column not in kind.columns:
            raise KeyError(f"{kind.name} has no column {column}; only {', '.join(kind.columns)}")
        old = f'SELECT rowid FROM {kind.name} WHERE "{column}" < ? LIMIT ?'  # noqa: S608
        with self._writing():
            done = self._writer.execute(f"DELETE FROM {kind.name} WHERE rowid IN ({old})", (before_s, limit))  # noqa: S608
            return done.rowcount

    def prune(self, now_s: float, retention_s: float) -> int:
        """Delete settled events older than ``retention_s``, old heartbeats and changes; return how many events."""
        settled = "NOT EXISTS (SELECT 1 FROM deliveries WHERE event_id = events.id AND state = 'pending')"
        with self._writing():
            doomed = self._writer.execute(
                f"SELECT id FROM events WHERE (time_s < ? OR (type = ? AND time_s < ?)) AND {settled} LIMIT ?",  # noqa: S608
                (now_s - retention_s, HEARTBEAT, now_s - HEARTBEATS_KEPT_S, PRUNE_BATCH),
            ).fetchall()
            self._writer.executemany("DELETE FROM deliveries WHERE event_id = ?", doomed)
            self._writer.executemany("DELETE FROM events WHERE id = ?", doomed)
            # A scheduler names thousands of jobs a day; those that are over are kept as long as events.
            self._writer.execute(
                f"DELETE FROM jobs WHERE rowid IN (SELECT rowid FROM jobs WHERE state IN {marks(OVER_JOB_STATES)}"  # noqa: S608
                " AND json_extract(record, '$.updated_s') < ? LIMIT ?)",
                (*OVER_JOB_STATES, now_s - retention_s, PRUNE_BATCH),
            )
            self._writer.execute(
                "DELETE FROM changes WHERE sequence <= (SELECT max(sequence) FROM changes) - ?", (CHANGES_KEPT,)
            )
        return len(doomed)

    def probe(self) -> None:
        """Raise StoreUnavailable unless a transaction can be written."""
        if self._condition.damage is not None:
            raise StoreUnavailable(self._condition.damage)
        with self._writing():
            # Rewriting the version dirties a page: an empty transaction would not touch the disk.
            self._writer.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")

    def note_damage(self, how: str) -> None:
        """Make ``probe`` report that the file is damaged."""
        self._condition.note_damage(how)

    def listen(self, callback: Callable[[], None]) -> None:
        """Register ``callback`` for each commit, called in the thread that committed; it must not block."""
        with self._listener_lock:
            self._listeners.append(callback)

    def close(self) -> None:
        """Release the files."""
        with self._write_lock, self._read_lock, self._token_lock:
            for connection in (self._token_reader, self._reader, self._writer):
                connection.close()

    def _records(
        self, kind: Kind[RecordT], where: str, values: Sequence[Any] = (), order: str = "rowid", limit: int = -1
    ) -> list[RecordT]:
        with self._reading() as reader:
            rows = reader.execute(
                f"SELECT record FROM {kind.name} WHERE {where} ORDER BY {order} LIMIT ?",  # noqa: S608
                (*values, limit),
            ).fetchall()
        return [self._decoded(record, kind.record) for (record,) in rows]

    @contextmanager
    def _reading(
        self, reader: sqlite3.Connection | None = None, lock: threading.Lock | None = None
    ) -> Iterator[sqlite3.Connection]:
        with lock or self._read_lock:
            try:
                yield reader or self._reader
            except sqlite3.Error as error:
                raise self._unavailable("read", error) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._write_lock:
            try:
                with database.transaction(self._writer):
                    yield
            except sqlite3.Error as error:
                raise self._unavailable("written", error) from error

    def _unavailable(self, done: str, error: sqlite3.Error) -> StoreUnavailable:
        self._condition.note(error)
        return StoreUnavailable(self._condition.damage or f"the records cannot be {done}: {error}")

    def _decoded(self, record: str, kind: type[RecordT]) -> RecordT:
        try:
            return msgspec.json.decode(record, type=kind)
        except msgspec.DecodeError as error:
            self.note_damage(f"a record cannot be read as {kind.__name__}: {error}")
            raise StoreUnavailable(f"{self._condition.damage}") from error


def _where(kind: Kind[Any], filters: Filters) -> tuple[str, list[str | float]]:
    terms = ["1"]
    values: list[str | float] = []
    for name, value in filters.items():
        paths = [path for known, path in kind.lists if known == name]
        if paths:
            contained = []
            for path, _, inside in (path.partition("[*].") for path in paths):
                element = "json_extract(value, ?)" if inside else "value"
                contained.append(f"EXISTS (SELECT 1 FROM json_each(record, ?) WHERE {element} = ?)")  # noqa: S608
                values += [path, f"$.{inside}", str(value)] if inside else [path, str(value)]
            terms.append(f"({' OR '.join(contained)})")
        elif name in kind.columns:
            several = (value,) if isinstance(value, str) else value
            terms.append(f'"{name}" IN {marks(several)}')
            values += several
        else:
            raise KeyError(f"{kind.name} cannot be filtered by {name}; only by {', '.join(kind.filters)}")
    return " AND ".join(terms), values
