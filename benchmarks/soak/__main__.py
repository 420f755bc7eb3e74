"""A server under a fleet that lives: faults, jobs and nodes that come and go, restarts of everything, for hours.

    python -m benchmarks.soak
    python -m benchmarks.soak --hours 1
    python -m benchmarks.soak --hours 24 --seed 2

A real server in a folder of its own, agents over the real wire, a real subscriber. In the first third the server is
killed and stopped again and again; then it is left to itself, while agents, subscriber, nodes and jobs are not. Exit
code 1: something acknowledged was lost or is there twice, a fault has not one incident and one action, a healthy node
was to be excluded, a webhook was repeated, or in the second half memory, files, threads, latency or disk grew.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table

from benchmarks.soak.plan import plan
from benchmarks.soak.report import report
from benchmarks.soak.soak import Soak

HOUR_S = 3_600.0
SMALL_S, SMALL_NODES, NODES = 75.0, 60, 500


def main() -> int:
    """Run it, print and keep what came of it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--hours", type=float, metavar="H", help="with 500 nodes")
    length.add_argument(
        "--seconds", type=float, default=SMALL_S, metavar="S", help=f"({SMALL_S:g}, with {SMALL_NODES} nodes)"
    )
    parser.add_argument("--nodes", type=int, metavar="N")
    parser.add_argument("--gpus", type=int, default=8, metavar="G", help="GPUs a node (8)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="the same seed draws the same plan")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="where data and logs go, and stay (a temporary folder)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the figures")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    duration_s = args.hours * HOUR_S if args.hours else args.seconds
    nodes = args.nodes or (NODES if args.hours else SMALL_NODES)
    asked = plan(duration_s, nodes, args.gpus, args.seed)
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        found = asyncio.run(_run(Soak(asked, args.folder or Path(temporary))))
    found["machine"] = {"cores": os.cpu_count(), "kernel": platform.release(), "load_average": os.getloadavg()}
    text = msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"
    if args.out:
        args.out.write_bytes(text)
    if args.json:
        sys.stdout.buffer.write(text)
    else:
        _show(found, Console())
    return 0 if found["held"] else 1


async def _run(soak: Soak) -> dict[str, object]:
    console = Console(stderr=True)
    with Live(console=console, refresh_per_second=1, transient=True) as live:
        await soak.run(lambda: live.update(_progress(soak)) if console.is_terminal else None)
    return report(soak)


def _progress(soak: Soak) -> Table:
    table = Table(title=f"{soak.seconds:.0f} of {soak.plan.duration_s:.0f} s: {soak.phase}", title_justify="left")
    for column in ("frames acknowledged", "waiting", "faults", "open", "webhooks", "memory", "files", "wrong"):
        table.add_column(column, justify="right")
    last = soak.looks[-1] if soak.looks else None
    table.add_row(
        f"{soak.agents.tally.acknowledged:,}",
        f"{soak.agents.waiting:,}",
        f"{len(soak.world.faults):,}",
        f"{soak.world.open_faults():,}",
        f"{len(soak.received.events):,}",
        f"{last.rss_bytes / 1e6:.0f} MB" if last else "-",
        f"{last.files:.0f}" if last else "-",
        f"{len(soak.world.wrong):,}",
    )
    return table


def _show(found: dict[str, object], console: Console) -> None:
    growth, claims = found["growth"], found["claims"]
    assert isinstance(growth, dict)
    assert isinstance(claims, dict)
    table = Table(title="The second half", title_justify="left")
    for column in ("", "level", "growth", "95% interval", ""):
        table.add_column(column, justify="left" if column == "" else "right")
    for name, one in growth.items():
        if one["ratio"] is None:
            table.add_row(name, f"{one['level'] or 0.0:.6g}", "-", "-", one["word"])
            continue
        interval = f"{one['low']:+.2%} to {one['high']:+.2%}"
        table.add_row(name, f"{one['level']:.6g}", f"{one['ratio']:+.2%}", interval, one["word"])
    console.print(table)
    for name, claim in claims.items():
        console.print(f"{'held  ' if claim['held'] else 'MISSED'}  {name}: {claim['found']}", highlight=False)
    for line in found["wrong"] if isinstance(found["wrong"], list) else []:
        console.print(f"        {line}", highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(main())
