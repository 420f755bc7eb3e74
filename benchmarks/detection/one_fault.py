"""One fault alone, in jobs as the suite draws them: how much of it is found, and what so few traces bound.

    python -m benchmarks.detection.one_fault silent_data_corruption
    python -m benchmarks.detection.one_fault silent_data_corruption --traces 59 --first-seed 91000000 --physics second
    python -m benchmarks.detection.one_fault straggler --physics second --only slow          # of its traces these alone
    python -m benchmarks.detection.one_fault silent_data_corruption --traces 1000 --count    # what is drawn, unjudged

Found, as ``eagle-eye backtest`` counts: with what the trace's label asks for, of the node that it names. The bound is
what the share lies above with 95% confidence (Clopper and Pearson, one-sided): 59 of 59 bound it at 0.95.

Of some faults the figures are also given apart, since a trace's label knows nothing of what can be told. Delays are
from the onset to the action; ``sudden`` are those of faults that did not grow.

``straggler``, whose label asks for an exclusion wherever a restart would pay within a day. ``slow``: at least 1.3 times
as long, its work known to be equal (packed data only where the code says how much work they are), and at least three
ranks of its stage as fast as before. ``uneven work``: as slow, and its work may be why. ``no peers``: as slow, with its
whole stage. ``milder``: the rest. With ``--count`` also how long two whole slow steps take from an onset in the middle
of a step: sooner nobody can say that it lasts.

``silent_data_corruption``. ``gradient``: a rank's gradient before the reduction is wrong. ``parameters``: a rank's
parameters are, as at least two replicas show. ``parameters of two replicas``: two checksums differ, and no reading of
any metric depends on which of the two ranks is the wrong one.

``hang``. ``in a collective``: all ranks wait in it, no node is to blame. ``rank that may work for others``: the one
that all others wait for has its node's first GPU or its last, as ranks have that save, evaluate, compile or report
alone. ``rank that only trains``: the others.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from rich.console import Console
from rich.progress import track

from benchmarks.detection import generate, judge
from benchmarks.detection.exclusions import SLOW_RATIO
from benchmarks.detection.plan import Case, Plan
from benchmarks.detection.score import Outcome
from eagle_eye.server.backtest.run import Scorecard, quantile
from eagle_eye.simulator.names import FAULTS
from eagle_eye.simulator.scenario import PHYSICS
from eagle_eye.simulator.simulate import tell
from eagle_eye.simulator.story import Story
from eagle_eye.simulator.tracks import Quantity

FIRST_SEED = 90_000_000
CONFIDENCE = 0.95
PEERS_MIN = 3  # ranks of its stage that are as fast as before
REPLICAS_UNDECIDED = 2  # whose parameters differ: either may be wrong
WHOLE_STEPS = 2  # that a slow node must have been slow in, for it not to have stumbled once


def cases(fault: str, traces: int, first_seed: int, physics: str) -> list[Case]:
    """Return the suite's own draws of sizes, steps, strengths and what goes on beside it, all with this fault."""
    plan = Plan(
        faults=traces, node_days=0.0, profiles=(), situations=generate.situations(), tuning_faults=0, tuning_quiet=0,
        gpus=8, quiet_nodes=8, quiet_minutes=30.0, quiet_interval_s=1.0, physics=physics, first_seed=first_seed,
    )  # fmt: skip
    return [replace(case, fault=fault) for case in plan.reporting() if case.kind == "fault"]


def lower_bound(hits: int, tried: int) -> float:
    """Return what the share of hits lies above with CONFIDENCE."""
    low, high = 0.0, 1.0
    for _ in range(60):
        share = (low + high) / 2
        as_many = sum(math.comb(tried, k) * share**k * (1 - share) ** (tried - k) for k in range(hits, tried + 1))
        low, high = (share, high) if as_many <= 1 - CONFIDENCE else (low, share)
    return low if hits else 0.0


def situation(case: Case) -> str:
    """Return what of a trace decides whether what its label asks for can be told; "all" of most faults."""
    found = SITUATIONS.get(case.fault)
    return found(tell(generate.scenario(case))) if found else "all"


def _slowness(story: Story) -> str:
    if generate.compute_ratio(story) < SLOW_RATIO:
        return "milder"
    if not generate.work_is_equal(story):
        return "uneven work"
    stage = story.layout.stage()
    slow = {(node, cause.device) for cause in generate.slowed(story) for node in cause.nodes or ()}
    its_stage = {int(stage[node, device]) for node, device in slow}
    alike = sum(1 for place, number in np.ndenumerate(stage) if int(number) in its_stage and place not in slow)
    return "slow" if alike >= PEERS_MIN else "no peers"


def _corruption(story: Story) -> str:
    causes = story.tracks[story.background_tracks :]
    if not any(cause.quantity is Quantity.CHECKSUM for cause in causes):
        return "gradient"
    return "parameters" if story.layout.dp > REPLICAS_UNDECIDED else "parameters of two replicas"


def _standstill(story: Story) -> str:
    culprits = [place for attempt in story.attempts if attempt.stop for place in attempt.stop.culprits]
    if not culprits:
        return "in a collective"
    first_or_last = {place.device for place in culprits} & {0, story.layout.gpus - 1}
    return "rank that may work for others" if first_or_last else "rank that only trains"


SITUATIONS = {"straggler": _slowness, "silent_data_corruption": _corruption, "hang": _standstill}


def counted(cases: Sequence[Case]) -> dict[str, Any]:
    """Return how many traces are in each situation, without judging any; of slow nodes how long two slow steps take."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(situation(case), []).append(case)
    found: dict[str, Any] = {name: {"traces": len(members)} for name, members in sorted(groups.items())}
    if slow := groups.get("slow"):
        found["slow"]["two_slow_steps_p95_s"] = quantile([_two_slow_steps_s(case) for case in slow], 0.95)
    return found


def _two_slow_steps_s(case: Case) -> float:
    story = tell(generate.scenario(case))
    longer_s = (generate.compute_ratio(story) - 1) * story.job.compute_s
    return (WHOLE_STEPS + 0.5) * (case.step_s + longer_s)


def apart(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the figures of a fault's traces by their situation."""
    of_key = {case.key: case for case in cases}
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(situation(of_key[outcome.key]), []).append(outcome)
    found: dict[str, Any] = {}
    for name, members in sorted(groups.items()):
        card, sudden = Scorecard(), Scorecard()
        for outcome in members:
            card.add(outcome.labels, outcome.lines, outcome.nodes, outcome.seconds)
            if not of_key[outcome.key].creeping:
                sudden.add(outcome.labels, outcome.lines, outcome.nodes, outcome.seconds)
        found[name] = {
            "labelled": card.overall.labelled,
            "found": card.overall.hits,
            "recall_lower_95": lower_bound(card.overall.hits, card.overall.labelled),
            "wrong_actions": card.overall.false,
            "delay_p50_s": quantile(card.overall.action_delays_s, 0.5),
            "delay_p95_s": quantile(card.overall.action_delays_s, 0.95),
            "sudden_delay_p95_s": quantile(sudden.overall.action_delays_s, 0.95),
        }
    return found


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the figures of the traces, and of each that was missed or wrong what was said instead."""
    card, not_right = Scorecard(), []
    for outcome in outcomes:
        one = Scorecard()
        for each in (card, one):
            each.add(outcome.labels, outcome.lines, outcome.nodes, outcome.seconds)
        if one.overall.hits < one.overall.labelled or one.overall.false:
            said = [f"{line.time:.0f} {line.fault} {line.node} {line.action}: {line.summary}" for line in outcome.lines]
            not_right.append({"key": outcome.key, "hits": one.overall.hits, "said": said})
    found = card.overall
    return {
        "labelled": found.labelled,
        "found": found.hits,
        "recall": found.hits / found.labelled if found.labelled else None,
        "recall_lower_95": lower_bound(found.hits, found.labelled),
        "wrong_actions": found.false,
        "not_right": not_right,
    }


def main() -> int:
    """Measure one fault in one profile; print the figures as JSON, keep them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fault", choices=sorted(FAULTS), metavar="FAULT")
    parser.add_argument("--traces", type=int, default=60, metavar="N", help="(60)")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, metavar="S", help=f"({FIRST_SEED})")
    parser.add_argument("--physics", choices=PHYSICS, default="own")
    parser.add_argument("--profile", choices=generate.profiles(), default="full")
    parser.add_argument("--only", metavar="SITUATION", help="judge the traces of one situation alone")
    parser.add_argument("--count", action="store_true", help="say how many traces are in each situation, judge none")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the figures")
    args = parser.parse_args()
    console = Console(stderr=True)
    drawn = cases(args.fault, args.traces, args.first_seed, args.physics)
    if args.only is not None:
        drawn = [case for case in drawn if situation(case) == args.only]
    figures = {name: getattr(args, name) for name in ("fault", "traces", "first_seed", "physics", "profile", "only")}
    if args.count:
        figures["situations"] = counted(drawn)
    else:
        shown = track(drawn, args.fault, console=console, disable=not console.is_terminal)
        outcomes = [outcome for case in shown for outcome in judge.outcomes(case, [args.profile])]
        figures |= summary(outcomes)
        if args.fault in SITUATIONS:
            figures["apart"] = apart(drawn, outcomes)
    text = json.dumps(figures, indent=1) + "\n"
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
