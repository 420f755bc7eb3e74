"""What was committed, and what a failure costs, from the groups' logs alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.torchft.processes import SAMPLES, STEP_S, Group, Try
from benchmarks.torchft.storm import Failure

# A failure's consequences are over by then: the others have gone on, or will not.
CONSEQUENCES_S = 8.0


def span(tries: Sequence[Try], from_s: float, until_s: float) -> dict[str, Any]:
    """Return what was committed between two moments: a step once, and the samples of all groups whose it holds."""
    within = [one for one in tries if from_s <= one.at_s < until_s]
    steps = committed(within)
    seconds = until_s - from_s
    samples = SAMPLES * sum(groups for _, groups in steps.values())
    moments = [from_s, *sorted(at_s for at_s, _ in steps.values()), until_s]
    return {
        "seconds": round(seconds, 1),
        "steps": len(steps),
        "steps_per_second": round(len(steps) / seconds, 3),
        "samples": samples,
        "samples_per_second": round(samples / seconds, 1),
        "longest_without_a_step_s": round(max(later - earlier for earlier, later in pairwise(moments)), 2),
        "tries_not_committed": sum(not one.committed for one in within),
    }


def committed(tries: Sequence[Try]) -> dict[int, tuple[float, int]]:
    """Return when each step was committed first, and of how many groups it holds samples."""
    steps: dict[int, tuple[float, int]] = {}
    for one in sorted(tries):
        if one.committed:
            at_s, groups = steps.get(one.step, (one.at_s, 0))
            steps[one.step] = (at_s, max(groups, one.groups))
    return steps


def costs(failures: Sequence[Failure], tries: Mapping[str, Sequence[Try]], groups: Sequence[Group]) -> dict[str, Any]:
    """Return how long failures have stalled everybody, beyond a step's length, and kept their own group away."""
    starts = {group.name: group.started_s for group in groups}
    moments = sorted(at_s for at_s, _ in committed([one for some in tries.values() for one in some]).values())
    stalls: list[float] = []
    back: list[float] = []
    for failure in failures:
        around = [
            later - earlier
            for earlier, later in pairwise(moments)
            if later > failure.at_s and earlier < failure.at_s + CONSEQUENCES_S
        ]
        stalls.append(max([*around, STEP_S]) - STEP_S)
        start_s = next((at_s for at_s in starts[failure.group] if at_s > failure.at_s), float("inf"))
        steps = (one.at_s for one in tries[failure.group] if one.committed and one.at_s > start_s)
        if (first_s := next(steps, None)) is not None:
            back.append(first_s - failure.at_s)
    return {
        "count": len(failures),
        "stall_s": spread(stalls),
        "back": len(back),
        "until_its_first_step_s": spread(back),
    }


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Return median and maximum, None where there are no values."""
    if not values:
        return {"p50": None, "max": None}
    return {"p50": round(statistics.median(values), 2), "max": round(max(values), 2)}


def ratio(part: Mapping[str, Any], whole: Mapping[str, Any], of: str) -> float:
    """Return how much of the whole's rate the part's is."""
    return round(part[f"{of}_per_second"] / whole[f"{of}_per_second"], 3)
