"""The server's data folder: one server holds it, and damage in its files is found before they are opened, and later.

Touches: a lock file in the folder; damaged files are set aside.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import socket
import sqlite3
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np

from eagle_eye.schema.record_types import prepare_record_types
from eagle_eye.server.history import journal_reader
from eagle_eye.server.history.embedded_history import HISTORY_FILE, HISTORY_FOLDER, EmbeddedHistory
from eagle_eye.server.history.processes import end_with_parent, environment
from eagle_eye.server.history.segment_tables import RAW_FOLDER
from eagle_eye.server.model.errors import HistoryUnavailable, StoreUnavailable, how_it_ended, in_words
from eagle_eye.server.requests.evidence import EVIDENCE_FOLDER
from eagle_eye.server.store import schema
from eagle_eye.server.store.database import REMEDY, tells_damage
from eagle_eye.server.store.schema import NEWEST_VERSION, VERSION_TABLE
from eagle_eye.server.store.sql_store import RECORDS_FILE, SqlStore

# One server at a time has the folder. The lock is the kernel's (flock), on a file that is never deleted: it is released
# when its process ends, for whatever reason, so leftovers of a killed server or another host never block a start. Child
# processes do not inherit it. ``eagle-eye tokens`` and ``eagle-eye backup`` do not take it.

LOCK_FILE = "server.lock"
ASIDE = "set-aside-"  # name prefix of a folder that keeps damaged or replaced files
NOTE_BYTES_MAX = 4_096


class Note(msgspec.Struct, frozen=True):
    """The contents of the lock file: the current or last holder of the folder, and its databases so far."""

    pid: int = 0
    host: str = ""
    listen: str = ""
    databases: tuple[str, ...] = ()


class FolderLock:
    """A folder that this process holds; ``before`` is the lock file's content from before."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder = folder
        self.before = _note_in(descriptor)
        self._descriptor = descriptor

    def write_owner(self, listen: str, databases: Sequence[str]) -> None:
        """Write this process, its address and the folder's databases to the lock file. Raises StoreUnavailable."""
        note = Note(os.getpid(), socket.gethostname(), listen, tuple(databases))
        try:
            content = msgspec.json.encode(note) + b"\n"
            os.pwrite(self._descriptor, content, 0)
            os.ftruncate(self._descriptor, len(content))
        except OSError as error:
            raise StoreUnavailable(f"{self.folder / LOCK_FILE} cannot be written: {error}") from error


@contextmanager
def held(folder: Path, listen: str = "") -> Iterator[FolderLock]:
    """Hold the folder while the block runs. Raises StoreUnavailable, naming the holder, if another process does."""
    path = folder / LOCK_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = _locked(path)
    except OSError as error:
        raise StoreUnavailable(
            f"{path} cannot be locked: {error}; data_dir must be a folder on a local disk that this user can write"
        ) from error
    try:
        hold = FolderLock(folder, descriptor)
        hold.write_owner(listen, hold.before.databases)
        yield hold
    finally:
        os.close(descriptor)


def new_aside(folder: Path) -> Path:
    """Return the name of a set-aside folder in ``folder`` that does not exist yet."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    names = (f"{ASIDE}{stamp}{f'-{number}' if number else ''}" for number in range(1_000))
    return next(path for name in names if not (path := folder / name).exists())


def set_aside(aside: Path, paths: Iterable[Path]) -> None:
    """Move those of the paths that exist into ``aside``, keeping their names. Raises OSError."""
    for path in paths:
        if path.exists():
            to = aside / path.relative_to(aside.parent)
            to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.rename(to)


def had(folder: Path) -> tuple[str, ...]:
    """Return the databases that the folder is known to have had, whoever holds it."""
    try:
        with (folder / LOCK_FILE).open("rb") as file:
            return _note_in(file.fileno()).databases
    except OSError:
        return ()


def _locked(path: Path) -> int:
    """Return a descriptor of the file now at this path, locked. Raises OSError, StoreUnavailable."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            message = _refusal(path.parent, _note_in(descriptor))
            os.close(descriptor)
            raise StoreUnavailable(message) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # deleted between the two calls: lock the next one instead


def _refusal(folder: Path, holder: Note) -> str:
    who = f"process {holder.pid} on host {holder.host}" if holder.pid else "another process"
    where = f", which listens on {holder.listen}" if holder.listen else ""
    return f"{folder} is in use by {who}{where}: stop it first, or name another folder (--data)"


def _note_in(descriptor: int) -> Note:
    try:
        return msgspec.json.decode(os.pread(descriptor, NOTE_BYTES_MAX, 0), type=Note)
    except msgspec.MsgspecError:
        return Note()  # empty, or not written by us: it names no holder


# Reads a database's write-ahead log (SQLite's format: https://www.sqlite.org/fileformat2.html#walformat).
#
# SQLite uses the frames up to the first wrong checksum and silently ignores the rest: after a power cut that is the
# transaction that was never acknowledged. More than that is damage.

HEADER = struct.Struct(">IIIIIIII")  # magic, version, page size, checkpoint, two salts, two sums
FRAME = struct.Struct(">IIIIII")  # page, database size in pages if it ends a commit, two salts, two sums
MAGIC, BIG_ENDIAN = 0x377F0682, 1
_MASK = 0xFFFFFFFF

_Sums = tuple[int, int]


class WriteAheadLog(NamedTuple):
    """The whole commits are in the first ``bytes``: ``pages``, and the database's ``size_pages`` (0: no commit).

    ``damaged``: behind them is more than one unacknowledged commit.
    """

    bytes: int
    pages: frozenset[int]
    size_pages: int
    damaged: bool


def read_log(path: Path) -> WriteAheadLog:
    """Return the log's contents; one that does not exist or was never written is empty. Raises OSError."""
    try:
        with path.open("rb") as file:
            return _read_frames(file)
    except FileNotFoundError:
        return WriteAheadLog(0, frozenset(), 0, damaged=False)


def _read_frames(file: BinaryIO) -> WriteAheadLog:
    head = file.read(HEADER.size)
    if len(head) < HEADER.size or not any(head):
        return WriteAheadLog(0, frozenset(), 0, damaged=False)
    magic, _, page_bytes, _, *salts, one, two = HEADER.unpack(head)
    order = ">u4" if magic & BIG_ENDIAN else "<u4"
    sums = (one, two)
    whole = magic & ~BIG_ENDIAN == MAGIC and sums == _sums(np.frombuffer(head[:24], order), (0, 0))
    if not whole:
        return WriteAheadLog(0, frozenset(), 0, damaged=bool(file.read(1)))
    pages: set[int] = set()
    pending: set[int] = set()
    end, size_pages, lost = HEADER.size, 0, 0
    while len(frame := file.read(FRAME.size + page_bytes)) == FRAME.size + page_bytes:
        page, commit, *of_frame, one, two = FRAME.unpack_from(frame)
        if of_frame != salts:  # of an earlier round, already in the database
            if whole:
                break
            continue
        if whole:
            sums = _sums(np.frombuffer(frame[:8] + frame[FRAME.size :], order), sums)
            whole = sums == (one, two)
        if not whole:
            lost += commit != 0
            continue
        pending.add(page)
        if commit:
            pages |= pending
            pending.clear()
            end, size_pages = file.tell(), commit
    return WriteAheadLog(end, frozenset(pages), size_pages, damaged=lost > 1)


def _sums(words: np.ndarray[Any, Any], before: _Sums) -> _Sums:
    """Return SQLite's checksum of the words, continuing from ``before``: s0 += x0 + s1; s1 += x1 + s0 for each pair."""
    weights = _weights(len(words) // 2)
    (a, b), (c, d) = weights.before
    words = words.astype(np.uint32)
    return (
        (a * before[0] + b * before[1] + int(np.dot(weights.first, words))) & _MASK,
        (c * before[0] + d * before[1] + int(np.dot(weights.second, words))) & _MASK,
    )


class _Weights(NamedTuple):
    before: tuple[_Sums, _Sums]
    first: np.ndarray[Any, Any]
    second: np.ndarray[Any, Any]


@lru_cache(maxsize=8)
def _weights(pairs: int) -> _Weights:
    """Return the weight of each word in the sums of ``pairs`` pairs: the recurrence is linear."""
    (a, b), (c, d) = (1, 0), (0, 1)  # the steps after a pair, as a matrix
    first, second = np.empty(2 * pairs, np.uint32), np.empty(2 * pairs, np.uint32)
    for at in range(2 * pairs - 2, -1, -2):
        first[at], first[at + 1] = (a + b) & _MASK, b
        second[at], second[at + 1] = (c + d) & _MASK, d
        (a, b), (c, d) = ((a + b) & _MASK, (a + 2 * b) & _MASK), ((c + d) & _MASK, (c + 2 * d) & _MASK)
    return _Weights(((a, b), (c, d)), first, second)


# Finds damage in a folder's databases in bounded time, before they are opened.
#
# Small files are checked completely; for large ones the header, the size, the tables and both ends of each. The rest is
# left to ``Integrity``, beside the server.

DATABASES = (RECORDS_FILE, HISTORY_FILE)
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
        log = read_log(beside)
        if log.damaged:
            return [FileDamage(beside, "is damaged: commits that were acknowledged cannot be read from it")]
        what = _wrong(path, log)
    except PermissionError:
        return []  # reported by the code that opens it
    return [] if what is None else [FileDamage(path, what)]


def _wrong(path: Path, log: WriteAheadLog) -> str | None:
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)) as reader:
        try:
            return _cut_off(reader, path, log) or _foreign(reader, path) or _broken(reader, path)
        except sqlite3.Error as error:
            # Locks and disk failures are reported by the code that opens it.
            return f"is damaged: {error}" if tells_damage(error) else None


def _cut_off(reader: sqlite3.Connection, path: Path, log: WriteAheadLog) -> str | None:
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
            return {VERSION_TABLE}
        of_this_version = reader.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchone() == (NEWEST_VERSION,)  # noqa: S608
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
        file.truncate(read_log(path).bytes)


# Slowly reads all of the server's databases and segments beside it, to find damage before the data is needed.
#
# ``python -m eagle_eye.server.admin.data_folder DATA`` reads in a low-priority process of its own, and reports damage
# as JSON lines on standard output. It reads in short transactions, so that the write-ahead logs stay short. The server
# starts it a while after its own start, and then daily.

AFTER_S, EVERY_S = 60.0, 86_400.0
NICENESS = 19
SHARE = 0.1  # of a core and of the disk's throughput: it sleeps the rest of the time
ROWS_AT_ONCE = 8  # rows of frames have some MiB each
STRUCTURE_BYTES_MAX = 1 << 30  # of a file whose structure is checked in one transaction, which takes seconds


class IntegrityProblem(msgspec.Struct, frozen=True):
    """Damage of a database, or of a segment in a folder of the history."""

    problem: str
    database: str = ""
    folder: str = ""
    segment: str = ""


Rest = Callable[[], None]


def findings(data: Path, rest: Rest) -> Iterator[IntegrityProblem]:
    """Yield the damage; ``rest`` is called between pieces of work. Raises sqlite3.Error, OSError."""
    for name in DATABASES:
        if (data / name).exists():
            problem = _of_database(data / name, rest)
            if problem is not None:
                yield IntegrityProblem(problem, database=name)
    yield from _of_segments(data, rest)


def _of_database(path: Path, rest: Rest) -> str | None:
    try:
        with closing(_reader(path)) as reader:
            tables = [name for (name,) in reader.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
            for table in sorted(tables):
                at: int | None = -(1 << 62)
                while at is not None:
                    at = _read_some(reader, table, at)
                    rest()
            if path.stat().st_size <= STRUCTURE_BYTES_MAX:
                return whole(reader, path.name)
    except sqlite3.Error as error:
        if not tells_damage(error):
            raise
        return str(error)
    return None


def _read_some(reader: sqlite3.Connection, table: str, after: int) -> int | None:
    """Read some rows completely; return the last one's id, None if there are no more."""
    statement = f'SELECT rowid, * FROM "{table}" WHERE rowid > ? ORDER BY rowid LIMIT ?'  # noqa: S608 - of the schema
    last = None
    for row in reader.execute(statement, (after, ROWS_AT_ONCE if table == "chunks" else 100 * ROWS_AT_ONCE)):
        last = int(row[0])
    return last


def _of_segments(data: Path, rest: Rest) -> Iterator[IntegrityProblem]:
    import pyarrow.parquet as pq

    from eagle_eye.server.history.segment_files import BrokenSegment, Segment, reading

    for folder, name in _named(data / HISTORY_FILE):
        path = data / HISTORY_FOLDER / folder / name
        try:
            Segment(path).check_tables()
            with reading(name):
                for table in sorted(path.glob("*.parquet")):
                    with pq.ParquetFile(table, page_checksum_verification=True) as file:
                        for group in range(file.num_row_groups):
                            file.read_row_group(group, use_threads=False)
                            rest()
        except BrokenSegment as error:
            yield IntegrityProblem(str(error)[:500], folder=folder, segment=name)
        except HistoryUnavailable:
            continue  # not the segment's fault; checked again tomorrow


def _named(path: Path) -> list[tuple[str, str]]:
    """Return folder and name of each segment that the history knows; [] and a report if that cannot be read."""
    try:
        with closing(_reader(path)) as reader:
            raw = reader.execute("SELECT ?, name FROM segments WHERE problem IS NULL", (RAW_FOLDER,)).fetchall()
            return raw + reader.execute("SELECT level, name FROM levels WHERE problem IS NULL").fetchall()
    except sqlite3.Error as error:
        if not tells_damage(error):
            raise
        return []


def _reader(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0, isolation_level=None)


class Integrity:
    """Runs the check beside a server, and reports its findings to the affected components."""

    def __init__(self, data: Path, store: SqlStore, history: EmbeddedHistory) -> None:
        self._data = data
        self._store = store
        self._history = history

    async def run(self, after_s: float = AFTER_S) -> None:
        """Check after ``after_s``, and then daily, until cancelled."""
        while True:
            await asyncio.sleep(after_s)
            after_s = EVERY_S
            await self.check()

    async def check(self) -> None:
        """Check once; findings are noted immediately."""
        command = [sys.executable, "-m", __name__, str(self._data)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=environment())
        assert process.stdout is not None  # noqa: S101 - for the type checker
        assert process.stderr is not None  # noqa: S101
        try:
            async for line in process.stdout:
                await asyncio.to_thread(self.apply_finding, msgspec.json.decode(line, type=IntegrityProblem))
            said = (await process.stderr.read(2_000)).decode(errors="replace").strip()
            if (code := await process.wait()) != 0:
                _log.warning("the check of the files failed and is repeated tomorrow: it %s", how_it_ended(code, said))
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    def apply_finding(self, found: IntegrityProblem) -> None:
        """Apply a finding: a damaged database makes the server unready, a damaged segment is set aside."""
        if found.database == RECORDS_FILE:
            if self._store.where == str(self._data / RECORDS_FILE):  # else they have moved, and this file was left
                self._store.note_damage(found.problem)
        elif found.database == HISTORY_FILE:
            self._history.journal.note_damage(found.problem)
        else:
            try:
                self._history.set_aside(found.folder, found.segment, found.problem)
            except HistoryUnavailable as error:
                _log.warning("segment %s is damaged and cannot be set aside: %s", found.segment, error)


def main(arguments: Sequence[str]) -> int:
    """Read everything; return 1 when that was not possible, with the reason on standard error."""
    end_with_parent()
    os.nice(NICENESS)
    data = Path(arguments[0])
    woke_s = time.monotonic()

    def rest() -> None:
        nonlocal woke_s
        time.sleep((time.monotonic() - woke_s) * (1 - SHARE) / SHARE)
        woke_s = time.monotonic()

    try:
        for found in findings(data, rest):
            sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
            sys.stdout.buffer.flush()
    except (sqlite3.Error, OSError) as error:
        sys.stderr.write(f"{in_words(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    prepare_record_types()
    sys.exit(main(sys.argv[1:]))
