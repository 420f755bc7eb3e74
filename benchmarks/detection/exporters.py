"""Healthy jobs seen through exporters alone: no pause of theirs may cost a node or a restart.

    python -m benchmarks.detection.exporters
    python -m benchmarks.detection.exporters --fleets 40 --first-seed 86000000 --pause 30

Each fleet trains for 25 minutes and writes a checkpoint every few minutes, which no metric announces. Its Prometheus
reads dcgm-exporter and node_exporter of each node at moments and intervals of their own, late at times, and misses
scrapes (``simulator/eagle_eye/simulator/sites.py`` has the ranges). Sizes, shapes and parameters are the second
physics'. Whatever acts is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.detection.generate import written
from benchmarks.result_file import write_result
from eagle_eye.server.backtest.run import DISRUPTIVE_ACTIONS, Backtest
from eagle_eye.server.backtest.trace import Trace
from eagle_eye.server.engine.settings import DetectionSettings, PolicySettings
from eagle_eye.simulator.scenario import Scenario
from eagle_eye.simulator.simulate import record, tell
from eagle_eye.simulator.sites import GPU_EXPORTER, NODE_EXPORTER, scraping
from eagle_eye.simulator.story import PlannedPause

FIRST_SEED = 86_000_000
NODES = (8, 2, 16, 4, 1)
MINUTES, CHECKPOINT_EVERY_S = 25.0, 250.0
ROWS_S = 2.5  # of the simulated hardware: shorter than any scrape interval


class Fleet(NamedTuple):
    """What came of one fleet: what acted, and how its exporters were read."""

    seed: int
    nodes: int
    gpu_interval_s: float
    node_interval_s: float
    acted: tuple[str, ...]


def judged(seed: int, nodes: int, pause_s: float, minutes: float) -> Fleet:
    """Return what the engine, with default settings, does about one healthy fleet."""
    scenario = Scenario(nodes=nodes, seed=seed, minutes=minutes, interval_s=ROWS_S, habits=False, physics="second")
    story = tell(scenario)
    begin_s = CHECKPOINT_EVERY_S - pause_s
    while begin_s < scenario.duration_s:
        story.pauses.append(PlannedPause("checkpoint", begin_s, pause_s, spins=False, announced=False))
        begin_s += CHECKPOINT_EVERY_S
    with written(record(story), "remote_write") as folder:
        lines = list(Backtest(Trace(folder), DetectionSettings(), PolicySettings()).run())
    acted = tuple(f"{line.action} {line.fault} {line.node}" for line in lines if line.action in DISRUPTIVE_ACTIONS)
    gpu_s, node_s = (scraping(seed, exporter).interval_s for exporter in (GPU_EXPORTER, NODE_EXPORTER))
    return Fleet(seed, nodes, gpu_s, node_s, acted)


def figures(fleets: Sequence[Fleet]) -> dict[str, Any]:
    """Return the counts."""
    actions = Counter(item.split()[0] for fleet in fleets for item in fleet.acted)
    return {
        "fleets": len(fleets),
        "fleets_that_lost_something": sum(bool(fleet.acted) for fleet in fleets),
        "actions": dict(actions),
        "of": [fleet._asdict() for fleet in fleets if fleet.acted],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Judge the fleets, print the counts, and exit with 1 if anything acted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleets", type=int, default=10, help="how many (default 10)")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--pause", type=float, default=30.0, help="a checkpoint's seconds (default 30)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of each fleet (default 25)")
    parser.add_argument("--out", type=Path, help="a file for the figures, in JSON")
    args = parser.parse_args(argv)
    console = Console()
    found = [
        judged(args.first_seed + number, NODES[number % len(NODES)], args.pause, args.minutes)
        for number in track(range(args.fleets), "judging", console=console, disable=not console.is_terminal)
    ]
    result = figures(found) | {"pause_s": args.pause, "first_seed": args.first_seed}
    table = Table("fleets", "that lost something", "actions")
    table.add_row(str(len(found)), str(result["fleets_that_lost_something"]), json.dumps(result["actions"]))
    console.print(table)
    for fleet in result["of"]:
        console.print(fleet)
    if args.out:
        write_result(args.out, result)
    return 1 if result["fleets_that_lost_something"] else 0


if __name__ == "__main__":
    sys.exit(main())
