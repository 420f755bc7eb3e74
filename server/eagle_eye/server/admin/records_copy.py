"""Copies all records from one database to another, in parts that are each whole, and compares the two."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import sqlalchemy
from sqlalchemy import Connection, Table, select

from eagle_eye.server.model.errors import CopyFailed
from eagle_eye.server.store import migration
from eagle_eye.server.store.records_database import RecordsDatabase
from eagle_eye.server.store.schema import ACTION_IDS, CELL_LEASES, LEASE, TABLES, TOKEN_CHANGES, metadata
from eagle_eye.server.store.store import CELLS

ROWS_AT_ONCE = 1_000


class CopiedTable(msgspec.Struct, frozen=True):
    """A table that both have: its rows, and those of them that were copied this time."""

    table: str
    rows: int
    copied: int


def copy(
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
        migration.migrate(source, reads, whole=True)
        migration.migrate(target, writes, whole=True)
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
