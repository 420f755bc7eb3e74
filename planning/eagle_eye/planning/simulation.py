"""Simulates 1F1B event by event: the reference for ``step_time.py``, and the data of the chart. Pure."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from eagle_eye.planning.step_time import StageTimes


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
