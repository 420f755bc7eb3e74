"""What captures cost a training step: the reference job without them, at every step, and at every tenth, in turns."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec

from benchmarks.checkpoint.machine import load_average
from benchmarks.checkpoint.reference_job import BUSY_RATIOS
from benchmarks.checkpoint.site import opened, run_ranks

MODES = ("none", "each", "tenth")
NODES = ["n1", "n2"]
CAPTURE_IN_BLOCK = 5  # of a block where one step of it is captured
BUSY = dict(zip(("cores busy with training", "half of the step elsewhere"), BUSY_RATIOS, strict=True))
START_S = 120.0


class CapturePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks do: ``rounds`` times one block of ``block_steps`` steps in each mode, in an order by the seed."""

    width: int
    blocks: int
    step_s: float
    rounds: int
    block_steps: int
    seed: int


def measure(plan: CapturePlan) -> dict[str, Any]:
    """Return the shares of a step that captures take, in both kinds of job."""
    within_s = START_S + 8 * plan.rounds * len(BUSY) * len(MODES) * (plan.block_steps + 1) * plan.step_s
    before = load_average()
    with opened(NODES) as site:
        ranks = run_ranks(site, "benchmarks.checkpoint.capture_rank", NODES, plan, within_s)
    loads = {"before": before, "after": load_average()}
    return {name: {**figures(ranks, name), "load_average": loads} for name in BUSY}


def figures(ranks: list[dict[str, Any]], busy: str) -> dict[str, Any]:
    """Return the figures of what the ranks have found, as ``busy`` as that. Of two ranks the slower one counts."""
    rounds = ranks[0]["rounds"][busy]
    steps = {mode: statistics.median([statistics.fmean(one[mode]["steps_s"]) for one in rounds]) for mode in MODES}
    each = [_blocked(rank["rounds"][busy]) for rank in ranks]
    steps_of_all = set.intersection(*(set(one) for one in each))
    blocked = [max(one[step][0] for one in each) for step in steps_of_all]
    cpu_s = statistics.median([max(one[step][1] for one in each) for step in steps_of_all])
    blocked_s = statistics.median(blocked)
    shard_bytes = max(rank["shard_bytes"] for rank in ranks)
    memcpy_s = statistics.median([max(both) for both in zip(*(rank["memcpy_cpu_s"] for rank in ranks), strict=True)])
    gigabytes = shard_bytes / 1e9
    return {
        "step_s": round(steps["none"], 4),
        "shard_bytes": shard_bytes,
        "tensors": ranks[0]["tensors"],
        "captures": len(blocked),
        "skipped": sum(rank["skipped"] for rank in ranks),
        "blocked_ms": {"median": _ms(blocked_s), "least": _ms(min(blocked)), "greatest": _ms(max(blocked))},
        "blocked_ms_per_gb": round(1e3 * blocked_s / gigabytes, 1),
        "cpu_ms_per_gb": round(1e3 * cpu_s / gigabytes, 1),
        "memcpy_cpu_ms_per_gb": round(1e3 * memcpy_s / gigabytes, 1),
        "cpu_share_each_step": round(cpu_s / steps["none"], 4),
        "blocked_share_each_step": round(blocked_s / steps["none"], 4),
        "blocked_share_each_tenth": round(blocked_s / steps["none"] / 10, 5),
        "longer_steps_each": _longer(rounds, "each"),
        "longer_steps_tenth": _longer(rounds, "tenth"),
        "whole_steps_behind": round(statistics.fmean(ranks[0]["behind_steps"][busy]), 2),
    }


def _blocked(rounds: list[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    """Return how long each step's capture took, and how much of a core."""
    return {step: (wall_s, cpu_s) for one in rounds for mode in MODES for step, wall_s, cpu_s in one[mode]["blocked_s"]}


def _longer(rounds: list[dict[str, Any]], mode: str) -> dict[str, float]:
    """Return how much longer steps are than those without captures of the same round: the median, and the quartiles."""
    found = [statistics.fmean(one[mode]["steps_s"]) / statistics.fmean(one["none"]["steps_s"]) - 1 for one in rounds]
    quarters = statistics.quantiles(found, n=4) if len(found) > 1 else [found[0]] * 3
    return {"median": round(statistics.median(found), 4), "q1": round(quarters[0], 4), "q3": round(quarters[2], 4)}


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)
