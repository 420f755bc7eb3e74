"""Plans from ``--layouts``: how a scheduler's job continues on fewer nodes when no spare is left."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from eagle_eye.orchestrators.protocol import OrchestratorError
from eagle_eye.planning.files import read_plan
from eagle_eye.planning.plan import Plan, nodes_used

OPTION = "--layouts"


def add_layouts(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument(
        OPTION, type=Path, action="append", default=[], metavar="FILE",
        help="a job's plan: without a spare it goes on in its layout for fewer nodes; repeatable, one a job (none)",
    )  # fmt: skip


def read_layouts(files: Sequence[Path]) -> dict[str, Plan]:
    """Return the plans by job. Raises ConfigurationError for an invalid plan, OrchestratorError."""
    found: dict[str, Plan] = {}
    for file in files:
        plan = read_plan(file, OPTION)
        if not plan.job:
            raise OrchestratorError(f"{OPTION}: {file} says of no job that it is its plan: eagle-eye plan --job JOB")
        if plan.job in found:
            raise OrchestratorError(f"{OPTION}: {file} is another plan of job {plan.job!r}; give one of them")
        found[plan.job] = plan
    return found


def misfit(plan: Plan, nodes: int, gpus_per_node: int | None = None) -> str:
    """Return why the plan does not fit the job as submitted, "" where it does; None: the number of GPUs is unknown."""
    hardware = plan.hardware
    if gpus_per_node not in (None, hardware.gpus_per_node):
        return (
            f"its plan is for other hardware: {hardware.gpus_per_node} GPUs of a node, and the job has"
            f" {gpus_per_node}; plan again"
        )
    if not plan.nodes_min <= nodes <= hardware.nodes:
        return (
            f"its plan has layouts for {plan.nodes_min} to {hardware.nodes} nodes, and the job wants {nodes};"
            " plan again"
        )
    return ""


def nodes_by_plan(plan: Plan, nodes: int) -> int | None:
    """Return on how many of these nodes the job continues, without nodes that add no speed; None: on none."""
    return None if nodes < plan.nodes_min else nodes_used(plan, min(nodes, plan.hardware.nodes))


def no_spare(plan: Plan, nodes: int, wanted: int) -> str:
    """Return what a job loses by continuing with fewer nodes than it wants."""
    left = plan.layout(wanted).step_s / plan.layout(nodes).step_s
    return f"no spare: {nodes} nodes by plan, {left:.0%} of the samples/s of {wanted}"


def pace_left_ratio(plan: Plan, nodes: int) -> float:
    """Return the remaining pace ratio of a job on so many nodes without one of them; 0 where it would wait."""
    return 0.0 if nodes <= plan.nodes_min else plan.layout(nodes).step_s / plan.layout(nodes - 1).step_s
