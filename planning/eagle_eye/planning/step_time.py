"""A pipeline's 1F1B step time: computed, and simulated event by event, which is the computation's reference. Pure.

1F1B: stage s of p runs p - s forward passes, then a backward and a forward pass in turn, then the backward passes that
are left.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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


class MicroBatchPass(NamedTuple):
    """One pass of one micro-batch through one stage, with its time and place.

    ``pipeline`` owns the micro-batch, the GPUs of ``by`` ran it.
    """

    pipeline: int
    stage: int
    micro_batch: int
    backward: bool
    by: int
    begin_s: float
    end_s: float


class _Key(NamedTuple):
    """Which pass it is."""

    pipeline: int
    stage: int
    micro_batch: int
    backward: bool


class _Order(NamedTuple):
    """The remaining passes of one pipeline's stage, in execution order; of how many ``stages``."""

    stages: int
    passes: deque[_Key]

    def needed(self) -> _Key | None:
        """Return the pass that must have ended before the next one, None where it needs none."""
        key = self.passes[0]
        if not key.backward:
            return key._replace(stage=key.stage - 1) if key.stage else None
        return key._replace(backward=False) if key.stage == self.stages - 1 else key._replace(stage=key.stage + 1)

    def next_of(self, key: _Key) -> _Key | None:
        """Return the pass that needs this one, None where none does."""
        if key.backward:
            return key._replace(stage=key.stage - 1) if key.stage else None
        return key._replace(backward=True) if key.stage == self.stages - 1 else key._replace(stage=key.stage + 1)


def simulate(
    stages: Sequence[StageTimes], micro_batches: Sequence[int], *, failed: int | None = None, lost: Collection[int] = ()
) -> list[MicroBatchPass]:
    """Return all passes of a step of pipelines of these stages, by their ends; pipeline i runs ``micro_batches[i]``.

    Of pipeline ``failed`` the stages in ``lost`` are run by the other pipelines' GPUs, micro-batch by micro-batch in
    turn; their own passes wait meanwhile.
    """
    peers = [pipeline for pipeline in range(len(micro_batches)) if pipeline != failed]

    def runs_on(key: _Key) -> tuple[int, int]:
        foreign = key.pipeline == failed and key.stage in lost
        return (peers[key.micro_batch % len(peers)] if foreign else key.pipeline), key.stage

    orders: dict[tuple[int, int], dict[int, _Order]] = defaultdict(dict)  # by GPUs, and whose passes they are
    for pipeline in sorted(range(len(micro_batches)), key=lambda pipeline: pipeline != failed):
        for stage in range(len(stages)):
            for key in _one_forward_one_backward(pipeline, stage, len(stages) - 1 - stage, micro_batches[pipeline]):
                orders[runs_on(key)].setdefault(pipeline, _Order(len(stages), deque())).passes.append(key)
    ends_s: dict[_Key, float] = {}
    free_s = dict.fromkeys(orders, 0.0)
    moments = [(0.0, gpus) for gpus in orders]
    heapq.heapify(moments)
    found: list[MicroBatchPass] = []
    while moments:
        now_s, gpus = heapq.heappop(moments)
        order = None if free_s[gpus] > now_s else _ready(orders[gpus].values(), ends_s, now_s)
        if order is None:
            continue
        key = order.passes.popleft()
        stage_s = stages[key.stage]
        end_s = now_s + (stage_s.backward_s if key.backward else stage_s.forward_s)
        ends_s[key] = free_s[gpus] = end_s
        found.append(MicroBatchPass(*key, by=gpus[0], begin_s=now_s, end_s=end_s))
        heapq.heappush(moments, (end_s, gpus))
        if (waiting := order.next_of(key)) is not None and (its := runs_on(waiting)) != gpus:
            heapq.heappush(moments, (end_s, its))
    return sorted(found, key=lambda each: (each.end_s, each.begin_s, each.pipeline, each.stage))


def _ready(orders: Iterable[_Order], ends_s: Mapping[_Key, float], now_s: float) -> _Order | None:
    """Return the first order whose next pass can run now."""
    for order in orders:
        if order.passes and ((needed := order.needed()) is None or ends_s.get(needed, math.inf) <= now_s):
            return order
    return None


def _one_forward_one_backward(pipeline: int, stage: int, stages_after: int, micro_batches: int) -> Iterator[_Key]:
    """Yield a stage's passes in order."""
    ahead = min(stages_after + 1, micro_batches)
    for micro_batch in range(ahead):
        yield _Key(pipeline, stage, micro_batch, backward=False)
    for micro_batch in range(micro_batches):
        yield _Key(pipeline, stage, micro_batch, backward=True)
        if ahead + micro_batch < micro_batches:
            yield _Key(pipeline, stage, ahead + micro_batch, backward=False)
