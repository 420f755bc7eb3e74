"""Pipeline templates: the layers split into stages for each number of nodes (Oobleck, SOSP 2023). Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from eagle_eye.planning.files import Profile, Sums, sums
from eagle_eye.planning.plan import Hardware, Stage, Template
from eagle_eye.planning.step_time import least_time_s, step_time_s

TRIES_MAX = 400  # per template: all cuts of eight layers are fewer
_LESS = 1 - 1e-9  # differences below this are rounding errors


class ModelDoesNotFit(ValueError):
    """The model does not fit on so many nodes; the message says what is missing."""


def plan_templates(profile: Profile, hardware: Hardware, tolerate: int, micro_batches: int) -> tuple[Template, ...]:
    """Return the templates for n0, the fewest nodes that hold the model, n0 + 1, ... nodes.

    Up to 2 n0 - 1, so that every number of nodes from n0 on is a sum of them, and beyond as long as ``tolerate`` other
    pipelines of n0 nodes find room beside it and a stage finds work on each of its nodes. Raises DoesNotFit.
    """
    costs = sums(profile)
    found: list[Template] = []
    for nodes in range(1, hardware.nodes + 1):
        template = _template(costs, hardware, nodes, micro_batches)
        if template is not None:
            found.append(template)
            break
        if nodes * hardware.stages_per_node >= len(profile.layers):  # each layer has had a stage of its own
            break
    if not found:
        raise ModelDoesNotFit(_misfit(costs, hardware))
    least = found[0].nodes
    for nodes in range(least + 1, max(2 * least - 1, hardware.nodes - tolerate * least) + 1):
        template = _template(costs, hardware, nodes, micro_batches)
        if template is None or (nodes >= 2 * least and template.stages[-1].node < nodes - 1):
            break
        found.append(template)
    return tuple(found)


def _template(costs: Sums, hardware: Hardware, nodes: int, micro_batches: int) -> Template | None:
    """Return the template for its nodes' share of a step's micro-batches, None where the model does not fit."""
    share = max(1, round(micro_batches * min(nodes / hardware.nodes, 1.0)))
    stages_max = nodes * hardware.stages_per_node
    cuts = split(costs, stages_max, share, hardware.stage_memory_bytes)
    if cuts is None:
        return None
    stages = tuple(_stages(costs, cuts, hardware.stages_per_node))
    return Template(nodes=nodes, stages=stages, micro_batches=share, step_s=step_time_s(stages, share))


def _stages(costs: Sums, cuts: list[int], per_node: int) -> list[Stage]:
    found = []
    for place, (begin, end) in enumerate(pairwise(cuts)):
        held, activations = (sizes[end] - sizes[begin] for sizes in (costs.held_bytes, costs.activation_bytes))
        in_flight = len(cuts) - 1 - place
        found.append(
            Stage(
                first=begin,
                last=end - 1,
                node=place // per_node,
                forward_s=costs.forward_s[end] - costs.forward_s[begin],
                backward_s=costs.backward_s[end] - costs.backward_s[begin],
                held_bytes=held,
                activation_bytes=activations,
                memory_bytes=held + in_flight * activations,
            )
        )
    return found


def split(costs: Sums, stages_max: int, micro_batches: int, memory_bytes: int) -> list[int] | None:
    """Return where the layers are cut into stages, 0 and their number included; None where no cuts fit the memory.

    Dynamic programming finds, for each number of stages, the cuts whose most binding stage needs the least. What a
    step takes may be a little more, so that cuts are looked for that need less, among those that may: all of them, up
    to ``TRIES_MAX`` steps of the search. That is enough for any eight layers. Of equals the fewest stages are taken.
    """
    search = _Search(costs, micro_batches, memory_bytes)
    for _ in range(min(stages_max, search.layers)):
        search.add_stage()
    promising = [after for after, bounds in enumerate(search.bounds) if bounds[0] < math.inf]
    if not promising:
        return None
    promising.sort(key=lambda after: search.bounds[after][0])
    best = search.bound_cuts(promising[0])
    best_s = search.step_s(best)
    tries = iter(range(TRIES_MAX))
    for after in promising:
        waiting = [(search.bounds[after][0], [0])]
        while waiting and next(tries, None) is not None:
            bound_s, cuts = waiting.pop()
            if bound_s >= best_s * _LESS:
                continue
            if cuts[-1] == search.layers:
                if (step_s := search.step_s(cuts)) < best_s * _LESS:
                    best, best_s = cuts, step_s
                continue
            further = search.further(bound_s, cuts, after + 1 - len(cuts), best_s * _LESS)
            waiting += sorted(further, reverse=True)  # the most promising first
    return best


class _Search:
    """Bounds of what stages need, from the last one on.

    ``bounds[after][begin]`` is what a step takes at least because of the best stages from layer ``begin`` on, of which
    there are ``after`` + 1: what a stage needs depends on its own layers, on how many stages follow and on the sums of
    what lies before and behind, not on how that is cut.
    """

    def __init__(self, costs: Sums, micro_batches: int, memory_bytes: int) -> None:
        self.layers = len(costs.held_bytes) - 1
        self.bounds: list[list[float]] = []
        self._costs = costs
        self._time_s = [there + back for there, back in zip(costs.forward_s, costs.backward_s, strict=True)]
        self._micro_batches = micro_batches
        self._memory_bytes = memory_bytes

    def add_stage(self) -> None:
        """Work out the bounds of one stage more."""
        after = len(self.bounds)
        bounds = [math.inf] * (self.layers + 1)
        for begin in range(self.layers - after):
            for bound_s, _ in self._stages(begin, after, best_only=True):
                bounds[begin] = bound_s
        self.bounds.append(bounds)

    def bound_cuts(self, after: int) -> list[int]:
        """Return the cuts into ``after`` + 1 stages that have the least bound."""
        cuts = [0]
        for left in range(after, -1, -1):
            *_, (_, end) = self._stages(cuts[-1], left, best_only=True)
            cuts.append(end)
        return cuts

    def further(
        self, bound_s: float, cuts: Sequence[int], after: int, less_than_s: float
    ) -> Iterator[tuple[float, list[int]]]:
        """Yield the cuts with one stage more, of which ``after`` follow, and their bound, where that may be less."""
        for its_bound_s, end in self._stages(cuts[-1], after, less_than_s):
            yield max(bound_s, its_bound_s), [*cuts, end]

    def step_s(self, cuts: Sequence[int]) -> float:
        """Return what a step takes with these cuts."""
        forward_s, backward_s = self._costs.forward_s, self._costs.backward_s
        return step_time_s(
            [_Passes(forward_s[end] - forward_s[begin], backward_s[end] - backward_s[begin])
             for begin, end in pairwise(cuts)],
            self._micro_batches,
        )  # fmt: skip

    def _stages(
        self, begin: int, after: int, less_than_s: float = math.inf, *, best_only: bool = False
    ) -> Iterator[tuple[float, int]]:
        """Yield the stages from a layer on that keep the memory: the bound with the best ones behind, and their end.

        Those with a bound below ``less_than_s``; ``best_only``: each less than the one before.
        """
        forward_s, backward_s, time_s = self._costs.forward_s, self._costs.backward_s, self._time_s
        held, activations = self._costs.held_bytes, self._costs.activation_bytes
        behind = self.bounds[after - 1] if after else [math.inf] * self.layers + [0.0]
        for end in range(begin + 1, self.layers - after + 1):
            if held[end] - held[begin] + (after + 1) * (activations[end] - activations[begin]) > self._memory_bytes:
                return
            here_s = time_s[end] - time_s[begin]
            if self._micro_batches > after and time_s[begin] + self._micro_batches * here_s >= less_than_s:
                return  # and longer stages need more
            if (behind_s := behind[end]) >= less_than_s:
                continue
            bound_s = least_time_s(
                time_s[begin],
                forward_s[end] - forward_s[begin],
                backward_s[end] - backward_s[begin],
                time_s[self.layers] - time_s[end],
                after,
                self._micro_batches,
            )
            bound_s = max(bound_s, behind_s)
            if bound_s < less_than_s:
                yield bound_s, end
                if best_only:
                    less_than_s = bound_s


class _Passes(NamedTuple):
    forward_s: float
    backward_s: float


def _misfit(costs: Sums, hardware: Hardware) -> str:
    layers = len(costs.held_bytes) - 1
    for layer in range(layers):
        need = costs.held_bytes[layer + 1] - costs.held_bytes[layer]
        need += costs.activation_bytes[layer + 1] - costs.activation_bytes[layer]
        if need > hardware.stage_memory_bytes:
            return (
                f"layer {layer} alone needs {need} bytes (parameters, gradients, optimizer, one micro-batch), but"
                f" a stage has {hardware.stage_memory_bytes}; take smaller micro-batches, or more GPUs per stage"
            )
    return (
        f"the model needs {costs.held_bytes[-1]} bytes and its activations, but {hardware.nodes} nodes with"
        f" {hardware.stages_per_node} stages of {hardware.stage_memory_bytes} bytes each do not hold it"
    )
