"""From named to gone: how soon a slow or hanging node leaves its job, and that one that was given more work stays.

    python -m benchmarks.detection.exclusions
    python -m benchmarks.detection.exclusions --traces 40 --first-seed 84000000 --physics second

Each group has simulated traces of its own seeds. ``slow``: a GPU or node computes at least 1.3 times as long, nothing
else is wrong, and the work is equal; sites with collective timings, without, and without what profiling counters show.
``uneven``: the work, not the node. ``hang``: a rank, GPU or network card holds everybody up; delays count beyond the
longest pause that the job has made before, beyond the site's floor where it has made none. A trace counts as right
when exactly its node is excluded, nobody else, and nothing restarted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.detection.generate import compute_ratio, work_is_equal, written
from eagle_eye.server.backtest.run import DISRUPTIVE_ACTIONS, Backtest, VerdictLine, quantile
from eagle_eye.server.backtest.trace import Trace
from eagle_eye.server.engine.settings import DetectionSettings, PolicySettings
from eagle_eye.simulator.scenario import PHYSICS, Scenario
from eagle_eye.simulator.simulate import Recording, simulate, tell

FIRST_SEED = 84_000_000
STEPS_S = (0.8, 2.0, 5.0)
NODES = (3, 6, 12)
SLOW_RATIO = 1.3  # times its compute time, from which on a node is asked to leave soon
PAUSE_STEPS = 4.0  # as long as so many steps, a time without one is a pause
COLLECTIVES, COUNTERS = ("nccl_",), ("nccl_", "gpu_tensor", "gpu_sm_active", "gpu_dram")


class Group(NamedTuple):
    """Traces of one kind: what happens (fault, variant), what the site does not report, whether a node is to leave."""

    cases: tuple[tuple[str, str | None], ...]
    profile: str = "full"
    without: tuple[str, ...] = ()
    leaves: bool = True
    after_pause: bool = False  # delays count beyond what the job's own pauses explain
    habits: bool = True  # False: nothing but training, and the same work for all


SLOW = (("straggler", "one"), ("straggler", "node"))
UNEVEN = (("hot_expert", None), ("long_documents", None), ("data_loader_hiccup", None))
HANGS = (("hang", "late"), ("gpu_hang", None), ("network_hang", None))
GROUPS = {
    "slow": Group(SLOW, habits=False),
    "slow, no collective timings": Group(SLOW, without=COLLECTIVES, habits=False),
    "slow, no profiling counters either": Group(SLOW, without=COUNTERS, habits=False),
    "uneven": Group(UNEVEN, leaves=False),
    "uneven, no collective timings": Group(UNEVEN, without=COLLECTIVES, leaves=False),
    "hang": Group(HANGS, after_pause=True),
    "hang, no hook": Group(HANGS, profile="no_hook", after_pause=True),
}


class Found(NamedTuple):
    """What came of one trace; ``delay_s`` is None where its node did not leave."""

    seed: int
    fault: str
    right: bool
    wrong: int  # exclusions of others, and restarts
    delay_s: float | None


def scenarios(group: Group, traces: int, first_seed: int, physics: str) -> Iterator[Scenario]:
    """Yield a group's traces: faults, sizes and lengths of steps take turns; mild or unequal ones are passed over."""
    number, seed = 0, first_seed
    while number < traces:
        fault, variant = group.cases[number % len(group.cases)]
        scenario = Scenario(
            fault=fault,
            variant=variant,
            nodes=NODES[number // 2 % len(NODES)],
            seed=seed,
            minutes=10.0,
            step_s=STEPS_S[number // 3 % len(STEPS_S)],
            strength="strong",
            habits=group.habits,
            physics=physics,
        )
        seed += 1
        story = tell(scenario)
        if fault != "straggler" or (compute_ratio(story) >= SLOW_RATIO and work_is_equal(story)):
            number += 1
            yield scenario


def judged(scenario: Scenario, group: Group) -> Found:
    """Return what the engine, with default settings, does about one trace."""
    run = simulate(scenario)
    seen = {name: values for name, values in run.device.items() if not name.startswith(group.without)}
    with written(dataclasses.replace(run, device=seen), group.profile) as folder:
        lines = list(Backtest(Trace(folder), DetectionSettings(), PolicySettings()).run())
    return found(scenario, run, lines, after_pause=group.after_pause)


def found(scenario: Scenario, run: Recording, lines: Sequence[VerdictLine], *, after_pause: bool) -> Found:
    """Return what came of a trace of which this was said."""
    label = run.labels[0] if run.labels else None
    culprits = set(label.nodes) if label is not None and label.expect == "exclude" else set()
    disruptive = [line for line in lines if line.action in DISRUPTIVE_ACTIONS]
    out = [line for line in disruptive if line.action == "exclude_node" and set(line.nodes) == culprits]
    wrong = len(disruptive) - len(out)
    if label is None or not out:
        return Found(scenario.seed, scenario.fault, not culprits and not disruptive, wrong, None)
    delay_s = out[0].time - label.start - (explained_s(run, label.start) if after_pause else 0.0)
    return Found(scenario.seed, scenario.fault, not wrong, wrong, delay_s)


def explained_s(run: Recording, until_s: float) -> float:
    """Return how long a standstill may be a pause: as the longest before, or the site's floor where there was none."""
    step = run.device["train_step"]
    newest = np.nanmax(np.where(np.isfinite(step), step, -np.inf), axis=(1, 2))
    times_s = np.nanmax(run.true_time, axis=1)
    ended = np.flatnonzero((np.diff(newest) > 0) & (times_s[1:] < until_s))
    gaps_s = np.diff(times_s[1:][ended])
    longest_s = float(gaps_s.max()) if len(gaps_s) else 0.0
    return longest_s if longest_s >= PAUSE_STEPS * run.scenario.step_s else DetectionSettings().hang_floor_s


def summary(results: Sequence[Found], group: Group) -> dict[str, Any]:
    """Return a group's figures."""
    delays_s = [one.delay_s for one in results if one.delay_s is not None]
    return {
        "traces": len(results),
        "a node has to leave": group.leaves,
        "right": sum(one.right for one in results),
        "wrong_actions": sum(one.wrong for one in results),
        "delay_p50_s": quantile(delays_s, 0.5),
        "delay_p95_s": quantile(delays_s, 0.95),
        "beyond_pauses": group.after_pause,
        "not_right": [one._asdict() for one in results if not one.right],
    }


def main() -> int:
    """Measure every group, or those named; print a table, keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=24, metavar="N", help="of each group (24)")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, metavar="S", help=f"({FIRST_SEED})")
    parser.add_argument("--physics", choices=PHYSICS, default="own")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="NAME")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the figures")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    console = Console(stderr=True)
    groups: dict[str, Any] = {}
    for name in args.groups:
        group = GROUPS[name]
        cases = list(scenarios(group, args.traces, args.first_seed, args.physics))
        shown = track(cases, name, console=console, disable=not console.is_terminal)
        groups[name] = summary([judged(case, group) for case in shown], group)
    figures = {"physics": args.physics, "first_seed": args.first_seed, "groups": groups}
    text = json.dumps(figures, indent=1) + "\n"
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
    if args.json:
        sys.stdout.write(text)
    else:
        _show(groups)
    return 0


def _show(groups: dict[str, Any]) -> None:
    table = Table()
    for column in ("", "traces", "right", "wrong actions", "to the exclusion p50", "p95"):
        table.add_column(column, justify="left" if not column else "right")
    for name, one in groups.items():
        delays = [f"{one[key]:.1f} s" if one[key] is not None else "-" for key in ("delay_p50_s", "delay_p95_s")]
        table.add_row(name, str(one["traces"]), str(one["right"]), str(one["wrong_actions"]), *delays)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
