"""``eagle-eye backup``: copies the server's files while it runs, and restores them while it does not."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server import config as configuration
from eagle_eye.server.admin.backup import Copied, Reported, back_up, restore
from eagle_eye.server.history.embedded_history import HISTORY_FILE
from eagle_eye.server.model.clock import Clock, SystemClock
from eagle_eye.server.store.factory import RECORDS_FILE

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
