"""The records in a SQLite file: its connections, and what is SQL for SQLite alone."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import QueuePool

from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.store import database
from eagle_eye.server.store.json_expressions import JsonMember, JsonNumber, JsonText, parts

EARLIER_VERSIONS = 11  # that servers counted themselves, in user_version, before Alembic does
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
    """A file with records: one process writes at a time, any number read meanwhile; see ``database.py``."""

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
        if version > EARLIER_VERSIONS:
            raise StoreUnavailable(
                f"{self.path} has version {version}, this server knows up to {EARLIER_VERSIONS}: start the newer server"
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
        self._condition.note(cause)
        return StoreUnavailable(self.damage or f"the records cannot be {doing}: {cause}")

    def note_damage(self, how: str) -> None:
        """Record that the file is damaged; it is logged once."""
        self._condition.note_damage(how)


@compiles(JsonText, "sqlite")
@compiles(JsonNumber, "sqlite")
def _field(element: JsonText | JsonNumber, compiler: Any, **options: Any) -> str:
    record, field, _ = parts(element, compiler, **options)
    return f"json_extract({record}, '$.{field}')"


@compiles(JsonMember, "sqlite")
def _member(element: JsonMember, compiler: Any, **options: Any) -> str:
    record, path, value = parts(element, compiler, **options)
    names, _, inside = path.partition("[*].")
    one = f"json_extract(value, '$.{inside}')" if inside else "value"
    return f"EXISTS (SELECT 1 FROM json_each({record}, '$.{names}') WHERE {one} = {value})"  # noqa: S608 - of Kinds
