"""``eagle-eye records``: copies a site's records from one database to another."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.admin.records_copy import CopiedTable, copy
from eagle_eye.server.store import settings
from eagle_eye.server.store.data_folder import held
from eagle_eye.server.store.factory import RECORDS_FILE
from eagle_eye.server.store.postgresql import PostgresqlDatabase
from eagle_eye.server.store.records_database import RecordsDatabase
from eagle_eye.server.store.settings import RecordsSettings
from eagle_eye.server.store.sqlite import SqliteFile

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
        copied = copy(source, target, _report)
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
