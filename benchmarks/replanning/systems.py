"""Eagle Eye's plan, Oobleck and Bamboo, each simulated by its own rules on the same layers and nodes. Pure.

Step times of all three are those of 1F1B run event by event. Nobody's sending of activations, all-reducing of gradients
or copying of layers is reckoned with, but for what the pauses contain.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.replanning.traces import Pause
from eagle_eye.planning.files import Profile, sums
from eagle_eye.planning.plan import Hardware, NoLayout, Plan, Template
from eagle_eye.planning.step_time import simulate

# What a reconfiguration takes, by model: local_rendezvous_timeout_delta in oobleck_simulator.py and bamboo_simulator.py
# (github.com/SymbioticLab/Oobleck, tools/simulator: what Oobleck's authors made their figure 9 with). The smallest
# model and the largest one.
OOBLECK_PAUSES_S = {"BERT-large": 2.0, "GPT-3 6.7B": 10.0}
BAMBOO_PAUSES_S = {"BERT-large": 76.0, "GPT-3 6.7B": 450.0}
BAMBOO_SLOWER = 1.5  # fallback_slowdown of the same: a node runs its lost successor's stage, too, to the step's end
BAMBOO_DEPTH_RATIO = 1.5  # of a pipeline's nodes to the fewest that hold the model (Bamboo, NSDI 2023, section 3)
BAMBOO_NODES_MAX = 40  # with more of them a loss is not always followed by a reconfiguration
OOBLECK_MICRO_BATCHES = 4  # of each stage, for which Oobleck chooses its stages (Oobleck's planner)


class Passes(NamedTuple):
    """What one micro-batch takes a stage."""

    forward_s: float
    backward_s: float

    @property
    def both_s(self) -> float:
        """Both passes."""
        return self.forward_s + self.backward_s


@functools.cache
def step_s(stages: tuple[Passes, ...], micro_batches: int) -> float:
    """Return what a step takes the pipeline, event by event."""
    return simulate(stages, [micro_batches])[-1].end_s


def passes(template: Template) -> tuple[Passes, ...]:
    """Return the template's stages."""
    return tuple(Passes(stage.forward_s, stage.backward_s) for stage in template.stages)


class Planned:
    """A job that follows our plan: on n nodes it has the layout for n."""

    def __init__(self, plan: Plan, pause: Pause, grow_s: float) -> None:
        """``pause`` follows a loss; taking a node back takes ``grow_s``."""
        self._plan, self._pause, self._grow_s = plan, pause, grow_s
        self._stages = {template.nodes: passes(template) for template in plan.templates}
        self._nodes = len(plan.nodes)

    @property
    def step_s(self) -> float:
        """What a step takes in the layout for these nodes."""
        try:
            layout = self._plan.layout(self._nodes)
        except NoLayout:
            return math.inf
        return max(step_s(self._stages[one.template], one.micro_batches) for one in layout.pipelines)

    def lose(self, node: int) -> Pause | None:
        """The next layout."""
        del node
        self._nodes -= 1
        return self._pause

    def gain(self, node: int) -> Pause | None:
        """The layout before, at the end of a step."""
        del node
        self._nodes += 1
        return Pause(self._grow_s)


class OobleckTemplate(NamedTuple):
    """Stages, and what Oobleck reckons with: what a step of ``OOBLECK_MICRO_BATCHES`` a stage takes."""

    stages: tuple[Passes, ...]
    estimated_s: float

    @property
    def micro_batch_s(self) -> float:
        """What a micro-batch takes, on average."""
        return self.estimated_s / (OOBLECK_MICRO_BATCHES * len(self.stages))

    def step_s(self, micro_batches: int) -> float:
        """Return its estimate for another number of micro-batches: as many more of the slowest stage."""
        slowest_s = max(stage.both_s for stage in self.stages)
        return self.estimated_s + slowest_s * (micro_batches - OOBLECK_MICRO_BATCHES * len(self.stages))


def estimated_s(stages: Sequence[Passes], micro_batches: int) -> float:
    """Return what Oobleck estimates for a step: all stages, the slowest one M - S + k times, those after it."""
    slowest = max(range(len(stages)), key=lambda place: stages[place].both_s)
    again = micro_batches - len(stages) + slowest
    return (
        sum(stage.both_s for stage in stages)
        + again * stages[slowest].both_s
        + sum(stage.both_s for stage in stages[slowest + 1 :])
    )


def oobleck_templates(profile: Profile, hardware: Hardware, tolerate: int) -> dict[int, OobleckTemplate]:
    """Return Oobleck's templates, from the fewest nodes that hold the model to all but ``tolerate`` such pipelines.

    All cuts are tried, of which its divide and conquer finds the best.
    """
    found: dict[int, OobleckTemplate] = {}
    nodes, most = 1, hardware.nodes
    while nodes <= min(most, len(profile.layers)):
        if (template := _oobleck_template(profile, hardware, nodes)) is not None:
            if not found:
                most = max(2 * nodes - 1, hardware.nodes - tolerate * nodes)
            found[nodes] = template
        nodes += 1
    return found


def _oobleck_template(profile: Profile, hardware: Hardware, nodes: int) -> OobleckTemplate | None:
    costs, layers = sums(profile), len(profile.layers)
    best: OobleckTemplate | None = None
    for inner in itertools.combinations(range(1, layers), nodes - 1):
        bounds = [*itertools.pairwise((0, *inner, layers))]
        if any(
            costs.held_bytes[end] - costs.held_bytes[begin]
            + (nodes - place) * (costs.activation_bytes[end] - costs.activation_bytes[begin])
            > hardware.stage_memory_bytes
            for place, (begin, end) in enumerate(bounds)
        ):  # fmt: skip
            continue
        stages = tuple(
            Passes(costs.forward_s[end] - costs.forward_s[begin], costs.backward_s[end] - costs.backward_s[begin])
            for begin, end in bounds
        )
        its_s = estimated_s(stages, OOBLECK_MICRO_BATCHES * nodes)
        if best is None or its_s < best.estimated_s:
            best = OobleckTemplate(stages, its_s)
    return best


def given_out(micro_batch_s: Sequence[float], micro_batches: int) -> list[int]:
    """Return how many micro-batches each pipeline runs, one at least, so that the slowest product is the least."""
    found = [1] * len(micro_batch_s)
    for _ in range(micro_batches - len(found)):
        place = min(range(len(found)), key=lambda each: (found[each] + 1) * micro_batch_s[each])
        found[place] += 1
    return found


class Oobleck:
    """Pipelines of templates. One that loses a node becomes a smaller one, borrows a node, or merges with another."""

    def __init__(
        self,
        templates: dict[int, OobleckTemplate],
        nodes: int,
        tolerate: int,
        micro_batches: int,
        pause: Pause,
        grow_s: float,
    ) -> None:
        """``pause`` follows a loss; taking a node back takes ``grow_s``."""
        self._templates, self._tolerate, self._micro_batches = templates, tolerate, micro_batches
        self._pause, self._grow_s = pause, grow_s
        self.pipelines: list[list[int]] = []
        self._instantiate(range(nodes))

    @property
    def step_s(self) -> float:
        """What a step takes the slowest pipeline."""
        used = self._used()
        if not used:
            return math.inf
        batches = given_out([template.micro_batch_s for template in used], self._micro_batches)
        return max(step_s(template.stages, batch) for template, batch in zip(used, batches, strict=True))

    def lose(self, node: int) -> Pause | None:
        """The pipeline goes on smaller, with a node of a larger one, or as part of another one."""
        short = next(pipeline for pipeline in self.pipelines if node in pipeline)
        short.remove(node)
        if len(short) not in self._templates:
            self._help(short)
        return self._pause

    def gain(self, node: int) -> Pause | None:
        """All pipelines are chosen anew."""
        self._instantiate([*itertools.chain(*self.pipelines), node])
        return Pause(self._grow_s)

    def _help(self, short: list[int]) -> None:
        others = sorted((one for one in self.pipelines if one is not short), key=len)
        lender = next((one for one in reversed(others) if len(one) - 1 in self._templates), None)
        if lender is not None and len(short) + 1 in self._templates:
            short.append(lender.pop())
            return
        merged = next((one for one in others if len(one) + len(short) in self._templates), None)
        if merged is not None:
            merged += short
            self.pipelines.remove(short)

    def _instantiate(self, nodes: Sequence[int]) -> None:
        """The pipelines are those of whose mixtures the estimate is the least; the nodes are given out in order."""
        least = min(self._templates)
        pipelines_min = min(self._tolerate + 1, len(nodes) // least)
        sizes: tuple[int, ...] = min(
            (one for one in _mixtures([*self._templates], len(nodes)) if len(one) >= pipelines_min),
            key=self._estimated_s,
            default=(len(nodes),),  # too few for any
        )
        left = iter(nodes)
        self.pipelines = [[*itertools.islice(left, size)] for size in sizes]

    def _estimated_s(self, sizes: Sequence[int]) -> float:
        used = [self._templates[size] for size in sizes]
        if len(used) > self._micro_batches:
            return math.inf
        batches = given_out([template.micro_batch_s for template in used], self._micro_batches)
        return max(template.step_s(batch) for template, batch in zip(used, batches, strict=True))

    def _used(self) -> list[OobleckTemplate]:
        return [self._templates[len(one)] for one in self.pipelines if len(one) in self._templates]


def _mixtures(sizes: Sequence[int], nodes: int) -> Iterator[tuple[int, ...]]:
    """Yield the sizes of pipelines that take so many nodes together, each mixture once."""
    for place, size in enumerate(sizes):
        if size == nodes:
            yield (size,)
        elif size < nodes:
            yield from ((size, *more) for more in _mixtures(sizes[place:], nodes - size))


class Bamboo:
    """Pipelines of ``depth`` nodes, each of which runs its successor's forward passes as well; other nodes stand by.

    The forward passes that are redundant fill all bubbles, and cost only what does not fit. A node that is lost is
    stood in for by the one before it to the end of the step; then pipelines are formed anew. Two lost neighbours are
    taken to be no worse.
    """

    def __init__(self, stages: tuple[Passes, ...], nodes: int, micro_batches: int, pause_s: float) -> None:
        if nodes > BAMBOO_NODES_MAX:
            raise ValueError(f"nodes: expected {BAMBOO_NODES_MAX} at most, got {nodes}")
        self._stages, self._micro_batches, self._pause_s = stages, micro_batches, pause_s
        self._training: list[int] = []
        self._standing_by: list[int] = []
        self._form([*range(nodes)])

    @property
    def step_s(self) -> float:
        """What a step takes a pipeline."""
        pipelines = len(self._training) // len(self._stages)
        if not pipelines:
            return math.inf
        batch = -(-self._micro_batches // pipelines)
        after = (*self._stages[1:], self._stages[0])
        busiest_s = max(own.both_s + next_.forward_s for own, next_ in zip(self._stages, after, strict=True))
        return max(step_s(self._stages, batch), batch * busiest_s)

    def lose(self, node: int) -> Pause | None:
        """The step ends later, and pipelines are formed anew."""
        if node in self._standing_by:
            self._standing_by.remove(node)
            return None
        self._form([one for one in (*self._training, *self._standing_by) if one != node])
        return Pause(self._pause_s, slower=BAMBOO_SLOWER)

    def gain(self, node: int) -> Pause | None:
        """The node stands by, until there are enough for one more pipeline."""
        self._standing_by.append(node)
        if len(self._standing_by) < len(self._stages):
            return None
        self._form([*self._training, *self._standing_by])
        return Pause(self._pause_s)

    def _form(self, nodes: list[int]) -> None:
        used = len(nodes) // len(self._stages) * len(self._stages)
        self._training, self._standing_by = nodes[:used], nodes[used:]


def bamboo_stages(plan: Plan, lost_max: int) -> tuple[Passes, ...]:
    """Return the stages of the depth that is the best for Bamboo with none to ``lost_max`` nodes lost, on average."""
    nodes, least = len(plan.nodes), math.ceil(BAMBOO_DEPTH_RATIO * plan.nodes_min)
    deep = [passes(template) for template in plan.templates if template.nodes >= least]
    left = range(nodes - lost_max, nodes + 1)
    return max(deep, key=lambda stages: sum(1 / Bamboo(stages, n, plan.micro_batches, 0.0).step_s for n in left))
