"""Makes a whole plan: templates, a layout for each number of nodes, the effect of losing any node. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from eagle_eye.planning.layouts import plan_layouts
from eagle_eye.planning.losses import losses
from eagle_eye.planning.plan import FORMAT, Hardware, Plan
from eagle_eye.planning.profile import Profile, sums
from eagle_eye.planning.templates import ModelDoesNotFit, plan_templates

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
