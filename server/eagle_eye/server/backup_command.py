"""``eagle-eye backup``: a copy of the server's files, made while it runs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from eagle_eye.server import config as configuration
from eagle_eye.server.backup import Copied, back_up
from eagle_eye.server.clock import Clock, SystemClock
from eagle_eye.server.errors import BackupFailed
from eagle_eye.server.sqlite_store import RECORDS_FILE


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("destination", type=Path, metavar="DEST", help="the folder to make; must not exist")
    parser.add_argument("--records-only", action="store_true", help="without frames and evidence: small and quick")
    parser.add_argument("--data", metavar="DIR", help="folder of the server's files, as the server has it")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the server's TOML file")
    parser.add_argument("--json", action="store_true", help="print what was copied as JSON")


def run(args: argparse.Namespace, clock: Clock | None = None) -> int:
    """Make the backup; 1 when there is none afterwards. Raises ConfigurationError."""
    clock = clock or SystemClock()
    config = configuration.load(args.config, os.environ, {"data_dir": args.data})
    # A timer that ends the command must not leave half a backup behind.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    started_s = clock.monotonic_s()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    tasks = {}

    def told(file: str, done: int, total: int) -> None:
        if file not in tasks:
            tasks[file] = progress.add_task(file)
        progress.update(tasks[file], completed=done, total=total)

    try:
        with progress:
            only = (RECORDS_FILE,) if args.records_only else ()
            copied = back_up(Path(config.data_dir), args.destination, only, told)
    except BackupFailed as error:
        sys.stderr.write(f"eagle-eye backup: {error}\n")
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    sys.stdout.write(_report(args.destination, copied, clock.monotonic_s() - started_s, args.json) + "\n")
    return 0


def _report(destination: Path, copied: list[Copied], seconds: float, as_json: bool) -> str:
    size = sum(one.bytes for one in copied)
    if as_json:
        files = [one._asdict() for one in copied]
        return msgspec.json.encode(
            {"destination": str(destination.absolute()), "bytes": size, "seconds": round(seconds, 3), "files": files}
        ).decode()
    return f"{destination}: {len(copied)} files, {size / (1 << 20):.1f} MiB in {seconds:.1f} s, checked"
