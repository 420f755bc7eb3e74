"""Brings the tables of a database to this version's, with Alembic. The versions are in ``migrations``.

A version that says ``keeps_older_servers = True`` only adds what servers of the version before need not know: they go
on with its tables, and start on them. The database says so itself, since those servers do not know the version.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy
from sqlalchemy import inspect, text

from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.store.records_database import RecordsDatabase

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

VERSIONS = Path(__file__).with_name("migrations")
NEWEST = "0008"  # of the versions; most starts have nothing to migrate, and need not ask Alembic
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
            if version == NEWEST:
                return
            if version is not None and not whole and _is_usable(connection, version):
                _log.warning(
                    "%s has version %s of a newer server, which keeps it usable for this one (%s)",
                    database.where, version, NEWEST,
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

    version, config = version_of(connection), _config(connection)
    known = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    if version is not None and version not in known:
        raise StoreUnavailable(
            f"{database.where} has version {version}, this server knows up to {NEWEST}: start the newer server"
        )
    config.attributes["triggers"] = database.triggers
    command.upgrade(config, "head")
    _note_readers(connection, ScriptDirectory.from_config(config))


def _is_usable(connection: sqlalchemy.Connection, version: str) -> bool:
    """Return whether the newer server that made this version of the tables keeps them usable for this one."""
    if version <= NEWEST or not inspect(connection).has_table(_READERS.name):
        return False
    oldest = connection.execute(sqlalchemy.select(_READERS.c.oldest).where(_READERS.c.version_num == version)).scalar()
    return oldest is not None and oldest <= NEWEST


def _note_readers(connection: sqlalchemy.Connection, scripts: ScriptDirectory) -> None:
    """Write down the oldest version whose servers may use these tables."""
    oldest = NEWEST
    for script in scripts.walk_revisions():
        if not getattr(script.module, "keeps_older_servers", False):
            break
        oldest = str(script.down_revision)
    columns = (sqlalchemy.Column(column.name, sqlalchemy.Text) for column in _READERS.c)
    table = sqlalchemy.Table(_READERS.name, sqlalchemy.MetaData(), *columns)
    table.create(connection, checkfirst=True)
    connection.execute(table.delete())
    connection.execute(table.insert().values(version_num=version_of(connection), oldest=oldest))


def _config(connection: sqlalchemy.Connection) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(VERSIONS))
    config.attributes["connection"] = connection
    return config
