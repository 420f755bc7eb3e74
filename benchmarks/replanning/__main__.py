"""What is left of a job's throughput with fewer nodes by plan, beside Oobleck and Bamboo.

    python -m benchmarks.replanning --draws 20 --out benchmarks/results/replanning.json

Simulated, with layers that are measured on this machine. Without arguments a look at a small size. Exit code 1: a
figure is missed; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.replanning import throughput
from benchmarks.replanning.show import show


def main() -> int:
    """Measure, simulate, print and keep."""
    args = _arguments()
    pauses = {"first_step_s": args.pause, "grow_s": args.pause, "steps_lost": None}
    load = [round(one, 2) for one in os.getloadavg()]
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.fields[now]}"))
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("throughput", total=None, now="")
        found = throughput.measure(
            args.nodes, args.micro_batches, args.draws, args.seed, 60 * args.repair_minutes, pauses,
            lambda text: progress.update(task, now=text),
        )  # fmt: skip
    machine = {"cores": os.cpu_count(), "kernel": platform.release(), "load_average_before": load}
    result: dict[str, Any] = {"throughput": {**found, "seed": args.seed, "machine": machine}}
    if args.out:
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    missed = throughput.misses(found)
    if args.json:
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
    else:
        show(found, missed, Console(highlight=False))
    return 1 if missed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replanning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seed", type=int, default=1, help="of all that is drawn (1)")
    add("--nodes", type=int, default=8, metavar="N", help="that are simulated (8)")
    add("--micro-batches", type=int, default=64, metavar="N", help="of a step (64)")
    add("--draws", type=int, default=2, metavar="N", help="traces of each frequency (2)")
    add("--repair-minutes", type=float, default=30.0, metavar="M", help="a node is away so long (30)")
    add("--pause", type=float, metavar="S", help="Eagle Eye's own after a loss, where you have measured it (none)")
    add("--out", type=Path, metavar="FILE")
    add("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    for name in ("draws", "repair_minutes"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name):g}: expected more than 0")
    if args.pause is not None and args.pause < 0:
        parser.error(f"--pause {args.pause:g}: expected 0 or more")
    if not throughput.NODES_MIN <= args.nodes <= throughput.NODES_MAX:
        parser.error(f"--nodes {args.nodes}: expected {throughput.NODES_MIN} to {throughput.NODES_MAX}")
    if args.micro_batches < args.nodes:
        parser.error(f"--micro-batches {args.micro_batches}: expected {args.nodes} at least, one for each node")
    return args


if __name__ == "__main__":
    sys.exit(main())
