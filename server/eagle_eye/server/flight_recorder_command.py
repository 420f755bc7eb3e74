"""``eagle-eye flight-recorder``: which ranks hold a hung job up, by PyTorch's dumps of all of them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from eagle_eye.detectors.flight_recorder import Finding, Wait, analyse
from eagle_eye.detectors.types import Blind
from eagle_eye.server.flight_recorder import BadDump, Folder, read_folder

WAITS_SHOWN = 8
RANKS_SHOWN = 16


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the dumps, one for each rank, named by rank")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run(args: argparse.Namespace) -> int:
    """Print who holds the job up; 0 also for "cannot tell", 1 when no dump can be read."""
    try:
        folder = read_folder(args.folder)
    except BadDump as error:
        sys.stderr.write(f"eagle-eye flight-recorder: {error}\n")
        return 1
    found: Finding | str
    try:
        found = analyse(folder.recordings)
    except Blind as reason:
        found = str(reason)
    if args.json:
        sys.stdout.write(msgspec.json.encode(report(folder, found)).decode() + "\n")
        return 0
    for problem in folder.unreadable:
        sys.stderr.write(f"not read: {problem}\n")
    sys.stdout.write("\n".join(_lines(folder, found)) + "\n")
    return 0


def report(folder: Folder, found: Finding | str) -> dict[str, Any]:
    """Return the answer as plain data; ``kind`` None with the reason in ``cannot_tell``."""
    told: dict[str, Any] = {"kind": None, "cannot_tell": found, "culprits": [], "waits": [], "without_dump": []}
    if isinstance(found, Finding):
        told = {
            "kind": found.kind,
            "cannot_tell": None,
            "culprits": found.culprits,
            "application": found.application,
            "summary": found.summary,
            "waits": [_wait(wait) for wait in found.waits],
            "without_dump": found.without_dump,
        }
    return {**told, "dumps": len(folder.recordings), "unreadable": folder.unreadable, "skipped": folder.skipped}


def _wait(wait: Wait) -> dict[str, Any]:
    return {
        "group": wait.group.name,
        "description": wait.group.description,
        "sequence": wait.sequence,
        "operation": wait.operation,
        "waiting": wait.waiting,
        "absent": wait.absent,
    }


def _lines(folder: Folder, found: Finding | str) -> list[str]:
    dumps = f"{len(folder.recordings)} dumps read"
    if isinstance(found, str):
        return [f"cannot tell: {found}", dumps]
    who = ", ".join(f"rank {rank}" for rank in found.culprits) or "nobody"
    lines = [f"{found.kind}: {who}", found.summary, ""]
    for wait in found.waits[:WAITS_SHOWN]:
        lines.append(f"group {wait.group}, number {wait.sequence}: {wait.operation}")
        lines.append(f"    in it:      {_ranks(wait.waiting)}")
        if wait.absent:
            lines.append(f"    not in it:  {_ranks(wait.absent)}")
    if len(found.waits) > WAITS_SHOWN:
        lines.append(f"and {len(found.waits) - WAITS_SHOWN} more operations; --json shows them")
    without = f"; no dump of {_ranks(found.without_dump)}" if found.without_dump else ""
    return [*lines, "", dumps + without]


def _ranks(ranks: tuple[int, ...]) -> str:
    more = f" and {len(ranks) - RANKS_SHOWN} more" if len(ranks) > RANKS_SHOWN else ""
    return ", ".join(str(rank) for rank in ranks[:RANKS_SHOWN]) + more
