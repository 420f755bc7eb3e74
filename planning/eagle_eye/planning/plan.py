"""The plan as stored in its file: templates, a layout for each number of nodes, the effects of losses. Pure.

Of a layout, an attempt's ranks get in ``EAGLE_EYE_LAYOUT`` which of them runs which layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import Literal, NamedTuple

import msgspec

FORMAT: Literal["eagle-eye-plan/1"] = "eagle-eye-plan/1"


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """The plan's nodes, all alike.

    A stage runs on ``gpus_per_stage`` GPUs of one node, which hold it together (tensor parallel), and the profile's
    times and bytes are those of all of them.
    """

    nodes: int
    gpus_per_node: int
    gpus_per_stage: int
    gpu_memory_bytes: int

    @property
    def stages_per_node(self) -> int:
        """How many stages fit on a node."""
        return self.gpus_per_node // self.gpus_per_stage

    @property
    def stage_memory_bytes(self) -> int:
        """The memory of a stage's GPUs."""
        return self.gpus_per_stage * self.gpu_memory_bytes


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Layers ``first`` to ``last`` on the GPUs of one node; ``node`` counts the pipeline's nodes from 0.

    Times are those of one micro-batch. ``held_bytes`` are parameters, gradients and optimizer states,
    ``activation_bytes`` what a micro-batch keeps, ``memory_bytes`` the most that 1F1B needs.
    """

    first: int
    last: int
    node: int
    forward_s: float
    backward_s: float
    held_bytes: int
    activation_bytes: int
    memory_bytes: int


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """The stages of a pipeline of so many nodes; ``micro_batches`` are those of a step that they were chosen for."""

    nodes: int
    stages: tuple[Stage, ...]
    micro_batches: int
    step_s: float


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline: the template's nodes, and the micro-batches that it runs in a step."""

    template: int
    micro_batches: int
    step_s: float


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """Layers ``first`` to ``last`` for one node of the next layout, by its place there.

    ``source`` is the place of a node in the layout before, which holds them; None where no node that is left does.
    """

    to: int
    first: int
    last: int
    source: int | None
    copied_bytes: int


class Reroute(msgspec.Struct, frozen=True, kw_only=True):
    """The lost node's micro-batches on the same stages of pipelines of the same template (ReCycle, SOSP 2024).

    Each of ``peers`` runs up to ``more_micro_batches`` of the lost stages beside its own. A step takes no less than
    ``step_s_min``, and ``step_s`` by 1F1B: None where the next layout is faster than even the least, where the peers'
    memory does not hold the activations (``fits``), and where it would take too long to work out.
    """

    peers: int
    more_micro_batches: int
    step_s_min: float
    step_s: float | None
    fits: bool


class NodeLoss(msgspec.Struct, frozen=True, kw_only=True):
    """One node goes that is ``node`` of the last pipeline of ``template``; 0 and 0: an idle one.

    ``survivors`` has, for each place of the next layout, the node's place in this one. Places count the pipelines'
    nodes through, the idle ones last. ``rerouted``: the job is better off if it stays as it is without the node, by
    ``reroute``; ``why`` says why, or why not.
    """

    template: int
    node: int
    survivors: tuple[int, ...]
    copies: tuple[Copy, ...]
    reroute: Reroute | None
    rerouted: bool
    why: str

    @property
    def copied_bytes(self) -> int:
        """The total bytes copied."""
        return sum(copy.copied_bytes for copy in self.copies)


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The pipelines of a number of nodes, the shortest first; ``idle_nodes`` are in none of them.

    ``step_s`` is the slowest pipeline's. ``tolerates`` is how many nodes may go at once so that a whole copy of the
    model's state is left in the others' memory, and nodes enough to hold it. ``losses`` has what follows when a node
    goes, by its kind; it is empty where too few are left then.
    """

    nodes: int
    pipelines: tuple[Pipeline, ...]
    idle_nodes: int
    step_s: float
    tolerates: int
    losses: tuple[NodeLoss, ...] = ()

    @property
    def mixture(self) -> str:
        """How many pipelines of how many nodes there are: 2 x 2 + 1 x 3."""
        counts = Counter(pipeline.template for pipeline in self.pipelines)
        reported = " + ".join(f"{count} x {template}" for template, count in sorted(counts.items()))
        return reported + (f" + {self.idle_nodes} idle" if self.idle_nodes else "")

    def begins(self) -> list[int]:
        """Return the place of each pipeline's first node."""
        return [*accumulate((pipeline.template for pipeline in self.pipelines[:-1]), initial=0)]

    def last_begin(self, template: int) -> int:
        """Return the place of the first node of the last pipeline of the template."""
        pairs = zip(self.pipelines, self.begins(), strict=True)
        return max(begin for pipeline, begin in pairs if pipeline.template == template)

    def kinds(self) -> Iterator[tuple[int, int]]:
        """Yield every kind of node: the template and the node's number in it; (0, 0) for idle ones."""
        for template in sorted({pipeline.template for pipeline in self.pipelines}):
            yield from ((template, node) for node in range(template))
        if self.idle_nodes:
            yield (0, 0)


class NoLayout(ValueError):
    """The plan has no layout for so many nodes; the message says what to wait for or to plan."""


class Next(NamedTuple):
    """How training continues: the layout, who has which of its places, and the loss, with the places in ``before``."""

    layout: Layout
    nodes: tuple[str, ...]
    loss: NodeLoss
    before: tuple[str, ...]


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole plan. ``nodes`` are the names by their places in the last layout, which has all of them.

    ``job`` is the only job that may follow it; "" where unspecified.
    """

    format: Literal["eagle-eye-plan/1"]
    layers: int
    global_batch: int
    micro_batch: int
    tolerate: int
    device: str
    hardware: Hardware
    nodes: tuple[str, ...]
    templates: tuple[Template, ...]
    layouts: tuple[Layout, ...]
    job: str = ""

    @property
    def nodes_min(self) -> int:
        """The fewest nodes that hold the model."""
        return self.templates[0].nodes

    @property
    def micro_batches(self) -> int:
        """How many micro-batches make the global batch."""
        return self.global_batch // self.micro_batch

    def layout(self, nodes: int) -> Layout:
        """Return the layout for so many nodes. Raises NoLayout."""
        if nodes < self.nodes_min:
            raise NoLayout(
                f"no layout for {nodes} {'node' if nodes == 1 else 'nodes'}: the model needs {self.nodes_min};"
                " the job waits for a spare"
            )
        if nodes > self.hardware.nodes:
            raise NoLayout(f"no layout for {nodes} nodes: the plan is for {self.hardware.nodes} at most; plan again")
        return self.layouts[nodes - self.nodes_min]

    def lost(self, nodes: Sequence[str], node: str) -> Next:
        """Return what follows the loss of ``node``, from the table; ``nodes`` have their places in their layout.

        Raises NoLayout where too few are left, ValueError for an unknown node.
        """
        if node not in nodes:
            raise ValueError(f"node {node!r} is none of the {len(nodes)} nodes of the layout")
        layout, after = self.layout(len(nodes)), self.layout(len(nodes) - 1)
        template, number, begin, last = _kind_of(layout, nodes.index(node))
        # The table knows the last pipeline of each template: exchange its nodes with those of this one.
        order, count = list(nodes), max(template, 1)
        order[begin : begin + count], order[last : last + count] = (
            nodes[last : last + count],
            nodes[begin : begin + count],
        )
        loss = next(each for each in layout.losses if (each.template, each.node) == (template, number))
        return Next(after, tuple(order[place] for place in loss.survivors), loss, tuple(order))


def check_plan(plan: Plan) -> None:
    """Check that the plan's parts are consistent. Raises ValueError."""
    sizes = [template.nodes for template in plan.templates]
    if not sizes or sizes != [*range(sizes[0], sizes[0] + len(sizes))] or sizes[0] < 1:
        raise ValueError("templates: expected one for each number of nodes from the smallest on")
    if len(plan.nodes) != plan.hardware.nodes or len(set(plan.nodes)) != len(plan.nodes):
        raise ValueError(f"nodes: expected {plan.hardware.nodes} names, each once")
    if [layout.nodes for layout in plan.layouts] != [*range(sizes[0], len(plan.nodes) + 1)] or not plan.layouts:
        raise ValueError("layouts: expected one for each number of nodes, from the smallest template's to all")
    if plan.micro_batch < 1 or plan.global_batch < 1 or plan.global_batch % plan.micro_batch:
        raise ValueError(f"global_batch: {plan.global_batch} is no multiple of micro_batch, {plan.micro_batch}")
    for layout in plan.layouts:
        try:
            _check_layout(plan, layout)
        except ValueError as error:
            raise ValueError(f"layout for {layout.nodes} nodes: {error}") from None


def _check_layout(plan: Plan, layout: Layout) -> None:
    used = [pipeline.template for pipeline in layout.pipelines]
    idle = layout.nodes - sum(used)
    if not {*used} <= {template.nodes for template in plan.templates} or not 0 <= idle == layout.idle_nodes:
        raise ValueError("its pipelines are not of the plan's templates, or not of so many nodes")
    if sum(pipeline.micro_batches for pipeline in layout.pipelines) != plan.micro_batches:
        raise ValueError(f"its pipelines do not run {plan.micro_batches} micro-batches")
    kinds = [*layout.kinds()] if layout.nodes > plan.nodes_min else []
    if [(loss.template, loss.node) for loss in layout.losses] != kinds:
        raise ValueError("losses: expected one for each kind of node")
    for loss in layout.losses:
        lost = layout.last_begin(loss.template) + loss.node if loss.template else layout.nodes - 1
        left = {*range(layout.nodes)} - {lost}
        if sorted(loss.survivors) != sorted(left):
            raise ValueError(f"survivors: expected its other {len(left)} places, each once")
        if not all(0 <= copy.to < len(left) and (copy.source is None or copy.source in left) for copy in loss.copies):
            raise ValueError("copies: from or to a place that there is not")


def _kind_of(layout: Layout, place: int) -> tuple[int, int, int, int]:
    """Return the kind of the node at a place, where its pipeline begins, and where the last of its template does."""
    for pipeline, begin in zip(layout.pipelines, layout.begins(), strict=True):
        if begin <= place < begin + pipeline.template:
            return pipeline.template, place - begin, begin, layout.last_begin(pipeline.template)
    return 0, 0, place, layout.nodes - 1


LAYOUT_VARIABLE = "EAGLE_EYE_LAYOUT"
LAYOUT_FORMAT: Literal["eagle-eye-layout/1"] = "eagle-eye-layout/1"
LAYOUT_BYTES_MAX = (128 << 10) - len(LAYOUT_VARIABLE) - 2  # per environment variable: linux/binfmts.h


class RankStage(msgspec.Struct, frozen=True, kw_only=True):
    """Layers ``first`` to ``last``, which ``ranks`` hold together."""

    first: int
    last: int
    ranks: tuple[int, ...]


class RankPipeline(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline's stages in order. Its micro-batches of a step follow those of the pipelines before it."""

    micro_batches: int
    stages: tuple[RankStage, ...]


class RankLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of ``ranks`` ranks; ranks without a stage are idle."""

    format: Literal["eagle-eye-layout/1"]
    layers: int
    ranks: int
    global_batch: int
    micro_batch: int
    pipelines: tuple[RankPipeline, ...]


def nodes_used(plan: Plan, nodes: int) -> int:
    """Return how many of so many nodes train: nodes that add no speed do not. Raises NoLayout."""
    while idle := plan.layout(nodes).idle_nodes:
        nodes -= idle
    return nodes


def rank_layout(plan: Plan, nodes: int) -> RankLayout:
    """Return the layout for so many nodes, whose ranks count node by node, by their places. Raises NoLayout."""
    layout = plan.layout(nodes)
    stages = {template.nodes: template.stages for template in plan.templates}
    return RankLayout(
        format=LAYOUT_FORMAT,
        layers=plan.layers,
        ranks=nodes * plan.hardware.gpus_per_node,
        global_batch=plan.global_batch,
        micro_batch=plan.micro_batch,
        pipelines=tuple(
            RankPipeline(
                micro_batches=pipeline.micro_batches,
                stages=tuple(_on_ranks(plan, stages[pipeline.template], begin)),
            )
            for pipeline, begin in zip(layout.pipelines, layout.begins(), strict=True)
        ),
    )


def variable(plan: Plan, nodes: int) -> str:
    """Return the value of EAGLE_EYE_LAYOUT for so many nodes. Raises NoLayout."""
    return msgspec.json.encode(rank_layout(plan, nodes)).decode()


def _on_ranks(plan: Plan, stages: Sequence[Stage], begin: int) -> list[RankStage]:
    """Return the stages of a pipeline whose first node has place ``begin``."""
    each, together = plan.hardware.gpus_per_node, plan.hardware.gpus_per_stage
    found = []
    for node, own in groupby(stages, key=lambda stage: stage.node):
        for number, stage in enumerate(own):
            first = (begin + node) * each + number * together
            found.append(RankStage(first=stage.first, last=stage.last, ranks=tuple(range(first, first + together))))
    return found
