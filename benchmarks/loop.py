"""How fast the loop closes: the demo, several times for each fault, medians and maxima of its own measurements.

python benchmarks/loop.py --runs 5 --out benchmarks/results/loop.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

FAULTS = ("crash", "unreachable", "hang", "slow", "nan")
# From injection to the webhook received; for hang and slow a typical step is added or multiplied, see limit_s.
STEP_S = 0.4
WEBHOOK_LIMITS_S = {"crash": 3.0, "unreachable": 5.0, "hang": 3 * STEP_S + 3.0, "slow": 10.0}
STEP_LIMIT_S = 25.0
TIMEOUT_S = 400


def main() -> int:
    """Run, print a table, write the results; 1 when a run failed or a limit was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {fault: [] for fault in args.faults}
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("runs", total=args.runs * len(args.faults))
        for _ in range(args.runs):
            for fault in args.faults:
                results[fault].append(once(fault))
                progress.advance(task)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return show(results)


def once(fault: str) -> dict[str, Any]:
    """Return the last line of one demo."""
    done = subprocess.run(
        [sys.executable, "-m", "eagle_eye.cli.main", "demo", "--fault", fault, "--json"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    lines = done.stdout.splitlines()
    last: dict[str, Any] = json.loads(lines[-1]) if lines else {"success": False, "text": done.stderr[-300:]}
    return last


def show(results: dict[str, list[dict[str, Any]]]) -> int:
    """Print what was measured beside the limits; return 1 when one was missed."""
    table = Table("fault", "runs", "shown", "webhook p50 s", "max s", "limit s", "first step p50 s", "max s", "limit s")
    missed = False
    for fault, runs in results.items():
        shown = [run for run in runs if run["success"]]
        webhook = [run["measured_s"]["injection to webhook received"] for run in shown]
        step = [run["measured_s"]["injection to first new step"] for run in shown]
        limit_s = WEBHOOK_LIMITS_S.get(fault)
        missed |= len(shown) < len(runs)
        if shown:
            missed |= (limit_s is not None and max(webhook) > limit_s) or max(step) > STEP_LIMIT_S
        table.add_row(
            fault,
            str(len(runs)),
            str(len(shown)),
            *(_figures(webhook)),
            "-" if limit_s is None else f"{limit_s:.1f}",
            *(_figures(step)),
            f"{STEP_LIMIT_S:.0f}",
        )
    Console().print(table)
    for runs in results.values():
        for run in runs:
            if not run["success"]:
                Console().print(f"failed: {run['text']}", markup=False)
    return int(missed)


def _figures(values: list[float]) -> tuple[str, str]:
    if not values:
        return "-", "-"
    return f"{statistics.median(values):.2f}", f"{max(values):.2f}"


if __name__ == "__main__":
    sys.exit(main())
