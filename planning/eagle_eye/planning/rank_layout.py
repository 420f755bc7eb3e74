"""The layout given to an attempt's ranks in ``EAGLE_EYE_LAYOUT``: which rank runs which layers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Literal

import msgspec

from eagle_eye.planning.plan import Plan, Stage

LAYOUT_VARIABLE = "EAGLE_EYE_LAYOUT"
FORMAT: Literal["eagle-eye-layout/1"] = "eagle-eye-layout/1"
BYTES_MAX = (128 << 10) - len(LAYOUT_VARIABLE) - 2  # per environment variable: linux/binfmts.h


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
        format=FORMAT,
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
