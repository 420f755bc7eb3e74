"""``eagle-eye records``: copies a site's records from one database to another, in parts that are each whole."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import sqlalchemy
from sqlalchemy import Connection, Table, select

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.admin.data_folder import held
from eagle_eye.server.model.errors import CopyFailed
from eagle_eye.server.store import schema, settings
from eagle_eye.server.store.postgresql import PostgresqlDatabase
from eagle_eye.server.store.schema import (
    ACTION_IDS,
    CELL_LEASES,
    LEASE,
    TABLES,
    TOKEN_CHANGES,
    RecordsDatabase,
    metadata,
)
from eagle_eye.server.store.settings import RecordsSettings
from eagle_eye.server.store.sql_store import RECORDS_FILE, SqliteFile
from eagle_eye.server.store.store import CELLS

ROWS_AT_ONCE = 1_000


class CopiedTable(msgspec.Struct, frozen=True):
    """A table that both have: its rows, and those of them that were copied this time."""

    table: str
    rows: int
    copied: int


def copy_records(
    source: RecordsDatabase, target: RecordsDatabase, report: Callable[[CopiedTable], None] = lambda _: None
) -> list[CopiedTable]:
    """Copy what the target lacks, and return what both have. Broken off, it goes on where it stopped.

    Raises CopyFailed if the target holds other records, before anything is written; StoreUnavailable.
    """
    # Of the count of changed tokens only its changing matters, and who leads is each database's own.
    own = (TOKEN_CHANGES, LEASE, CELL_LEASES, TABLES[CELLS.name], ACTION_IDS)
    tables = [table for table in metadata.sorted_tables if table not in own]
    reads, writes = source.connections(1, writing=True), target.connections(1, writing=True)
    copied = []
    try:
        schema.migrate(source, reads, whole=True)
        schema.migrate(target, writes, whole=True)
        with reads.connect() as reading:
            there = {table.name: _already(table, source, target, reading, writes) for table in tables}
            with writes.begin() as connection:
                target.begin_writing(connection.connection.driver_connection)
                connection.execute(
                    ACTION_IDS.update().values(salt=reading.execute(select(ACTION_IDS.c.salt)).scalar_one())
                )
            for table in tables:
                _copy_table(table, source, target, reading, writes, there[table.name].last_id)
                now = _already(table, source, target, reading, writes, whole=True)
                copied.append(CopiedTable(str(table.name), now.rows, now.rows - there[table.name].rows))
                report(copied[-1])
    except (*source.failures, *target.failures) as error:
        said = " ".join(str(getattr(error, "orig", None) or error).split())
        raise CopyFailed(
            f"{source.where} cannot be copied to {target.where}: {said}; the same command goes on where it stopped"
        ) from error
    finally:
        reads.dispose()
        writes.dispose()
    return copied


class _Part(NamedTuple):
    """The rows of a table up to an id: how many, the last one's id, and a checksum of them."""

    rows: int
    last_id: int
    sha256: str


def _already(
    table: Table,
    source: RecordsDatabase,
    target: RecordsDatabase,
    reading: Connection,
    writes: sqlalchemy.Engine,
    *,
    whole: bool = False,
) -> _Part:
    """Return what the target has of a table. Raises CopyFailed unless the source has just the same, up to there."""
    with writes.connect() as connection:
        ours = _part(table, connection, target, None)
    theirs = _part(table, reading, target, None if whole else ours.last_id)
    if ours != theirs:
        raise CopyFailed(
            f"{target.where} has {ours.rows} rows of {table.name} where {source.where} has {theirs.rows}, or they are"
            " not the same: these are other records, or they changed since the copy began; name an empty database"
        )
    return ours


def _copy_table(
    table: Table,
    source: RecordsDatabase,
    target: RecordsDatabase,
    reading: Connection,
    writes: sqlalchemy.Engine,
    after: int,
) -> None:
    for rows in _rows(table, reading, after):
        with writes.begin() as connection:
            target.begin_writing(connection.connection.driver_connection)
            connection.execute(table.insert(), [_storable(row, target) for row in rows])
    (row_id,) = table.primary_key.columns
    last_id = source.last_id(reading, row_id)
    if last_id:
        with writes.begin() as connection:
            target.begin_writing(connection.connection.driver_connection)
            target.set_last_id(connection, row_id, last_id)


def _rows(table: Table, connection: Connection, after: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows with greater ids, oldest first, in parts."""
    (row_id,) = table.primary_key.columns
    while True:
        found = connection.execute(select(table).where(row_id > after).order_by(row_id).limit(ROWS_AT_ONCE))
        rows = [dict(row) for row in found.mappings()]
        if not rows:
            return
        yield rows
        after = rows[-1][row_id.name]


def _part(table: Table, connection: Connection, target: RecordsDatabase, until: int | None) -> _Part:
    """Return the rows up to an id, as the target stores them."""
    (row_id,) = table.primary_key.columns
    count, last_id, digest = 0, 0, hashlib.sha256()
    for rows in _rows(table, connection, 0):
        for row in rows:
            if until is not None and row[row_id.name] > until:
                return _Part(count, last_id, digest.hexdigest())
            count, last_id = count + 1, row[row_id.name]
            digest.update(repr(list(_storable(row, target).items())).encode())
    return _Part(count, last_id, digest.hexdigest())


def _storable(row: dict[str, Any], target: RecordsDatabase) -> dict[str, Any]:
    return {name: target.storable(value) if isinstance(value, str) else value for name, value in row.items()}


SQLITE = "sqlite:"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's verbs."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    verb = verbs.add_parser("copy", help="copy all records to another database, and compare the two")
    database = f"{SQLITE}DIR (the server's folder), or postgresql://USER@HOST/NAME as records.url has it"
    verb.add_argument("--from", dest="source", required=True, metavar="DATABASE", help=database)
    verb.add_argument("--to", dest="target", required=True, metavar="DATABASE", help="likewise; empty, or begun before")
    verb.add_argument("--password-file", default="", metavar="FILE", help="as records.password_file has it")
    verb.add_argument("--json", action="store_true", help="print what was copied as JSON")


def run(args: argparse.Namespace) -> int:
    """Copy the records and return the exit code. Raises ConfigurationError, StoreUnavailable, CopyFailed."""
    with (
        _opened("--from", args.source, args.password_file) as source,
        _opened("--to", args.target, args.password_file) as target,
    ):
        copied = copy_records(source, target, _report)
    if args.json:
        sys.stdout.write(msgspec.json.encode(copied).decode() + "\n")
    rows = sum(table.rows for table in copied)
    sys.stderr.write(f"{target.where} has all {rows} rows of {len(copied)} tables, compared one by one\n")
    return 0


def _report(table: CopiedTable) -> None:
    before = f", {table.rows - table.copied} of them before" if table.copied < table.rows else ""
    sys.stderr.write(f"{table.table}: {table.rows} rows{before}\n")


@contextmanager
def _opened(flag: str, database: str, password_file: str) -> Iterator[RecordsDatabase]:
    """Yield the database, which no server uses meanwhile. Raises ConfigurationError, StoreUnavailable."""
    if not database.startswith(SQLITE):
        asked = RecordsSettings(database or "?", password_file)
        try:
            settings.check(asked)
        except ConfigurationError as error:
            raise ConfigurationError(f"{flag}: {error}; or {SQLITE}DIR, the server's folder") from None
        yield PostgresqlDatabase(asked, alone=True)
        return
    folder = Path(database.removeprefix(SQLITE)).expanduser()
    if folder.name == RECORDS_FILE:
        folder = folder.parent
    if not (flag == "--to" or (folder / RECORDS_FILE).is_file()):
        raise ConfigurationError(f"{flag}: {folder} holds no {RECORDS_FILE}; is it the server's data_dir?")
    with held(folder):
        yield SqliteFile(folder / RECORDS_FILE)
