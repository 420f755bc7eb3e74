"""What was committed, what a failure costs and how the loss goes, from the groups' logs alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.torchft.processes import SAMPLES, STEP_S, Group, Try
from benchmarks.torchft.storm import Failure

# A failure's consequences are over by then: the others have gone on, or will not.
CONSEQUENCES_S = 8.0
LOSS_UP_RATIO = 2.0  # over what was usual; among samples it varies by some percent


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
    for one in sorted(tries, key=lambda one: one.at_s):
        if one.committed:
            at_s, groups = steps.get(one.step, (one.at_s, 0))
            steps[one.step] = (at_s, max(groups, one.groups))
    return steps


def costs(
    failures: Sequence[Failure], tries: Mapping[str, Sequence[Try]], groups: Sequence[Group], until_s: float
) -> dict[str, Any]:
    """Return how long failures have stalled everybody, beyond a step's length, and kept their own group away.

    Until ``until_s``, where nobody goes on.
    """
    steps = committed([one for some in tries.values() for one in some])
    moments = [*sorted(at_s for at_s, _ in steps.values()), until_s]
    stalls: list[float] = []
    for failure in failures:
        around = [
            later - earlier
            for earlier, later in pairwise(moments)
            if later > failure.at_s and earlier < failure.at_s + CONSEQUENCES_S
        ]
        stalls.append(max([*around, STEP_S]) - STEP_S)
    starts = {group.name: group.started_s for group in groups}
    first = [(one.at_s, first_step_s(one.at_s, tries[one.group], starts[one.group])) for one in failures]
    back = [step_s - at_s for at_s, step_s in first if step_s is not None]
    return {
        "count": len(failures),
        "stall_s": spread(stalls),
        "back": len(back),
        "until_its_first_step_s": spread(back),
    }


def first_step_s(ended_s: float, tries: Sequence[Try], started_s: Sequence[float]) -> float | None:
    """Return when a group that was ended then has committed a step again, by a process started since; None: never."""
    start_s = next((at_s for at_s in started_s if at_s > ended_s), float("inf"))
    return next((one.at_s for one in tries if one.committed and one.at_s > start_s), None)


def level(tries: Sequence[Try], from_s: float, until_s: float) -> dict[str, Any]:
    """Return samples per second and the median loss between two moments; None without a step."""
    losses = [one.loss for one in tries if from_s <= one.at_s < until_s and one.loss is not None]
    loss: float | str | None = None
    if losses:
        loss = float(f"{statistics.median(losses):.4g}") if all(map(math.isfinite, losses)) else "not finite"
    return {"samples_per_second": span(tries, from_s, until_s)["samples_per_second"], "loss": loss}


def loss_back_s(tries: Sequence[Try], since_s: float, usual: float) -> float | None:
    """Return since when the loss has been as it was, ``since_s`` where it never was up.

    None where it is up, or no step says how it is.
    """
    course = sorted((one.at_s, one.loss) for one in tries if one.at_s >= since_s and one.loss is not None)
    up_s = max((at_s for at_s, loss in course if not loss <= LOSS_UP_RATIO * usual), default=None)  # NaN is up
    if course and up_s is None:
        return since_s
    return next((at_s for at_s, _ in course if up_s is not None and at_s > up_s), None)


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Return median and maximum, None where there are no values."""
    if not values:
        return {"p50": None, "max": None}
    return {"p50": round(statistics.median(values), 2), "max": round(max(values), 2)}


def ratio(part: Mapping[str, Any], whole: Mapping[str, Any], of: str) -> float | None:
    """Return how much of the whole's rate the part's is; None where the whole has none."""
    rate = whole[f"{of}_per_second"]
    return round(part[f"{of}_per_second"] / rate, 3) if rate else None
