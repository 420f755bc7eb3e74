"""Records whose tables a newer server has migrated: this one goes on with them where that one says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy
from alembic import command
from alembic.config import Config
from alembic.script import Script, ScriptDirectory
from sqlalchemy import inspect

from eagle_eye.server.admin.records_command import copy_records
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.store import schema
from eagle_eye.server.store.sql_store import SqliteFile, SqlStore
from eagle_eye.server.store.store import ACTIONS, Change
from tests.server.builders import action

NEWER = "9000"


@pytest.fixture
def database(tmp_path: Path) -> SqliteFile:
    database = SqliteFile(tmp_path / "records.db")
    SqlStore(database).close()
    return database


def migrated(database: SqliteFile, oldest: str) -> None:
    """Have the tables as a newer server leaves them, usable for servers from ``oldest`` on."""
    with database.connections(1, writing=True).begin() as connection:
        connection.exec_driver_sql("ALTER TABLE actions ADD COLUMN later INTEGER NOT NULL DEFAULT 0")
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{NEWER}'")
        connection.exec_driver_sql(f"UPDATE oldest_readers SET version_num = '{NEWER}', oldest = '{oldest}'")


def test_this_server_goes_on_with_newer_tables_that_are_kept_usable_for_it(database: SqliteFile) -> None:
    migrated(database, oldest=schema.NEWEST_VERSION)
    store = SqlStore(database)
    try:
        store.commit(Change(actions=(action(),)))
        assert [one.id for one in store.all(ACTIONS)] == [action().id]
    finally:
        store.close()


def test_it_leaves_their_version_as_it_is(database: SqliteFile) -> None:
    migrated(database, oldest=schema.NEWEST_VERSION)
    SqlStore(database).close()
    with database.connections(1).connect() as connection:
        assert schema.version_of(connection) == NEWER


def test_newer_tables_that_are_not_kept_usable_for_it_are_refused(database: SqliteFile) -> None:
    migrated(database, oldest=NEWER)
    with pytest.raises(StoreUnavailable, match="start the newer server"):
        SqlStore(database)


def test_what_was_said_of_an_earlier_version_is_not_believed_of_a_later_one(database: SqliteFile) -> None:
    migrated(database, oldest=schema.NEWEST_VERSION)
    with database.connections(1, writing=True).begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9001'")
    with pytest.raises(StoreUnavailable, match="start the newer server"):
        SqlStore(database)


def test_newer_tables_are_not_copied_for_what_is_not_known_would_be_left_out(
    database: SqliteFile, tmp_path: Path
) -> None:
    migrated(database, oldest=schema.NEWEST_VERSION)
    with pytest.raises(StoreUnavailable, match="start the newer server"):
        copy_records(database, SqliteFile(tmp_path / "other.db"))


def keeping() -> Iterator[Script]:
    """Give the versions that say that they keep older servers."""
    config = Config()
    config.set_main_option("script_location", str(schema.MIGRATIONS))
    for script in ScriptDirectory.from_config(config).walk_revisions():
        if getattr(script.module, "keeps_older_servers", False):
            yield script


def test_versions_that_keep_older_servers_only_add_what_these_may_leave_out(tmp_path: Path) -> None:
    for script in keeping():
        database = SqliteFile(tmp_path / f"{script.revision}.db")
        with database.connections(1, writing=True).begin() as connection:
            config = schema._alembic_config(connection)
            config.attributes["triggers"] = database.triggers
            command.upgrade(config, str(script.down_revision))
            before = columns(connection)
            command.upgrade(config, script.revision)
            after = columns(connection)
        for table, known in before.items():
            assert {name: column for name, column in after[table].items() if name in known} == known
            for name in after[table].keys() - known.keys():
                added = after[table][name]
                assert added["nullable"] or added["default"] is not None, f"{table}.{name}"


def columns(connection: sqlalchemy.Connection) -> dict[str, dict[str, dict[str, object]]]:
    """Return the columns of each table, with their types as text."""
    inspector = inspect(connection)
    return {
        table: {str(one["name"]): {**one, "type": str(one["type"])} for one in inspector.get_columns(table)}
        for table in inspector.get_table_names()
    }
