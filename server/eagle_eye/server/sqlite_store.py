"""The store in one SQLite file: a table for each kind of record, JSON beside its indexed columns."""

from __future__ import annotations

import base64
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from eagle_eye.schema.action import HEARTBEAT
from eagle_eye.server import database
from eagle_eye.server.errors import BadCursor, StoreUnavailable
from eagle_eye.server.outbound import wants
from eagle_eye.server.records import (
    Action,
    AuditEntry,
    Delivery,
    Incident,
    OutboundEvent,
    Subscription,
    Token,
)
from eagle_eye.server.store import (
    ACTIONS,
    DELIVERIES,
    EVENTS,
    EVIDENCE,
    INCIDENTS,
    JOBS,
    LIVE_ACTION_STATES,
    NODES,
    OPEN_INCIDENT_STATES,
    PAGE_LIMIT_MAX,
    SUBSCRIPTIONS,
    TOKENS,
    Change,
    Changed,
    Kind,
    Page,
    Store,
)
from eagle_eye.server.store_schema import MIGRATIONS

RecordT = TypeVar("RecordT", bound=msgspec.Struct)

RECORDS_FILE = "records.db"  # in data_dir
CHANGES_KEPT = 20_000  # how far back a reader of /api/v1/events can resume
HEARTBEATS_KEPT_S = 3_600.0
PRUNE_BATCH = 500  # events deleted in one transaction: other writers wait for no more

# A delivery whose turn it is: no earlier one of its incident is still pending.
_FIRST_OF_GROUP = (
    "(\"group\" = '' OR NOT EXISTS (SELECT 1 FROM deliveries AS earlier WHERE earlier.state = 'pending'"
    " AND earlier.subscription_id = deliveries.subscription_id"
    ' AND earlier."group" = deliveries."group" AND earlier.sequence < deliveries.sequence))'
)


class SqliteStore:
    """A Store in ``path``. One writer at a time, readers beside it; each commit is on disk when it returns."""

    def __init__(self, path: Path) -> None:
        self._writer = database.connect(path)
        database.migrate(self._writer, MIGRATIONS, path)
        self._reader = database.connect(path)
        # Tokens are looked up on the event loop; they must not wait behind a long page.
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
            _write(self._writer, change)
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

    def page(
        self, kind: Kind[RecordT], filters: Mapping[str, str], cursor: str | None = None, limit: int = 100
    ) -> Page[RecordT]:
        """Return the newest records that match, at most ``limit``; the next page through its cursor."""
        limit = min(limit, PAGE_LIMIT_MAX)
        where, values = _where(kind, filters)
        if cursor is not None:
            where += " AND rowid < ?"
            values.append(_position(cursor, kind.name))
        with self._reading() as reader:
            rows = reader.execute(
                f"SELECT rowid, record FROM {kind.name} WHERE {where} ORDER BY rowid DESC LIMIT ?",  # noqa: S608
                (*values, limit + 1),
            ).fetchall()
        items = [msgspec.json.decode(record, type=kind.record) for _, record in rows[:limit]]
        return Page(items, _cursor(kind.name, rows[limit - 1][0]) if len(rows) > limit else None)

    def all(self, kind: Kind[RecordT]) -> list[RecordT]:
        """Return all records of a kind, oldest first; for the small kinds."""
        return self._records(kind, "1")

    def open_incidents(self) -> list[Incident]:
        """Return the incidents in state open, acting or recovered, oldest first."""
        return self._records(INCIDENTS, f"state IN {_marks(OPEN_INCIDENT_STATES)}", OPEN_INCIDENT_STATES)

    def live_actions(self) -> list[Action]:
        """Return the actions that are awaiting, requested, accepted or running, oldest first."""
        return self._records(ACTIONS, f"state IN {_marks(LIVE_ACTION_STATES)}", LIVE_ACTION_STATES)

    def actions_since(self, since_s: float) -> list[Action]:
        """Return the actions created at ``since_s`` or later, oldest first."""
        return self._records(ACTIONS, "created_s >= ?", (since_s,))

    def actions_of(self, incident_id: str) -> list[Action]:
        """Return an incident's actions, oldest first."""
        return self._records(ACTIONS, "incident_id = ?", (incident_id,))

    def due_deliveries(self, subscription_id: str, now_s: float, limit: int) -> list[Delivery]:
        """Return the pending deliveries that are due and first of their group, oldest first."""
        where = f"state = 'pending' AND subscription_id = ? AND due_s <= ? AND {_FIRST_OF_GROUP}"
        return self._records(DELIVERIES, where, (subscription_id, now_s), order="sequence", limit=limit)

    def next_due_s(self) -> dict[str, float]:
        """Return for each subscription with pending deliveries when the next is due."""
        with self._reading() as reader:
            return dict(
                reader.execute(
                    "SELECT subscription_id, min(due_s) FROM deliveries"  # noqa: S608 - a constant
                    f" WHERE state = 'pending' AND {_FIRST_OF_GROUP} GROUP BY subscription_id"
                ).fetchall()
            )

    def subscription_deliveries(self, subscription_id: str) -> list[Delivery]:
        """Return a subscription's pending deliveries, oldest first."""
        return self._records(DELIVERIES, "state = 'pending' AND subscription_id = ?", (subscription_id,))

    def expired_deliveries(self, now_s: float, limit: int) -> list[Delivery]:
        """Return pending deliveries whose event is stale."""
        return self._records(DELIVERIES, "state = 'pending' AND expires_s <= ?", (now_s,), limit=limit)

    def token_by_sha256(self, sha256: str) -> Token | None:
        """Return the token with this hash, also when it is revoked or has expired."""
        with self._reading(self._token_reader, self._token_lock) as reader:
            row = reader.execute("SELECT record FROM tokens WHERE sha256 = ?", (sha256,)).fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=TOKENS.record)

    def any_token(self) -> bool:
        """Return whether a token was ever made; revoked and expired ones count."""
        with self._reading(self._token_reader, self._token_lock) as reader:
            return reader.execute("SELECT 1 FROM tokens LIMIT 1").fetchone() is not None

    def changes_since(self, sequence: int, limit: int) -> list[Changed]:
        """Return what changed after ``sequence``, oldest first."""
        with self._reading() as reader:
            rows = reader.execute(
                'SELECT sequence, kind, "key" FROM changes WHERE sequence > ? ORDER BY sequence LIMIT ?',
                (sequence, limit),
            ).fetchall()
        return [Changed(*row) for row in rows]

    def change_range(self) -> tuple[int, int]:
        """Return the sequences of the oldest change kept and of the newest; (0, 0) when nothing ever changed."""
        with self._reading() as reader:
            oldest, newest = reader.execute("SELECT min(sequence), max(sequence) FROM changes").fetchone()
        return (oldest or 0, newest or 0)

    def audit(self, cursor: str | None = None, limit: int = 100) -> Page[AuditEntry]:
        """Return the audit trail, newest first."""
        limit = min(limit, PAGE_LIMIT_MAX)
        before = _position(cursor, "audit") if cursor is not None else 1 << 62
        with self._reading() as reader:
            rows = reader.execute(
                "SELECT sequence, record FROM audit WHERE sequence < ? ORDER BY sequence DESC LIMIT ?",
                (before, limit + 1),
            ).fetchall()
        items = [msgspec.json.decode(record, type=AuditEntry) for _, record in rows[:limit]]
        return Page(items, _cursor("audit", rows[limit - 1][0]) if len(rows) > limit else None)

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
            self._writer.execute(
                "DELETE FROM changes WHERE sequence <= (SELECT max(sequence) FROM changes) - ?", (CHANGES_KEPT,)
            )
        return len(doomed)

    def probe(self) -> None:
        """Return if a transaction can be written. Raises StoreUnavailable."""
        with self._writing():
            # Writing the version again dirties a page: an empty transaction would not touch the disk.
            self._writer.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")

    def listen(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called after each commit, in the thread that committed; it must not block."""
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
        return [msgspec.json.decode(record, type=kind.record) for (record,) in rows]

    @contextmanager
    def _reading(
        self, reader: sqlite3.Connection | None = None, lock: threading.Lock | None = None
    ) -> Iterator[sqlite3.Connection]:
        with lock or self._read_lock:
            try:
                yield reader or self._reader
            except sqlite3.Error as error:
                raise StoreUnavailable(f"the records cannot be read: {error}") from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._write_lock:
            try:
                with database.transaction(self._writer):
                    yield
            except sqlite3.Error as error:
                raise StoreUnavailable(f"the records cannot be written: {error}") from error


def _write(writer: sqlite3.Connection, change: Change) -> None:
    _put(writer, SUBSCRIPTIONS, change.subscriptions)
    _put(writer, TOKENS, change.tokens, announce=False)
    _put(writer, NODES, change.nodes)
    _put(writer, JOBS, change.jobs)
    _put(writer, INCIDENTS, change.incidents)
    _put(writer, ACTIONS, change.actions)
    _put(writer, DELIVERIES, change.deliveries)
    _put(writer, EVIDENCE, change.evidence, announce=False)
    if change.events:
        _announce(writer, change.events)
    writer.executemany("INSERT INTO audit (record) VALUES (?)", [(_encode(entry),) for entry in change.audit])


def _put(writer: sqlite3.Connection, kind: Kind[RecordT], records: Sequence[RecordT], announce: bool = True) -> None:
    columns = (*dict.fromkeys((kind.key, *kind.columns)), "record")
    names = ", ".join(f'"{name}"' for name in columns)
    changes = ", ".join(f'"{name}" = excluded."{name}"' for name in columns if name != kind.key)
    statement = (
        f"INSERT INTO {kind.name} ({names}) VALUES {_marks(columns)}"  # noqa: S608 - names come from Kind
        f' ON CONFLICT ("{kind.key}") DO UPDATE SET {changes}'
    )
    for record in records:
        writer.execute(statement, (*(getattr(record, name) for name in columns[:-1]), _encode(record)))
        if announce:
            writer.execute('INSERT INTO changes (kind, "key") VALUES (?, ?)', (kind.name, getattr(record, kind.key)))


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
        _put(
            writer,
            DELIVERIES,
            [_delivery(numbered, subscription) for subscription in subscriptions if wants(subscription, event)],
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


def _where(kind: Kind[Any], filters: Mapping[str, str]) -> tuple[str, list[str | int]]:
    paths = dict(kind.lists)
    terms = ["1"]
    values: list[str | int] = []
    for name, value in filters.items():
        if name in paths:
            path, _, inside = paths[name].partition("[*].")
            terms.append(
                "EXISTS (SELECT 1 FROM json_each(record, ?) WHERE json_extract(value, ?) = ?)"
                if inside
                else "EXISTS (SELECT 1 FROM json_each(record, ?) WHERE value = ?)"
            )
            values += [path, f"$.{inside}", value] if inside else [path, value]
        elif name in kind.columns:
            terms.append(f'"{name}" = ?')
            values.append(value)
        else:
            raise KeyError(f"{kind.name} cannot be filtered by {name}; only by {', '.join(kind.filters)}")
    return " AND ".join(terms), values


def _marks(values: Sequence[Any]) -> str:
    return f"({', '.join('?' * len(values))})"


def _encode(record: msgspec.Struct) -> str:
    return msgspec.json.encode(record).decode()


def _cursor(list_name: str, position: int) -> str:
    return base64.urlsafe_b64encode(f"{list_name}:{position}".encode()).decode().rstrip("=")


def _position(cursor: str, list_name: str) -> int:
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
