"""Opens the records where the configuration has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from eagle_eye.server.store.leadership import Leadership, boot_s
from eagle_eye.server.store.settings import RecordsSettings
from eagle_eye.server.store.sql_store import SqlStore
from eagle_eye.server.store.sqlite import SqliteFile

RECORDS_FILE = "records.db"  # in data_dir, unless the records are in another database


def open_records(settings: RecordsSettings, data: Path, leadership: Leadership | None = None) -> SqlStore:
    """Return the records, brought to this version. Raises StoreUnavailable.

    With ``leadership`` they are written while this server leads. Who has a file is said by the lock of its folder
    (``data_folder.py``).
    """
    if not settings.url:
        return open_file(data / RECORDS_FILE)
    from eagle_eye.server.store.postgresql import PostgresqlDatabase

    return SqlStore(PostgresqlDatabase(settings, alone=False, leadership=leadership))


def leadership_of(settings: RecordsSettings, public_url: str, now_s: Callable[[], float] = boot_s) -> Leadership:
    """Return this server's part in leading those on one PostgreSQL database, not started. Raises StoreUnavailable."""
    from eagle_eye.server.store.postgresql import PostgresqlDatabase
    from eagle_eye.server.store.postgresql_lease import PostgresqlLease

    SqlStore(PostgresqlDatabase(settings, alone=False)).close()  # makes the tables
    keeper = PostgresqlLease(PostgresqlDatabase(settings, alone=False))
    keeper.found_cell()
    return Leadership(keeper, settings.server_url.rstrip("/") or public_url, settings.lease_s, now_s)


def open_file(path: Path) -> SqlStore:
    """Return the records in a SQLite file, made if it is not there. Raises StoreUnavailable."""
    return SqlStore(SqliteFile(path))
