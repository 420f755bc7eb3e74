"""Takeovers between two servers on one PostgreSQL, under load, with a fault during each outage.

    python -m benchmarks.failover --takeovers 18 --lease 5 --seed 1 --out benchmarks/results/failover.json
    python -m benchmarks.failover --takeovers 500 --lease 1 --out benchmarks/results/failover-long.json

Some 45 s each with a lease of 5 s. Needs Debian's postgresql-15. The file is whole after every takeover: the same
command goes on where one was interrupted or time was up. Exit code 1: something that was asked was missed; 2: wrong
usage.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from benchmarks.failover.figures import missed
from benchmarks.failover.keeping import Kept, keep, opened
from benchmarks.failover.plan import AWAY_S, KINDS, Item, draw
from benchmarks.failover.run import Run
from benchmarks.failover.servers import Database, database
from benchmarks.failover.show import show
from eagle_eye.demo.two_servers import postgresql_programs

_COLUMNS = (*Progress.get_default_columns(), TimeElapsedColumn(), TextColumn("{task.fields[now]}"))


def main() -> int:
    """Measure, print and keep."""
    args = _arguments()
    until_s = time.monotonic() + 60.0 * args.minutes
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = {"lease_s": args.lease, "away_s": args.away, "seed": args.seed, "kinds": args.kinds}
    try:
        kept = opened(args.out, settings)
    except ValueError as error:
        sys.stderr.write(f"benchmarks.failover: --out: {error}\n")
        return 2
    if (bin_ := postgresql_programs()) is None:
        sys.stderr.write("benchmarks.failover: PostgreSQL is not installed: apt-get install postgresql-15\n")
        return 2
    items = draw(args.takeovers, args.seed, args.lease, args.kinds, args.away)
    console, failure = Console(stderr=True), 0
    with (
        Progress(*_COLUMNS, console=console, disable=not sys.stderr.isatty()) as progress,
        database(bin_) as served,
    ):
        try:
            asyncio.run(_measure(args, kept, items, served, until_s, progress))
        except KeyboardInterrupt:
            console.print("interrupted" + ("; the same command goes on from here" if args.out else ""))
            failure = 130
        except RuntimeError as error:
            console.print(str(error), markup=False)
            failure = 1
    keep(args.out, kept)
    show(kept, as_json=args.json)
    if failure or not kept.outcomes:
        return failure or 1
    if left := len(items) - len(kept.outcomes):
        console.print(f"{left} takeovers are left; the same command goes on with them")
    return 1 if missed(kept.figures, args.lease) else 0


async def _measure(
    args: argparse.Namespace,
    kept: Kept,
    items: list[Item],
    served: Database,
    until_s: float,
    progress: Progress,
) -> None:
    task = progress.add_task("takeovers", total=len(items), completed=len(kept.outcomes), now="")
    while len(kept.outcomes) < len(items) and time.monotonic() < until_s:
        folder = Path(tempfile.mkdtemp(prefix="failover-", dir=args.folder))
        run = Run(served, folder, args.lease, args.away, lambda text: progress.update(task, now=text))
        try:
            await run.start()
            while not run.lost and len(kept.outcomes) < len(items) and time.monotonic() < until_s:
                outcome = await run.play(items[len(kept.outcomes)])
                kept.outcomes.append(outcome)
                keep(args.out, kept)
                if args.json:
                    sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
                    sys.stdout.flush()
                progress.advance(task)
        finally:
            await run.close()
        if args.folder is None and not run.lost:
            shutil.rmtree(folder)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.failover", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--takeovers", type=int, default=18, help="in all, those in --out included (18)")
    parser.add_argument("--lease", type=float, default=5.0, metavar="S", help="records.lease_s, 1 or more (5)")
    parser.add_argument("--away", type=float, default=AWAY_S, metavar="S",
                        help=f"how long database or both servers are away, where they are ({AWAY_S:g})")  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, help="of the plan (1)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND",
                        help=f"of events, of these alone: {', '.join(KINDS)} (all)")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=60.0, metavar="M", help="begin no takeover later (60)")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where it runs and leaves the logs (a temporary folder, which stays where something is lost)",
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object a line, the figures last")
    args = parser.parse_args()
    if args.takeovers < 1:
        parser.error(f"--takeovers {args.takeovers}: expected 1 or more")
    return args


if __name__ == "__main__":
    sys.exit(main())
