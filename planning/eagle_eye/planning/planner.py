"""Makes a whole plan: templates, a layout for each number of nodes, the effect of losing any node. Pure."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from eagle_eye.planning.files import Profile, sums
from eagle_eye.planning.plan import FORMAT, Copy, Hardware, Layout, NodeLoss, Pipeline, Plan, Reroute, Template
from eagle_eye.planning.step_time import simulate, step_times_s
from eagle_eye.planning.templates import ModelDoesNotFit, plan_templates

# Finds the fastest mixture of pipelines, with its batch, for each number of nodes. Pure.
#
# A mixture takes a step time t if its pipelines together run the batch's micro-batches in t. The most that a number of
# nodes can run is a knapsack over templates, solved by dynamic programming; t is searched among the templates' own step
# times.


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


SIMULATED_PASSES_MAX = 20_000  # per loss: a tenth of a second
_LESS = 1 - 1e-9  # differences below this are rounding errors


class _Place(NamedTuple):
    """A node's place: layers ``begin`` to ``end`` - 1; of an idle node none."""

    begin: int
    end: int


_Templates = Mapping[int, Template]


def losses(
    before: Layout, after: Layout, templates: _Templates, state_bytes: Sequence[int], stage_memory_bytes: int
) -> tuple[NodeLoss, ...]:
    """Return the effect of losing each kind of node of the layout; ``state_bytes`` are sums over the first layers.

    Pipelines of one template are alike but for their batch, so one of them stands for all.
    """
    return tuple(
        _loss(template, node, before, after, templates, state_bytes, stage_memory_bytes)
        for template, node in before.kinds()
    )


def _loss(
    template: int,
    node: int,
    before: Layout,
    after: Layout,
    templates: _Templates,
    state_bytes: Sequence[int],
    stage_memory_bytes: int,
) -> NodeLoss:
    lost = before.last_begin(template) + node if template else before.nodes - 1
    held, needed = _places(before, templates), _places(after, templates)
    survivors = _survivors(before, after, lost, held, needed, state_bytes)
    copies = tuple(_copies(survivors, held, needed, state_bytes))
    less_s = after.step_s * _LESS
    reroute = _reroute(before, templates, template, node, stage_memory_bytes, less_s) if template else None
    rerouted = reroute is not None and reroute.step_s is not None and reroute.step_s < less_s
    return NodeLoss(
        template=template,
        node=node,
        survivors=tuple(survivors),
        copies=copies,
        reroute=reroute,
        rerouted=rerouted,
        why=_why(template, reroute, after.step_s),
    )


def _places(layout: Layout, templates: _Templates) -> list[_Place]:
    found = []
    for pipeline in layout.pipelines:
        stages = templates[pipeline.template].stages
        for node in range(pipeline.template):
            own = [stage for stage in stages if stage.node == node]
            found.append(_Place(own[0].first, own[-1].last + 1) if own else _Place(0, 0))
    return found + [_Place(0, 0)] * layout.idle_nodes


def _survivors(
    before: Layout,
    after: Layout,
    lost: int,
    held: Sequence[_Place],
    needed: Sequence[_Place],
    state_bytes: Sequence[int],
) -> list[int]:
    """Return who takes each place: whole pipelines stay, then nodes are assigned by how much they keep, most first."""
    taken: dict[int, int] = {}
    whole = defaultdict[int, list[int]](list)
    for pipeline, begin in zip(before.pipelines, before.begins(), strict=True):
        if not begin <= lost < begin + pipeline.template:
            whole[pipeline.template].append(begin)
    for pipeline, begin in zip(after.pipelines, after.begins(), strict=True):
        if whole[pipeline.template]:
            old = whole[pipeline.template].pop(0)
            taken |= {begin + node: old + node for node in range(pipeline.template)}
    gone = {lost, *taken.values()}
    nodes = [place for place in range(before.nodes) if place not in gone]
    places = [place for place in range(after.nodes) if place not in taken]
    kept = []
    for node in nodes:
        for place in places:
            begin, end = max(held[node].begin, needed[place].begin), min(held[node].end, needed[place].end)
            if begin < end:
                kept.append((state_bytes[begin] - state_bytes[end], node, place))
    free = set(nodes)
    for _, node, place in sorted(kept):
        if node in free and place not in taken:
            taken[place] = node
            free.remove(node)
    rest = iter(sorted(free))
    return [taken[place] if place in taken else next(rest) for place in range(after.nodes)]


def _copies(
    survivors: Sequence[int],
    held: Sequence[_Place],
    needed: Sequence[_Place],
    state_bytes: Sequence[int],
) -> Iterator[Copy]:
    """Yield what each place lacks, from the sources with the least load so far."""
    asked = dict.fromkeys(survivors, 0)
    for place, survivor in enumerate(survivors):
        has, needs = held[survivor], needed[place]
        at = needs.begin
        while at < needs.end:
            if has.begin <= at < has.end:
                at = has.end
                continue
            stop = has.begin if at < has.begin < needs.end else needs.end
            holders = [node for node in survivors if held[node].begin <= at < held[node].end]
            source = min(holders, key=lambda node: (asked[node], node), default=None)
            if source is not None:
                end = min(stop, held[source].end)
            else:
                end = next(
                    (
                        layer
                        for layer in range(at + 1, stop)
                        if any(held[node].begin <= layer < held[node].end for node in survivors)
                    ),
                    stop,
                )
            size = state_bytes[end] - state_bytes[at]
            if source is not None:
                asked[source] += size
            yield Copy(to=place, first=at, last=end - 1, source=source, copied_bytes=size)
            at = end


def _reroute(
    before: Layout, templates: _Templates, template: int, node: int, stage_memory_bytes: int, less_than_s: float
) -> Reroute | None:
    """Return the step time while peers run the node's stages; None where no other pipeline has the same ones."""
    alike = [pipeline for pipeline in before.pipelines if pipeline.template == template]
    stages = templates[template].stages
    own = [place for place, stage in enumerate(stages) if stage.node == node]
    if len(alike) < 2 or not own:
        return None
    peers = len(alike) - 1
    batches = [pipeline.micro_batches for pipeline in alike]
    times_s = [stage.forward_s + stage.backward_s for stage in stages]
    # The lost pipeline may be the one with the most. Whoever takes its passes, some peer runs the mean at least.
    others_s = max((pipeline.step_s for pipeline in before.pipelines if pipeline is not alike[0]), default=0.0)
    busiest_s = max(sum(times_s[:place]) + sum(batches) / peers * times_s[place] for place in own)
    soonest_s = max(others_s, busiest_s)
    fits = all(
        stages[place].memory_bytes + -(-(len(stages) - place) // peers) * stages[place].activation_bytes
        <= stage_memory_bytes
        for place in own
    )
    took_s = None
    if fits and soonest_s < less_than_s and 2 * len(stages) * sum(batches) <= SIMULATED_PASSES_MAX:
        took_s = max(simulate(stages, batches, failed=0, lost=own)[-1].end_s, others_s)
    return Reroute(
        peers=peers, more_micro_batches=-(-batches[0] // peers), step_s_min=soonest_s, step_s=took_s, fits=fits
    )


def _why(template: int, reroute: Reroute | None, next_s: float) -> str:
    if not template:
        return "an idle node: training goes on as it is"
    if reroute is None:
        return "no other pipeline has the same stages to take its micro-batches"
    peers = "its one peer" if reroute.peers == 1 else f"each of {reroute.peers} peers"
    its = f"{reroute.more_micro_batches} more micro-batches of its stages at {peers}"
    then = f"the next layout takes {next_s:.4g} s"
    if not reroute.fits:
        return f"{its} do not fit into their memory"
    if reroute.step_s_min >= next_s * _LESS:
        return f"{its} are more than their bubbles hold: {reroute.step_s_min:.4g} s a step at least; {then}"
    if reroute.step_s is None:
        return f"{its} would take {reroute.step_s_min:.4g} s a step or more, too many to be worked out; {then}"
    if reroute.step_s < next_s * _LESS:
        return f"{its} fill their bubbles: {reroute.step_s:.4g} s a step, and nothing is copied; {then}"
    return (
        f"{its} take {reroute.step_s:.4g} s a step by 1F1B, and {reroute.step_s_min:.4g} s at least where a schedule"
        f" fills all bubbles; {then}"
    )


NODES_MAX = 256
GPUS_PER_NODE_MAX = 64
TOLERATE_MAX = 64
MICRO_BATCHES_MAX = 16_384  # of a step
WORK_MAX = 20_000  # layers times nodes: a minute


def make_plan(
    profile: Profile, nodes: Sequence[str], hardware: Hardware, tolerate: int, global_batch: int, job: str = ""
) -> Plan:
    """Return the plan for these nodes, in any order, and for every smaller number that holds the model.

    Raises ValueError, whose message begins with the parameter that is wrong.
    """
    micro_batches = _checked(profile, nodes, hardware, tolerate, global_batch)
    try:
        templates = plan_templates(profile, hardware, tolerate, micro_batches)
    except ModelDoesNotFit as error:
        raise ValueError(f"nodes: {error}") from None
    layouts = plan_layouts(templates, hardware.nodes, tolerate, micro_batches)
    by_nodes = {template.nodes: template for template in templates}
    state_bytes = sums(profile).state_bytes
    reported = [
        msgspec.structs.replace(
            layout, losses=losses(layout, after, by_nodes, state_bytes, hardware.stage_memory_bytes)
        )
        for after, layout in pairwise(layouts)
    ]
    return Plan(
        format=FORMAT,
        layers=len(profile.layers),
        global_batch=global_batch,
        micro_batch=profile.micro_batch,
        tolerate=tolerate,
        device=profile.device,
        hardware=hardware,
        nodes=tuple(nodes),
        templates=templates,
        layouts=(layouts[0], *reported),
        job=job,
    )


def check_names(nodes: Sequence[str]) -> None:
    """Check that these are node names, each once, and not too many. Raises ValueError."""
    if not 1 <= len(nodes) <= NODES_MAX:
        raise ValueError(f"nodes: expected 1 to {NODES_MAX}, got {len(nodes)}")
    if len(set(nodes)) != len(nodes):
        twice = next(node for node in nodes if nodes.count(node) > 1)
        raise ValueError(f"nodes: {twice} is named {nodes.count(twice)} times; name each node once")


def _checked(profile: Profile, nodes: Sequence[str], hardware: Hardware, tolerate: int, global_batch: int) -> int:
    """Return the number of micro-batches per step. Raises ValueError."""
    check_names(nodes)
    if len(nodes) * len(profile.layers) > WORK_MAX:
        raise ValueError(
            f"nodes: {len(nodes)} nodes times {len(profile.layers)} layers are more than {WORK_MAX};"
            " join layers that stay together into one"
        )
    if not 1 <= hardware.gpus_per_node <= GPUS_PER_NODE_MAX:
        raise ValueError(f"gpus_per_node: expected 1 to {GPUS_PER_NODE_MAX}, got {hardware.gpus_per_node}")
    if hardware.gpus_per_stage < 1 or hardware.gpus_per_node % hardware.gpus_per_stage:
        raise ValueError(
            f"gpus_per_stage: expected a divisor of the {hardware.gpus_per_node} GPUs of a node,"
            f" got {hardware.gpus_per_stage}"
        )
    if hardware.gpu_memory_bytes < 1:
        raise ValueError(f"gpu_memory: expected 1 byte or more, got {hardware.gpu_memory_bytes}")
    if not 0 <= tolerate <= TOLERATE_MAX:
        raise ValueError(f"tolerate: expected 0 to {TOLERATE_MAX}, got {tolerate}")
    micro_batches, rest = divmod(global_batch, profile.micro_batch)
    if global_batch < 1 or rest:
        raise ValueError(
            f"global_batch: expected a multiple of the profile's micro-batch of {profile.micro_batch} samples,"
            f" got {global_batch}"
        )
    if not tolerate < micro_batches <= MICRO_BATCHES_MAX:
        raise ValueError(
            f"global_batch: expected {tolerate + 1} to {MICRO_BATCHES_MAX} micro-batches, one for each pipeline"
            f" at least, got {micro_batches}"
        )
    return micro_batches
