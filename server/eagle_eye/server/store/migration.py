"""Brings the tables of a database to this version's, with Alembic. The versions are in ``migrations``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy
from sqlalchemy import inspect, text

from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.store.records_database import RecordsDatabase

if TYPE_CHECKING:
    from alembic.config import Config

VERSIONS = Path(__file__).with_name("migrations")
NEWEST = "0003"  # of the versions; most starts have nothing to migrate, and need not ask Alembic
VERSION_TABLE = "alembic_version"


def migrate(database: RecordsDatabase, pool: sqlalchemy.Engine) -> None:
    """Bring the database to the newest version, in one transaction. Raises StoreUnavailable."""
    try:
        with pool.begin() as connection:
            database.check(connection)
            if version_of(connection) == NEWEST:
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


def _config(connection: sqlalchemy.Connection) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(VERSIONS))
    config.attributes["connection"] = connection
    return config
