"""Computes a pipeline's 1F1B step time without simulation. Pure.

1F1B: stage s of p runs p - s forward passes, then a backward and a forward pass in turn, then the backward passes that
are left. ``simulation.py`` runs the same schedule event by event.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol


class StageTimes(Protocol):
    """The time that one micro-batch takes in a stage."""

    @property
    def forward_s(self) -> float:
        """Its forward pass."""
        ...

    @property
    def backward_s(self) -> float:
        """Its backward pass."""
        ...


class _Course(NamedTuple):
    """What a stage does in a step beside its own passes: it waits ``waits_s``, and the others run ``before_s``."""

    here_s: float
    before_s: float
    waits_s: float


def step_time_s(stages: Sequence[StageTimes], micro_batches: int) -> float:
    """Return the time of a step of so many micro-batches."""
    found = [
        course.before_s + micro_batches * course.here_s + course.waits_s
        for place, course in enumerate(_courses(stages))
        if micro_batches >= len(stages) - place
    ]
    # Where there are fewer micro-batches than stages from here on, all forward passes come before the first backward.
    early = stages[: max(len(stages) - micro_batches, 0)]
    total_s = sum(stage.forward_s + stage.backward_s for stage in stages)
    found += [total_s + (micro_batches - 1) * max(stage.forward_s, stage.backward_s) for stage in early]
    return max(found)


def step_times_s(stages: Sequence[StageTimes], micro_batches_max: int) -> list[float]:
    """Return the step times for 1, 2, ... micro-batches; they never decrease."""
    few = min(len(stages), micro_batches_max)
    found = [step_time_s(stages, micro_batches) for micro_batches in range(1, few + 1)]
    # From here on each stage's course is a line: only those that are the longest somewhere are looked at.
    longest: list[tuple[float, float]] = []
    lines = ((course.before_s + course.waits_s + few * course.here_s, course.here_s) for course in _courses(stages))
    for at_few_s, here_s in sorted(lines, reverse=True):
        if not longest or here_s > longest[-1][1]:
            longest.append((at_few_s, here_s))
    found += [
        max(at_few_s + beyond * here_s for at_few_s, here_s in longest)
        for beyond in range(1, micro_batches_max - few + 1)
    ]
    return found


def _courses(stages: Sequence[StageTimes]) -> Iterator[_Course]:
    """Yield each stage's course in a step with as many micro-batches as stages, or more.

    A stage waits twice: until the first micro-batch comes back from the stages after it, a time that it fills with a
    forward pass for each of them, and until the last one does, which it fills with as many backward passes. The first
    comes back late where a slow stage spaces the forward passes out, since each stage runs its share of them before its
    first backward pass; of the last the same holds, seen backwards.
    """
    forward_s = [*accumulate((stage.forward_s for stage in stages), initial=0.0)]
    backward_s = [*accumulate((stage.backward_s for stage in stages), initial=0.0)]
    returns = zip(_returns(forward_s, backward_s), _returns(backward_s, forward_s), strict=True)
    for place, (stage, (first_s, last_s)) in enumerate(zip(stages, returns, strict=True)):
        here_s = stage.forward_s + stage.backward_s
        before_s = forward_s[place] + backward_s[place]
        waits_s = first_s + last_s - 2 * before_s - (len(stages) - place + 1) * here_s
        yield _Course(here_s, before_s, waits_s)


def _returns(there_s: Sequence[float], back_s: Sequence[float]) -> list[float]:
    """Return for each stage the latest time at which those from it on have sent the first micro-batch back."""
    slowest_s = [*accumulate((after - before for before, after in pairwise(there_s)), max)]
    stages = len(slowest_s)
    reached = [
        there_s[place + 1] + (stages - 1 - place) * slowest_s[place] + back_s[place + 1] for place in range(stages)
    ]
    return [*accumulate(reversed(reached), max)][::-1]


def least_time_s(
    before_s: float, forward_s: float, backward_s: float, after_s: float, stages_after: int, micro_batches: int
) -> float:
    """Return what a step takes at least because of one stage, whatever the cuts before and after it.

    ``before_s`` and ``after_s`` are what one micro-batch takes the stages before and after it, both ways.
    """
    here_s = forward_s + backward_s
    if micro_batches <= stages_after:
        return before_s + here_s + after_s + (micro_batches - 1) * max(forward_s, backward_s)
    first_s = after_s - stages_after * forward_s
    last_s = after_s - stages_after * backward_s
    return before_s + micro_batches * here_s + (first_s if first_s > 0 else 0.0) + (last_s if last_s > 0 else 0.0)
