"""The innocence storm: everything that looks like a fault and is none, before anybody lets it act.

    python -m benchmarks.innocence                      the engine with a site's defaults, on a fake clock
    python -m benchmarks.innocence --live --slurm       and with real processes, and a real Slurm
    python -m benchmarks.innocence --quick              shorter, as the default tests run it

The claim of each: nothing is asked of anybody. Controls are faults: the same world must find them. ``--live`` takes
some eight minutes, on a machine that does little else; ``--slurm`` five, and needs what make test-full installs. Exit
code 1: something was asked for, or a control was not found.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.innocence import live, slurm
from benchmarks.innocence.examine import Examined, examine
from benchmarks.innocence.situations import CONTROLS, SITUATIONS
from benchmarks.innocence.world import QUICK, WHOLE


def main() -> int:
    """Examine, print and keep."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.innocence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short situations, with floors in proportion")
    parser.add_argument("--live", action="store_true", help="also with a real job, agents, server and launcher")
    parser.add_argument("--slurm", action="store_true", help="also the tests that have a real Slurm")
    parser.add_argument("--only", metavar="WORD", default="", help="situations whose name has it")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing of a live one may be left running
    jobs = list(_jobs(args))
    found: list[Examined] = []
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("situations", total=len(jobs))
        for job in jobs:
            rows = job()
            found += rows
            if args.json:
                sys.stdout.buffer.writelines(msgspec.json.encode(row) + b"\n" for row in rows)
                sys.stdout.flush()
            progress.advance(task)
            _keep(args.out, found)
    if not found:
        parser.error(f"--only {args.only}: no situation has it in its name")
    if not args.json:
        _show(found)
    return int(any(row.problem for row in found))


def _jobs(args: argparse.Namespace) -> Iterator[Callable[[], list[Examined]]]:
    pace = QUICK if args.quick else WHOLE
    for situation in (*SITUATIONS, *CONTROLS):
        if args.only in situation.name:
            yield lambda situation=situation: [examine(situation, pace)]  # type: ignore[misc]  # its default is known
    for play in live.LIVE if args.live else ():
        if args.only in play.__name__:
            yield lambda play=play: [live.examine(play)]  # type: ignore[misc]  # likewise
    if args.slurm:
        yield slurm.examine


def _keep(file: Path | None, found: list[Examined]) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        machine = {"cores": os.cpu_count(), "kernel": platform.release(), "load_average": os.getloadavg()}
        kept = {"machine": machine, "situations": found}
        file.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")


def _show(found: list[Examined]) -> None:
    table = Table("situation", "where", "asked for", "reported", "simulated s", "took s", show_lines=False)
    for row in found:
        asked = f"skipped: {row.skipped}" if row.skipped else row.problem or "; ".join(row.actions) or "nothing"
        style = "red" if row.problem else "yellow" if row.skipped else ""
        simulated = "" if row.simulated_s is None else f"{row.simulated_s:.0f}"
        table.add_row(row.about, row.where, asked, "; ".join(row.told), simulated, f"{row.took_s:.1f}", style=style)
    console = Console(highlight=False)
    console.print(table)
    wrong, skipped = sum(bool(row.problem) for row in found), sum(bool(row.skipped) for row in found)
    console.print(f"{len(found)} situations, {wrong} went wrong, {skipped} skipped")


if __name__ == "__main__":
    sys.exit(main())
