"""``eagle-eye backup``: copies the server's files while it runs, and restores them while it does not."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server import config as configuration
from eagle_eye.server.admin.data_folder import held, new_aside, set_aside
from eagle_eye.server.history.embedded_history import HISTORY_FILE, HISTORY_FOLDER
from eagle_eye.server.history.segment_tables import PARTIAL as PARTIAL_SEGMENT
from eagle_eye.server.model.clock import Clock, SystemClock
from eagle_eye.server.model.errors import BackupFailed, StoreUnavailable
from eagle_eye.server.requests.evidence import EVIDENCE_FOLDER
from eagle_eye.server.requests.evidence import PARTIAL as PARTIAL_BUNDLE
from eagle_eye.server.store.sql_store import RECORDS_FILE

# The databases are copied by SQLite's backup API from read transactions that begin together, so that the copies are of
# one moment. Without the transaction each commit of the server would restart the copy, and it would never end. While it
# is open the write-ahead log grows; it shrinks again when the copy is done.

DATABASES = "*.db"
FOLDERS = (HISTORY_FOLDER, EVIDENCE_FOLDER)  # of files that never change once they exist
FILES = "files"  # their name in progress reports
SUMS_FILE = "SHA256SUMS"  # the format of `sha256sum --check`
PARTIAL = ".partial"
PAGES_PER_STEP = 4_096  # 16 MiB between two progress reports
SPARE_BYTES = 64 << 20  # free space beyond the copies' size

Reported = Callable[[str, int, int], None]  # a database's name, bytes copied, total; or FILES, files, total


class Copied(NamedTuple):
    """One file of a backup."""

    file: str  # relative to the backup's folder
    bytes: int
    sha256: str


def back_up(
    data: Path, destination: Path, only: Sequence[str] = (), reported: Reported = lambda *_: None
) -> list[Copied]:
    """Copy the databases of ``data``, its history and evidence; with ``only`` just the databases named there.

    ``destination`` must not exist, or be an empty folder; afterwards it is complete, verified and on disk, or
    unchanged. Raises BackupFailed.
    """
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise BackupFailed(f"{destination} exists and is not an empty folder; name a new one for each backup")
    destination = destination.absolute()
    partial = destination.with_name(destination.name + PARTIAL)
    try:
        with _made(partial):
            copied = _copy(data, partial, only, reported)
            _write_sums(partial, copied)
            partial.replace(destination)
            _sync(destination.parent)
    except OSError as error:
        raise BackupFailed(f"{data} cannot be backed up to {destination}: {error}") from error
    return copied


def restore(backup: Path, data: Path, only: Sequence[str] = (), reported: Reported = lambda *_: None) -> list[Copied]:
    """Replace the databases in ``data`` by a backup's, and add missing files of history and evidence.

    With ``only`` just the databases named there. Everything is verified before anything is changed. Replaced files are
    set aside; segments newer than the backup stay, and the next start adopts them. Returns what was restored. Raises
    BackupFailed, also if a server holds ``data``.
    """
    try:
        with held(data):
            wanted = _wanted(backup, only, reported)
            lacking = [
                one
                for one in wanted
                if "/" not in one.file or not (data / one.file).is_file() or _sha256(data / one.file) != one.sha256
            ]
            _check_room(data, [backup / one.file for one in lacking])
            owner = data.stat()
            for one in lacking:
                _copy_file(backup / one.file, _beside(data / one.file))
            replaced = [data / f"{one.file}{end}" for one in lacking for end in ("", "-wal", "-shm")]
            set_aside(new_aside(data), replaced)
            for one in lacking:
                _beside(data / one.file).replace(data / one.file)
            files = [Path(one.file) for one in lacking]
            for path in {data / above for file in files for above in (file, *file.parents)}:
                if os.geteuid() == 0:
                    os.chown(path, owner.st_uid, owner.st_gid)
                _sync(path)
    except StoreUnavailable as error:
        raise BackupFailed(str(error)) from None
    except OSError as error:
        raise BackupFailed(f"{backup} cannot be restored to {data}: {error}") from error
    return lacking


def _beside(path: Path) -> Path:
    return path.with_name(f"{PARTIAL}-{path.name}")


def _wanted(backup: Path, only: Sequence[str], reported: Reported) -> list[Copied]:
    """Return the backup's files, or those named, each with its verified checksum. Raises BackupFailed."""
    try:
        lines = (backup / SUMS_FILE).read_text(encoding="utf-8").splitlines()
        listed = [(name, digest) for digest, name in (line.split("  ", 1) for line in lines)]
    except (OSError, ValueError) as error:
        raise BackupFailed(f"{backup} is not a complete backup: {SUMS_FILE} cannot be read: {error}") from None
    files = [(name, digest) for name, digest in listed if not only or name in only]
    if not files or any(Path(name).is_absolute() or ".." in Path(name).parts for name, _ in files):
        raise BackupFailed(f"{backup} holds no {' or '.join(only) or 'database'}")
    wanted = []
    for done, (name, digest) in enumerate(files, start=1):
        path = backup / name
        if not path.is_file() or _sha256(path) != digest:
            raise BackupFailed(
                f"{path} is missing or does not match {SUMS_FILE}: nothing was restored; use another backup"
            )
        wanted.append(Copied(name, path.stat().st_size, digest))
        reported(FILES, done, len(files))
    return wanted


def _copy(data: Path, partial: Path, only: Sequence[str], reported: Reported) -> list[Copied]:
    names = list(only) or sorted(path.name for path in data.glob(DATABASES))
    if not names or not all((data / name).is_file() for name in names):
        raise BackupFailed(f"{data} holds no {' or '.join(names) or 'database'}; is it the server's data_dir?")
    copied = []
    with ExitStack() as open_databases:
        sources = [(name, open_databases.enter_context(_reading(data / name))) for name in names]
        # Listed after the databases' moment: a file is on disk before a row names it.
        files = [] if only else [path for folder in FOLDERS for path in _whole_files(data / folder)]
        _check_room(partial, [*(data / name for name in names), *files])
        for name, source in sources:
            with _named(data / name):
                copied.append(_copy_database(source, partial / name, reported))
    for done, path in enumerate(files, start=1):
        kept = _copy_file(path, partial / path.relative_to(data))
        if kept is not None:
            copied.append(Copied(str(path.relative_to(data)), *kept))
        reported(FILES, done, len(files))
    return copied


def _whole_files(folder: Path) -> list[Path]:
    """Return the files below the folder, except those still being written."""

    def whole(path: Path) -> bool:
        unfinished = any(part.startswith(PARTIAL_SEGMENT) for part in path.relative_to(folder).parts)
        return path.is_file() and not unfinished and not path.name.endswith(PARTIAL_BUNDLE)

    return sorted(path for path in folder.rglob("*") if whole(path))


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection with a snapshot of the database, whatever is written meanwhile."""
    with _named(path):
        source = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    with closing(source):
        with _named(path):
            source.execute("BEGIN")
            source.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        yield source


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise BackupFailed(f"{path} cannot be copied: {error}; no backup was kept") from error


def _copy_database(source: sqlite3.Connection, path: Path, reported: Reported) -> Copied:
    page_bytes = source.execute("PRAGMA page_size").fetchone()[0]

    def progress(_status: int, remaining: int, total: int) -> None:
        reported(path.name, (total - remaining) * page_bytes, total * page_bytes)

    path.touch(mode=0o600, exist_ok=False)
    with closing(sqlite3.connect(path, isolation_level=None)) as copy:
        source.backup(copy, pages=PAGES_PER_STEP, progress=progress)
        # One file that needs no write-ahead log beside it; the server switches back to WAL when it opens the file.
        copy.execute("PRAGMA journal_mode = DELETE")
        answer = copy.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if answer != "ok":
        raise sqlite3.DatabaseError(f"it is damaged: {answer}")
    _sync(path)
    return Copied(path.name, path.stat().st_size, _sha256(path))


def _copy_file(path: Path, to: Path) -> tuple[int, str] | None:
    """Return size and hash of the copy; None for a file deleted meanwhile, as the oldest are."""
    to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        shutil.copyfile(path, to)
    except FileNotFoundError:
        return None
    to.chmod(0o600)
    _sync(to)
    return to.stat().st_size, _sha256(to)


def _check_room(partial: Path, files: Sequence[Path]) -> None:
    needed = sum(path.stat().st_size for path in files if path.exists()) + SPARE_BYTES
    free = shutil.disk_usage(partial).free
    if free < needed:
        raise BackupFailed(f"{partial.parent} has {free} bytes free, the backup needs {needed}")


def _write_sums(folder: Path, copied: Sequence[Copied]) -> None:
    sums = folder / SUMS_FILE
    sums.write_text("".join(f"{one.sha256}  {one.file}\n" for one in copied), encoding="utf-8")
    _sync(sums)
    for inner in {(folder / one.file).parent for one in copied}:
        _sync(inner)


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Create the folder, readable by its owner only, and remove it unless the block has renamed it."""
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise BackupFailed(f"{folder} exists: another backup is being made, or was killed: then delete it") from None
    try:
        yield
    finally:
        if folder.exists():
            shutil.rmtree(folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


ELSEWHERE = (
    "the records are in PostgreSQL (records.url): use pg_dump and pg_restore, or the database's own backups, for them"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "words",
        nargs="+",
        metavar="DEST | restore BACKUP",
        help="the folder to make, which must not exist; or the backup that is to be put back",
    )
    parser.add_argument("--records-only", action="store_true", help="without frames and evidence: small and quick")
    parser.add_argument("--history-only", action="store_true", help="restore: history.db alone")
    parser.add_argument("--data", metavar="DIR", help="folder of the server's files, as the server has it")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the server's TOML file")
    parser.add_argument("--json", action="store_true", help="print what was copied as JSON")


def run(args: argparse.Namespace, clock: Clock | None = None) -> int:
    """Make or restore a backup. Raises BackupFailed, ConfigurationError."""
    clock = clock or SystemClock()
    restoring, folder, only = _asked(args)
    config = configuration.load(args.config, os.environ, {"data_dir": args.data})
    if config.records.url:
        if RECORDS_FILE in only:
            raise ConfigurationError(f"--records-only: {ELSEWHERE}")
        only = only or (HISTORY_FILE,) if restoring else only
        sys.stderr.write(f"eagle-eye backup: {ELSEWHERE}; this is the history and the evidence\n")
    # A timer that ends the command must not leave half a backup behind.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    started_s = clock.monotonic_s()
    try:
        with _progress() as reported:
            if restoring:
                copied = restore(folder, Path(config.data_dir), only, reported)
            else:
                copied = back_up(Path(config.data_dir), folder, only, reported)
    finally:
        signal.signal(signal.SIGTERM, before)
    to = Path(config.data_dir) if restoring else folder
    sys.stdout.write(_report(to, copied, clock.monotonic_s() - started_s, args.json) + "\n")
    return 0


def _asked(args: argparse.Namespace) -> tuple[bool, Path, tuple[str, ...]]:
    """Return whether to restore, the backup's folder, and the selected databases. Raises ConfigurationError."""
    restoring = args.words[0] == "restore"
    if len(args.words) != 1 + restoring:
        raise ConfigurationError(
            f"expected DEST, or restore BACKUP; got {' '.join(args.words)} (for a folder of that name: ./restore)"
        )
    if args.records_only and args.history_only:
        raise ConfigurationError("--records-only and --history-only exclude each other")
    if args.history_only and not restoring:
        raise ConfigurationError("--history-only is for backup restore")
    only = (RECORDS_FILE,) if args.records_only else (HISTORY_FILE,) if args.history_only else ()
    return restoring, Path(args.words[-1]), only


@contextmanager
def _progress() -> Iterator[Reported]:
    """Yield a progress callback that draws on standard error if that is a terminal."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    tasks: dict[str, TaskID] = {}

    def reported(file: str, done: int, total: int) -> None:
        if file not in tasks:
            tasks[file] = progress.add_task(file)
        progress.update(tasks[file], completed=done, total=total)

    with progress:
        yield reported


def _report(destination: Path, copied: list[Copied], seconds: float, as_json: bool) -> str:
    size = sum(one.bytes for one in copied)
    if as_json:
        files = [one._asdict() for one in copied]
        return msgspec.json.encode(
            {"destination": str(destination.absolute()), "bytes": size, "seconds": round(seconds, 3), "files": files}
        ).decode()
    return f"{destination}: {len(copied)} files, {size / (1 << 20):.1f} MiB in {seconds:.1f} s, checked"
