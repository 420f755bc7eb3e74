"""Opens the records where the configuration has them."""

from __future__ import annotations

from pathlib import Path

from eagle_eye.server.store.settings import RecordsSettings
from eagle_eye.server.store.sql_store import SqlStore
from eagle_eye.server.store.sqlite import SqliteFile

RECORDS_FILE = "records.db"  # in data_dir, unless the records are in another database


def open_records(settings: RecordsSettings, data: Path, *, alone: bool = False) -> SqlStore:
    """Return the records, brought to this version; a server has them ``alone``. Raises StoreUnavailable.

    For a file that is said by the lock of its folder (``data_folder.py``).
    """
    if not settings.url:
        return open_file(data / RECORDS_FILE)
    from eagle_eye.server.store.postgresql import PostgresqlDatabase

    return SqlStore(PostgresqlDatabase(settings, alone=alone))


def open_file(path: Path) -> SqlStore:
    """Return the records in a SQLite file, made if it is not there. Raises StoreUnavailable."""
    return SqlStore(SqliteFile(path))
