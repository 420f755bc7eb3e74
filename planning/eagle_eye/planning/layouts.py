"""Finds the fastest mixture of pipelines, with its batch, for each number of nodes. Pure.

A mixture takes a step time t if its pipelines together run the batch's micro-batches in t. The most that a number of
nodes can run is a knapsack over templates, solved by dynamic programming; t is searched among the templates' own step
times.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from eagle_eye.planning.plan import Layout, Pipeline, Template
from eagle_eye.planning.step_time import step_times_s


def plan_layouts(
    templates: Sequence[Template], nodes_max: int, tolerate: int, micro_batches: int
) -> tuple[Layout, ...]:
    """Return the best mixture for each number of nodes from the smallest template's to ``nodes_max``.

    Each has at least ``tolerate`` + 1 pipelines where there are enough nodes, else as many as possible; no more than
    there are micro-batches. No other mixture of these templates, with any batch, is faster.
    """
    times_s = {template.nodes: step_times_s(template.stages, micro_batches) for template in templates}
    least = templates[0].nodes
    found: list[Layout] = []
    for nodes in range(least, nodes_max + 1):
        pipelines_min = min(tolerate + 1, nodes // least, micro_batches)
        mixture = _soonest(times_s, nodes, pipelines_min, micro_batches)
        pipelines = _with_batches(mixture, times_s, micro_batches)
        found.append(
            Layout(
                nodes=nodes,
                pipelines=pipelines,
                idle_nodes=nodes - sum(pipeline.template for pipeline in pipelines),
                step_s=max(pipeline.step_s for pipeline in pipelines),
                tolerates=min(len(pipelines) - 1, nodes - least),
            )
        )
    return tuple(found)


_Times = Mapping[int, Sequence[float]]


def _soonest(times_s: _Times, nodes: int, pipelines_min: int, micro_batches: int) -> list[int]:
    """Return the templates of the fastest mixture."""
    fitting = {template: steps_s for template, steps_s in times_s.items() if template <= nodes}
    # Between the two lie the step times that may be the least: one that does not do, and one that does, since in it
    # each pipeline runs all alone.
    too_soon_s, enough_s = 0.0, max(steps_s[-1] for steps_s in fitting.values())
    while (next_s := _next_s(fitting, too_soon_s)) < enough_s:
        tried_s = max(next_s, (too_soon_s + enough_s) / 2)
        if _Packing(fitting, tried_s, nodes, pipelines_min).most >= micro_batches:
            enough_s = max(steps_s[at - 1] for steps_s in fitting.values() if (at := bisect_right(steps_s, tried_s)))
        else:
            too_soon_s = tried_s
    return _Packing(fitting, enough_s, nodes, pipelines_min).templates()


def _next_s(times_s: _Times, after_s: float) -> float:
    """Return the next larger step time of any template and batch."""
    places = ((steps_s, bisect_right(steps_s, after_s)) for steps_s in times_s.values())
    return min((steps_s[at] for steps_s, at in places if at < len(steps_s)), default=math.inf)


class _Packing:
    """The pipelines on so many nodes that run the most micro-batches in ``step_s``, ``pipelines_min`` at least.

    ``most`` are these micro-batches, below 0 where there are no such pipelines.
    """

    def __init__(self, times_s: _Times, step_s: float, nodes: int, pipelines_min: int) -> None:
        self._nodes = nodes
        runs = {template: ran for template, steps_s in times_s.items() if (ran := bisect_right(steps_s, step_s))}
        # For each number of nodes the most micro-batches, and the template that was added last.
        most, last = [0] * (nodes + 1), [0] * (nodes + 1)
        used = {}
        for template, ran in sorted(runs.items()):
            if ran > most[template]:  # else shorter pipelines run as much
                used[template] = ran
                _add(template, ran, most, most, last)
        self._lasts = [last]
        for _ in range(pipelines_min):  # the same with one pipeline more at least
            more, last = [-1] * (nodes + 1), [0] * (nodes + 1)
            for template, ran in used.items():
                _add(template, ran, most, more, last)
            most = more
            self._lasts.append(last)
        self.most = most[nodes]

    def templates(self) -> list[int]:
        """Return the pipelines' templates."""
        found, left, level = [], self._nodes, len(self._lasts) - 1
        while template := self._lasts[level][left]:
            found.append(template)
            left -= template
            level = max(level - 1, 0)
        return found


def _add(template: int, ran: int, before: Sequence[int], most: list[int], last: list[int]) -> None:
    """Add one pipeline of the template to the packings in ``before`` wherever that runs more."""
    for nodes in range(template, len(most)):
        if before[nodes - template] >= 0 and before[nodes - template] + ran > most[nodes]:
            most[nodes], last[nodes] = before[nodes - template] + ran, template


def _with_batches(mixture: Sequence[int], times_s: _Times, micro_batches: int) -> tuple[Pipeline, ...]:
    """Return the pipelines with the batch distributed to minimize the slowest one's time; none gets nothing.

    Each micro-batch goes to the pipeline that finishes it first. Where there are fewer of them than pipelines, the
    slowest pipelines are left out.
    """
    order = sorted(mixture, key=lambda template: (times_s[template][0], template))[:micro_batches]
    batches = [1] * len(order)
    queue = [(times_s[template][1], place) for place, template in enumerate(order) if micro_batches > 1]
    heapq.heapify(queue)
    for _ in range(micro_batches - len(order)):
        _, place = queue[0]
        batches[place] += 1
        steps_s = times_s[order[place]]
        if batches[place] < micro_batches:
            heapq.heapreplace(queue, (steps_s[batches[place]], place))
        else:
            heapq.heappop(queue)
    return tuple(
        Pipeline(template=template, micro_batches=batch, step_s=times_s[template][batch - 1])
        for template, batch in sorted(zip(order, batches, strict=True), key=lambda each: (each[0], -each[1]))
    )
