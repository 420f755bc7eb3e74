"""The tables of the records, on two engines: what is asked of an engine, the tables, and how they come to this version.

One table for each kind, JSON beside its indexed columns, and the trails. What changes here needs a migration
(``migrations/versions``); those bring a database to this version's tables, with Alembic.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import sqlalchemy
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Double,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    inspect,
    literal_column,
    text,
)
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.store.store import KINDS, Kind

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.script import ScriptDirectory


class JsonText(FunctionElement[str]):
    """A field of the record as text."""

    type = Text()
    inherit_cache = True

    def __init__(self, record: ColumnElement[Any], field: str) -> None:
        super().__init__(record, literal_column(field))


class JsonNumber(FunctionElement[float]):
    """A field of the record as a number."""

    type = Double()
    inherit_cache = True

    def __init__(self, record: ColumnElement[Any], field: str) -> None:
        super().__init__(record, literal_column(field))


class JsonMember(FunctionElement[bool]):
    """Whether a list of the record contains the value; "ranks[*].node" looks into the list's objects."""

    type = Boolean()
    inherit_cache = True

    def __init__(self, record: ColumnElement[Any], path: str, value: ColumnElement[str]) -> None:
        super().__init__(record, literal_column(path), value)


def json_parts(element: FunctionElement[Any], compiler: Any, **options: Any) -> tuple[str, str, str]:
    """Return the record, the field or path, and the value, "" for none, as they stand in the statement."""
    record, path, *value = element.clauses
    written = compiler.process(value[0], **options) if value else ""
    return compiler.process(record, **options), str(path), written


metadata = MetaData()

# SQLite counts rows up only in an INTEGER; PostgreSQL sorts and compares by bytes, as SQLite does.
_ROW_ID = BigInteger().with_variant(Integer, "sqlite")
_TEXT = Text().with_variant(Text(collation="C"), "postgresql")
_FLAGS = ("active", "moved")
_NULLABLE = (("deliveries", "expires_s"), ("tokens", "node"), ("job_cells", "over_s"))


def _type(name: str) -> TypeEngine[Any]:
    if name in _FLAGS:
        return Integer()
    if name == "sequence":
        return BigInteger()
    return Double() if name.endswith("_s") else _TEXT


def _table(kind: Kind[Any]) -> Table:
    unique = (kind.key, "sha256")
    return Table(
        kind.name,
        metadata,
        Column("rowid", _ROW_ID, primary_key=True, autoincrement=True),
        *(
            Column(name, _type(name), nullable=(kind.name, name) in _NULLABLE, unique=name in unique or None)
            for name in kind.column_names
        ),
        Column("record", Text, nullable=False),
        sqlite_autoincrement=True,
    )


def _lease_columns() -> tuple[Column[Any], ...]:
    """Return the columns of a lease beside its epoch."""
    return (
        Column("renewals", BigInteger, nullable=False),
        Column("holder", _TEXT, nullable=False),
        Column("backend_pid", Integer, nullable=False),
        Column("timeline", BigInteger, nullable=False, server_default="0"),
        Column("wish_number", BigInteger, nullable=False, server_default="0"),
        Column("wish_nodes", Integer, nullable=False, server_default="0"),
        Column("wish_holder", _TEXT, nullable=False, server_default=""),
    )


TABLES = {kind.name: _table(kind) for kind in KINDS}
AUDIT = Table(
    "audit",
    metadata,
    Column("sequence", _ROW_ID, primary_key=True, autoincrement=True),
    Column("record", Text, nullable=False),
    sqlite_autoincrement=True,
)
CHANGES = Table(
    "changes",
    metadata,
    Column("sequence", _ROW_ID, primary_key=True, autoincrement=True),
    Column("kind", _TEXT, nullable=False),
    Column("key", _TEXT, nullable=False),
    sqlite_autoincrement=True,
)
# Token permissions are cached between requests until this count, kept by triggers, shows that a token changed.
TOKEN_CHANGES = Table("token_changes", metadata, Column("total", _ROW_ID, nullable=False))
# One row: what the ids of actions and incidents are made with: no other database makes the same ones.
ACTION_IDS = Table("action_ids", metadata, Column("salt", _TEXT, primary_key=True))
# One row: who leads, of several servers on one database. The epoch is the key, so that transactions which hold FOR KEY
# SHARE keep it from rising, and no renewal waits for them.
LEASE = Table("lease", metadata, Column("epoch", BigInteger, primary_key=True, autoincrement=False), *_lease_columns())
# A row for each cell but the default one, which has the table above.
CELL_LEASES = Table(
    "cell_leases",
    metadata,
    Column("cell", _TEXT, primary_key=True, unique=True),
    Column("epoch", BigInteger, primary_key=True, autoincrement=False),
    *_lease_columns(),
)


def _index(name: str, table: str, *columns: str, where: str | None = None) -> None:
    only = None if where is None else text(where)
    Index(name, *(TABLES[table].c[column] for column in columns), sqlite_where=only, postgresql_where=only)


_index("incidents_state", "incidents", "state")
_index("actions_state", "actions", "state")
_index("actions_created", "actions", "created_s")
_index("actions_incident", "actions", "incident_id")
_index("events_time", "events", "time_s")
_index("deliveries_pending", "deliveries", "subscription_id", "group", "sequence", where="state = 'pending'")
_index("deliveries_failed", "deliveries", "subscription_id", "sequence", where="state = 'failed'")
_index("deliveries_event", "deliveries", "event_id")
_index("deliveries_told", "deliveries", "group", "subscription_id")
_index("tokens_node", "tokens", "node")
_index("evidence_incident", "evidence", "incident_id")
_index("evidence_state", "evidence", "state")
_index("node_checks_node", "node_checks", "node")
_index("node_checks_state", "node_checks", "state")
_index("node_checks_created", "node_checks", "created_s")
_index("attempts_job", "attempts", "job")
_index("attempts_end", "attempts", "end", where="\"end\" = ''")
_index("attempts_started", "attempts", "started_s")
_index("gpus_node", "gpus", "node")
_index("gpus_moved", "gpus", "moved", where="moved = 1")
_index("driver_errors_node", "driver_errors", "node")
_index("driver_errors_uuid", "driver_errors", "uuid", where="uuid <> ''")
_index("tickets_node", "tickets", "node")
Index("audit_subject", JsonText(AUDIT.c.record, "subject"))
Index("audit_who", JsonText(AUDIT.c.record, "who"))
Index("audit_time", JsonNumber(AUDIT.c.record, "time_s"))


class RecordsDatabase(Protocol):
    """One database on one engine: how it is connected to, who may write, and what its errors mean."""

    where: str  # the file or the database, for people
    readers: int  # connections that read at a time
    mark: str  # of a parameter, in a statement that is handed to the driver as it is
    failures: tuple[type[Exception], ...]  # what its use raises where it fails; nothing else is a failure of it
    triggers: tuple[str, ...]  # statements that make the audit trail append-only and have changes of tokens counted

    @property
    def damage(self) -> str | None:
        """What is known to be damaged."""
        ...

    def connections(self, most: int, *, writing: bool = False) -> sqlalchemy.Engine:
        """Return a pool of at most so many connections, opened when they are needed; for reading unless ``writing``."""
        ...

    def check(self, connection: sqlalchemy.Connection) -> None:
        """Raise StoreUnavailable, with the remedy, where the records cannot be kept in this database."""
        ...

    def is_lost(self, driver: Any) -> bool:
        """Return whether a driver's connection was lost: another one may answer."""
        ...

    def ensure_leading(self) -> None:
        """Raise NotLeading where another server of the same records leads, or may lead by now."""
        ...

    def begin_writing(self, driver: Any) -> None:
        """Begin the only transaction that writes, of all processes, on a driver's connection. Raises NotLeading.

        What is read from here on stays true until its end, whichever connection reads it.
        """
        ...

    def last_id(self, connection: sqlalchemy.Connection, column: sqlalchemy.Column[int]) -> int:
        """Return the last id that the column of a table gave out, of rows that are deleted since, too; 0 for none."""
        ...

    def set_last_id(self, connection: sqlalchemy.Connection, column: sqlalchemy.Column[int], last_id: int) -> None:
        """Have the column give out ids after this one."""
        ...

    def storable(self, text: str) -> str:
        """Return the text as it can be stored."""
        ...

    def unavailable(self, doing: str, error: Exception) -> StoreUnavailable:
        """Return what to raise for a failure: what could not be done, why, and the remedy."""
        ...

    def note_damage(self, how: str) -> None:
        """Record that records are damaged; it is logged once."""
        ...


# What a migration did is never changed. One that says ``keeps_older_servers = True`` only adds what servers of the
# version before need not know: they go on with its tables, and start on them. The database says so itself, since those
# servers do not know the version. What they still need goes in a later version.

MIGRATIONS = Path(__file__).with_name("migrations")
NEWEST_VERSION = "0001"  # of the migrations; most starts have nothing to migrate, and need not ask Alembic
VERSION_TABLE = "alembic_version"
_READERS = sqlalchemy.table("oldest_readers", sqlalchemy.column("version_num"), sqlalchemy.column("oldest"))

_log = logging.getLogger(__name__)


def migrate(database: RecordsDatabase, pool: sqlalchemy.Engine, *, whole: bool = False) -> None:
    """Bring the database to the newest version, in one transaction. Raises StoreUnavailable.

    Tables of a newer version are left as they are, where it keeps them usable for this one; not if ``whole``, for who
    must know all that is in them.
    """
    try:
        with pool.begin() as connection:
            database.check(connection)
            version = version_of(connection)
            if version == NEWEST_VERSION:
                return
            if version is not None and not whole and _is_usable(connection, version):
                _log.warning(
                    "%s has version %s of a newer server, which keeps it usable for this one (%s)",
                    database.where, version, NEWEST_VERSION,
                )  # fmt: skip
                return
        with pool.begin() as connection:
            database.begin_writing(connection.connection.driver_connection)
            upgrade(database, connection)
    except database.failures as error:
        raise database.unavailable("opened or migrated", error) from error


def version_of(connection: sqlalchemy.Connection) -> str | None:
    """Return the version of the database's tables; None for one that Alembic has not migrated yet."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    version: str | None = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()  # noqa: S608
    return version


def upgrade(database: RecordsDatabase, connection: sqlalchemy.Connection) -> None:
    """Run the migrations that the database lacks, in the transaction that was begun. Raises StoreUnavailable."""
    from alembic import command
    from alembic.script import ScriptDirectory

    version, config = version_of(connection), _alembic_config(connection)
    known = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    if version is not None and version not in known:
        raise StoreUnavailable(
            f"{database.where} has version {version}, this server knows up to {NEWEST_VERSION}: start the newer server"
        )
    config.attributes["triggers"] = database.triggers
    command.upgrade(config, "head")
    _note_readers(connection, ScriptDirectory.from_config(config))


def _is_usable(connection: sqlalchemy.Connection, version: str) -> bool:
    """Return whether the newer server that made this version of the tables keeps them usable for this one."""
    if version <= NEWEST_VERSION or not inspect(connection).has_table(_READERS.name):
        return False
    oldest = connection.execute(sqlalchemy.select(_READERS.c.oldest).where(_READERS.c.version_num == version)).scalar()
    return oldest is not None and oldest <= NEWEST_VERSION


def _note_readers(connection: sqlalchemy.Connection, scripts: ScriptDirectory) -> None:
    """Write down the oldest version whose servers may use these tables."""
    oldest = NEWEST_VERSION
    for script in scripts.walk_revisions():
        if not getattr(script.module, "keeps_older_servers", False):
            break
        oldest = str(script.down_revision)
    columns = (sqlalchemy.Column(column.name, sqlalchemy.Text) for column in _READERS.c)
    table = sqlalchemy.Table(_READERS.name, sqlalchemy.MetaData(), *columns)
    table.create(connection, checkfirst=True)
    connection.execute(table.delete())
    connection.execute(table.insert().values(version_num=version_of(connection), oldest=oldest))


def _alembic_config(connection: sqlalchemy.Connection) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    return config
