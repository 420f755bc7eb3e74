"""``eagle-eye flight-recorder``: finds the ranks that block a hung job, from all ranks' PyTorch dumps."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from eagle_eye.detectors.progress.flight_recorder import StuckRanks, Wait, analyse
from eagle_eye.detectors.types import Blind
from eagle_eye.server.requests.flight_recorder import Folder, read_folder

WAITS_SHOWN = 8
RANKS_SHOWN = 16
GAPS_RATIO_MAX = 4


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the dumps, one for each rank, named by rank")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the blocking ranks; 0 also for "cannot tell". Raises BadDump when no dump can be read."""
    folder = read_folder(args.folder)
    found: StuckRanks | str
    try:
        found = analyse(folder.recordings, folder.unread)
    except Blind as reason:
        found = str(reason)
    if args.json:
        sys.stdout.write(msgspec.json.encode(report(folder, found)).decode() + "\n")
        return 0
    for problem in folder.unreadable:
        sys.stderr.write(f"not read: {problem}\n")
    sys.stdout.write("\n".join(_lines(folder, found)) + "\n")
    return 0


def report(folder: Folder, found: StuckRanks | str) -> dict[str, Any]:
    """Return the answer as plain data; ``kind`` is None with the reason in ``cannot_tell``."""
    reported: dict[str, Any] = {"kind": None, "cannot_tell": found, "culprits": [], "waits": [], "without_dump": []}
    if isinstance(found, StuckRanks):
        reported = {
            "kind": found.kind,
            "cannot_tell": None,
            "culprits": found.culprits,
            "certain": found.certain and not _without_dump(folder, found),
            "application": found.application,
            "summary": found.summary,
            "hidden": found.hidden,
            "waits": [_wait(wait) for wait in found.waits],
            "without_dump": _without_dump(folder, found),
        }
    return {**reported, "dumps": len(folder.recordings), "unreadable": folder.unreadable, "skipped": folder.skipped}


def _wait(wait: Wait) -> dict[str, Any]:
    return {
        "group": wait.group.name,
        "description": wait.group.description,
        "sequence": wait.sequence,
        "operation": wait.operation,
        "waiting": wait.waiting,
        "absent": wait.absent,
    }


def _lines(folder: Folder, found: StuckRanks | str) -> list[str]:
    dumps = f"{len(folder.recordings)} dumps read"
    without = _without_dump(folder, found)
    one = len(without) == 1
    missing = f"no dump of {'rank' if one else 'ranks'} {_ranks(without)}"
    rest = f"; no dump of {_ranks(without)}" if without else ""
    may = f"{missing}: {'it' if one else 'one of them'} may be what holds the job up"
    if isinstance(found, str):
        return [*([may] if without else []), f"cannot tell: {found}", dumps + rest]
    who = ", ".join(f"rank {rank}" for rank in found.culprits) or "nobody"
    lines = [f"{found.kind}: {who}", found.summary]
    if not set(without) <= set(found.culprits):
        # A rank without a dump may have hung too hard to write one: it must be examined first.
        headline = missing if found.application else may
        lines = [headline, f"of the ranks with a dump, {found.kind}: {who}", found.summary]
        if found.kind == "missing":
            lines[1] = f"{found.kind}: {who}"
    lines += [*([found.hidden] if found.hidden else []), ""]
    for wait in found.waits[:WAITS_SHOWN]:
        lines.append(f"group {wait.group}, number {wait.sequence}: {wait.operation}")
        lines.append(f"    in it:      {_ranks(wait.waiting)}")
        if wait.absent:
            lines.append(f"    not in it:  {_ranks(wait.absent)}")
    if len(found.waits) > WAITS_SHOWN:
        lines.append(f"and {len(found.waits) - WAITS_SHOWN} more operations; --json shows them")
    return [*lines, "", dumps + rest]


def _without_dump(folder: Folder, found: StuckRanks | str) -> tuple[int, ...]:
    """Return the ranks without a readable dump that a group expects, or that are between others."""
    present = {recording.rank for recording in folder.recordings}
    expected = set(found.without_dump) if isinstance(found, StuckRanks) else set[int]()
    highest = max(present, default=-1)
    if highest < GAPS_RATIO_MAX * len(present):  # else ranks are not numbered from 0, or most dumps are missing
        expected |= set(range(highest)) - present
    return tuple(sorted(expected))


def _ranks(ranks: tuple[int, ...]) -> str:
    more = f" and {len(ranks) - RANKS_SHOWN} more" if len(ranks) > RANKS_SHOWN else ""
    return ", ".join(str(rank) for rank in ranks[:RANKS_SHOWN]) + more
