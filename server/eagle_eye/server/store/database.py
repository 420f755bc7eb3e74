"""Opens SQLite files so that commits are durable, and migrates them forward."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from eagle_eye.server.model.errors import StoreUnavailable

DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
BUSY_S = 5.0  # how long to wait for another process (eagle-eye tokens) that holds the file
REMEDY = (
    "put a backup's in its place (eagle-eye backup restore) or begin anew without it (eagle-eye server --accept-empty),"
    " while the server is stopped"
)

_log = logging.getLogger(__name__)


class DatabaseCondition:
    """Whether a file is known to be damaged; ``damage`` describes it, from the first sign until the process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage: str | None = None

    def record_error(self, error: Exception) -> None:
        """Record an error; damage is logged once."""
        if tells_damage(error):
            self.note_damage(str(error))

    def note_damage(self, how: str) -> None:
        """Record damage; it is logged once."""
        if self.damage is None:
            self.damage = f"{self.path} is damaged: {how}; {REMEDY}"
            _log.error("%s", self.damage)


def tells_damage(error: Exception) -> bool:
    """Return whether the error means that the file is damaged, unlike a full disk or a held lock."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in DAMAGED or str(error).startswith("Could not decode to UTF-8")


class DurableConnection(sqlite3.Connection):
    """A connection that detects when its files were deleted, as writes to deleted files are lost silently."""

    files: Mapping[Path, tuple[int, int] | None] = MappingProxyType({})  # device and inode of each

    def check_files(self) -> None:
        """Raise OperationalError unless the open files are still those at their paths."""
        for path, known in self.files.items():
            if _identity(path) != known:
                raise sqlite3.OperationalError(
                    f"{path} was deleted or replaced while it was open, and nothing more can be written:"
                    " restart the server (put a backup back only while it is stopped)"
                )


def connect(path: Path, page_bytes: int | None = None) -> DurableConnection:
    """Return a connection in WAL mode whose commits survive a power cut; the file is readable by its owner only.

    Transactions are begun explicitly. ``page_bytes`` applies to a new file. Raises StoreUnavailable.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _create(path)
        connection = sqlite3.connect(
            path, timeout=BUSY_S, isolation_level=None, check_same_thread=False, factory=DurableConnection
        )
        if page_bytes is not None:
            connection.execute(f"PRAGMA page_size = {page_bytes}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        # Truncates the log when it restarts, so that a large transaction or long read does not keep it large.
        (pages,) = connection.execute("PRAGMA wal_autocheckpoint").fetchone()
        (size_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        connection.execute(f"PRAGMA journal_size_limit = {pages * size_bytes}")
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()  # the log exists from the first read on
        connection.files = {one: _identity(one) for one in (path, path.with_name(f"{path.name}-wal"))}
    except (OSError, sqlite3.Error) as error:
        raise StoreUnavailable(f"{path} cannot be opened: {error}; {_remedy(error)}") from error
    return connection


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _create(path: Path) -> None:
    """Create the file, readable by its owner only: SQLite would apply the umask, and it may hold secrets.

    A file that exists is not opened: closing it would drop the locks of this process's other connections to it (POSIX);
    the next process that closes the file then takes itself for the last and deletes the write-ahead log
    (https://www.sqlite.org/howtocorrupt.html, 2.2).
    """
    with contextlib.suppress(FileExistsError):
        path.touch(mode=0o600, exist_ok=False)


@contextmanager
def transaction(connection: DurableConnection, kind: str = "IMMEDIATE") -> Iterator[None]:
    """Commit what the block wrote, or nothing of it when it raises; ``kind`` "DEFERRED" for a block that only reads.

    Raises sqlite3.Error; nothing is written to files that were deleted or replaced.
    """
    connection.check_files()
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # A full disk rolls back by itself; a second ROLLBACK would hide the reason.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def migrate(connection: sqlite3.Connection, migrations: Sequence[str], path: Path) -> None:
    """Migrate the file to the newest version. Raises StoreUnavailable for a file that a newer server wrote."""
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > len(migrations):
            raise StoreUnavailable(
                f"{path} has version {version}, this server knows up to {len(migrations)}: start the newer server"
            )
        for number in range(version, len(migrations)):
            # executescript commits on its own, so each migration carries its own transaction.
            connection.executescript(
                f"BEGIN IMMEDIATE; {migrations[number]}; PRAGMA user_version = {number + 1}; COMMIT;"
            )
    except sqlite3.Error as error:
        raise StoreUnavailable(f"{path} cannot be read or migrated: {error}; {_remedy(error)}") from error


def _remedy(error: Exception) -> str:
    if tells_damage(error):
        return f"it is damaged: {REMEDY}"
    return "data_dir must be a folder that this user can write, with free space"
