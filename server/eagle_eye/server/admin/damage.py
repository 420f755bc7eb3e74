"""Finds damage in a folder's databases in bounded time, before they are opened. Touches: files.

Small files are checked completely; for large ones the header, the size, the tables and both ends of each. The rest is
left to ``whole_check``, beside the server.
"""

from __future__ import annotations

import logging
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from eagle_eye.server.history import journal_reader
from eagle_eye.server.history.embedded_history import HISTORY_FILE, HISTORY_FOLDER
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.requests.evidence import EVIDENCE_FOLDER
from eagle_eye.server.store import schema, write_ahead_log
from eagle_eye.server.store.data_folder import FolderLock, new_aside, set_aside
from eagle_eye.server.store.database import REMEDY, tells_damage
from eagle_eye.server.store.factory import RECORDS_FILE
from eagle_eye.server.store.migration import NEWEST, VERSION_TABLE

DATABASES = (RECORDS_FILE, HISTORY_FILE)
# What every file with records has, whichever server wrote it.
_FIRST_TABLES = frozenset(
    {
        *("actions", "audit", "changes", "deliveries", "events", "incidents", "jobs", "nodes", "subscriptions"),
        "tokens",
    }
)
LOG_SUFFIX = "-wal"
WHOLE_BYTES_MAX = 64 << 20  # largest file that is checked completely before a start: a fraction of a second
LOG_BYTES_MAX = 512 << 20  # largest write-ahead log that is checked: longer ones come from a killed backup
_MAGIC = b"SQLite format 3\0"
_DIRECTORY_LINE_BYTES = 40

_log = logging.getLogger(__name__)


class FileDamage(NamedTuple):
    """A damaged file; ``what`` continues a sentence that begins with its name."""

    path: Path
    what: str


def ready(hold: FolderLock, accept_empty: bool, names: Sequence[str] = DATABASES) -> None:
    """Raise StoreUnavailable, in one line with the remedy, unless the folder's databases of these names may be opened.

    With ``accept_empty`` damaged files are set aside first, and start empty.
    """
    found = troubles(hold.folder, hold.before.databases, names)
    if not found:
        return
    if not accept_empty:
        raise StoreUnavailable("; ".join([*(f"{one.path} {one.what}" for one in found), REMEDY]))
    try:
        aside = new_aside(hold.folder)
        for one in found:
            if one.path.name.endswith(LOG_SUFFIX):
                _cut_log(one.path, aside)
            else:
                set_aside(aside, [one.path.with_name(one.path.name + end) for end in ("", LOG_SUFFIX, "-shm")])
    except OSError as error:
        raise StoreUnavailable(f"{hold.folder}: what is damaged cannot be set aside: {error}") from error
    for one in found:
        where = f"what there was of it is in {aside}" if aside.exists() else "nothing of it was left"
        _log.warning("%s %s: it begins anew (--accept-empty); %s", one.path, one.what, where)


def troubles(folder: Path, had: Sequence[str], names: Sequence[str] = DATABASES) -> list[FileDamage]:
    """Return the damage; ``had`` are the databases that the folder is known to have had. Raises OSError."""
    found = []
    for name in names:
        what = missing(folder, name, had)
        if what is not None:
            found.append(FileDamage(folder / name, what))
        elif (folder / name).exists():
            found += _look(folder / name)
    return found


def missing(folder: Path, name: str, had: Sequence[str]) -> str | None:
    """Return the message for a database that is missing or empty although the folder was in use, else None."""
    path = folder / name
    there = path.exists()
    if (there and path.stat().st_size > 0) or not (name in had or _left(folder, name)):
        return None
    return f"is {'empty' if there else 'missing'}, although this folder was in use"


def _left(folder: Path, name: str) -> bool:
    """Return whether other files show that there was such a database."""
    beside = [folder / f"{name}{LOG_SUFFIX}"]
    if name == RECORDS_FILE:
        beside += [folder / HISTORY_FILE, folder / f"{HISTORY_FILE}{LOG_SUFFIX}"]
    if any(path.exists() and path.stat().st_size > 0 for path in beside):
        return True
    kept = (folder / HISTORY_FOLDER).glob("*/*/segment.json")
    bundles = (folder / EVIDENCE_FOLDER).glob("*") if name == RECORDS_FILE else iter(())
    return next(kept, None) is not None or next(bundles, None) is not None


def _look(path: Path) -> list[FileDamage]:
    """Return the damage of an existing database."""
    beside = path.with_name(path.name + LOG_SUFFIX)
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
        if not magic:
            return []  # a first start that was killed
        if magic != _MAGIC:
            return [FileDamage(path, "is no SQLite database: damaged, or another program's file")]
        if beside.exists() and beside.stat().st_size > LOG_BYTES_MAX:
            return []
        log = write_ahead_log.read(beside)
        if log.damaged:
            return [FileDamage(beside, "is damaged: commits that were acknowledged cannot be read from it")]
        what = _wrong(path, log)
    except PermissionError:
        return []  # reported by the code that opens it
    return [] if what is None else [FileDamage(path, what)]


def _wrong(path: Path, log: write_ahead_log.Log) -> str | None:
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)) as reader:
        try:
            return _cut_off(reader, path, log) or _foreign(reader, path) or _broken(reader, path)
        except sqlite3.Error as error:
            # Locks and disk failures are reported by the code that opens it.
            return f"is damaged: {error}" if tells_damage(error) else None


def _cut_off(reader: sqlite3.Connection, path: Path, log: write_ahead_log.Log) -> str | None:
    (page_bytes,) = reader.execute("PRAGMA page_size").fetchone()
    (pages,) = reader.execute("PRAGMA page_count").fetchone()
    there = path.stat().st_size // page_bytes
    lacking = sum(page not in log.pages for page in range(there + 1, max(pages, log.size_pages) + 1))
    return f"is damaged: {lacking} of its {pages} pages were cut off" if lacking else None


def _foreign(reader: sqlite3.Connection, path: Path) -> str | None:
    (version,) = reader.execute("PRAGMA user_version").fetchone()
    there = _tables(reader)
    lacking = _wanted(reader, path.name, version, there) - there
    if lacking or (version == 0 and there):
        return f"is not the server's: it is another program's database{f', without {min(lacking)}' if lacking else ''}"
    return None


def _wanted(reader: sqlite3.Connection, name: str, version: int, there: set[str]) -> set[str]:
    """Return the tables that a database of this version must have; a newer server's is left to what opens it."""
    if version == 0:
        return set()
    if name == RECORDS_FILE:
        if VERSION_TABLE not in there:
            return set(_FIRST_TABLES)
        of_this_version = reader.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchone() == (NEWEST,)  # noqa: S608
        return set(schema.metadata.tables) if of_this_version else set()
    if version > len(journal_reader.MIGRATIONS):
        return set()
    with closing(sqlite3.connect(":memory:")) as model:
        for migration in journal_reader.MIGRATIONS[:version]:
            model.executescript(migration)
        return _tables(model)


def _tables(connection: sqlite3.Connection) -> set[str]:
    return {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}


def _broken(reader: sqlite3.Connection, path: Path) -> str | None:
    if path.stat().st_size <= WHOLE_BYTES_MAX:
        return whole(reader, path.name)
    for name in _tables(reader):
        for order in ("", "DESC"):
            reader.execute(f'SELECT * FROM "{name}" ORDER BY rowid {order} LIMIT 1').fetchall()  # noqa: S608
    return None


def whole(reader: sqlite3.Connection, name: str) -> str | None:
    """Return the damage of a database that is checked completely. Raises sqlite3.Error."""
    (answer,) = reader.execute("PRAGMA quick_check(1)").fetchone()
    if answer != "ok":
        return f"is damaged: {' '.join(answer.split())}"
    if name == RECORDS_FILE:
        for table in sorted(_tables(reader)):
            if any(column == "record" for _, column, *_ in reader.execute(f'PRAGMA table_info("{table}")')):
                wrong = f'SELECT count(*) FROM "{table}" WHERE NOT json_valid(record)'  # noqa: S608 - of the schema
                (count,) = reader.execute(wrong).fetchone()
                if count:
                    return f"is damaged: {count} records of {table} cannot be read"
    elif "chunks" in _tables(reader):
        wrong = "SELECT count(*) FROM chunks WHERE length(directory) <> frames * ?"
        (count,) = reader.execute(wrong, (_DIRECTORY_LINE_BYTES,)).fetchone()
        if count:
            return f"is damaged: {count} chunks of frames cannot be read"
    return None


def _cut_log(path: Path, aside: Path) -> None:
    """Keep a copy of the log, and truncate it after its last whole commit."""
    aside.mkdir(mode=0o700, exist_ok=True)
    shutil.copy2(path, aside / path.name)
    with path.open("rb+") as file:
        file.truncate(write_ahead_log.read(path).bytes)
