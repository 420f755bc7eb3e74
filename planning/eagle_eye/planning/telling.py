"""Formats a plan as text and columns, for people. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from eagle_eye.checkpoint.shared_memory import reported as size_reported
from eagle_eye.planning.plan import Layout, Next, NodeLoss, Plan


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the plan's text: the job, its templates, the layouts, the effects of losing a node."""
    hardware = plan.hardware
    gpus = f"{hardware.gpus_per_node} {'GPU' if hardware.gpus_per_node == 1 else 'GPUs'}"
    yield (
        f"{plan.layers} layers on {_nodes(hardware.nodes)} of {gpus} with {size_reported(hardware.gpu_memory_bytes)};"
        f" {plan.micro_batches} micro-batches of {plan.micro_batch} in a step"
    )
    least = plan.nodes_min
    yield f"{_nodes(least)} {'holds' if least == 1 else 'hold'} the model; {_tolerated(plan)}"
    yield ""
    yield "templates"
    yield from _columns(
        ("nodes", "stages", "layers of each", "micro-batches", "step", "memory"),
        (
            (
                str(template.nodes),
                str(len(template.stages)),
                _runs(stage.last - stage.first + 1 for stage in template.stages),
                str(template.micro_batches),
                _seconds(template.step_s),
                size_reported(max(stage.memory_bytes for stage in template.stages)),
            )
            for template in plan.templates
        ),
    )
    yield ""
    yield "layouts"
    full = plan.layouts[-1]
    yield from _columns(
        ("nodes", "pipelines", "micro-batches", "step", "samples/s", "of all", "losses"),
        (
            (
                str(layout.nodes),
                layout.mixture,
                _runs(pipeline.micro_batches for pipeline in layout.pipelines),
                _seconds(layout.step_s),
                f"{plan.global_batch / layout.step_s:.4g}",
                f"{full.step_s / layout.step_s:.1%}",
                _further(plan, layout),
            )
            for layout in reversed(plan.layouts)
        ),
    )
    if full.losses:
        yield ""
        yield f"when one of {_nodes(full.nodes)} goes"
        yield from _columns(
            ("node", "copied", "from memory of", "step", "its micro-batches"),
            (
                (
                    _lost(plan, loss),
                    size_reported(loss.copied_bytes) if loss.copies else "nothing",
                    _sources(loss),
                    _seconds(_step_s(loss, plan.layout(full.nodes - 1))),
                    f"to peers: {loss.why}" if loss.rerouted else "by the next layout",
                )
                for loss in full.losses
            ),
        )


def next_lines(plan: Plan, node: str, following: Next) -> Iterator[str]:
    """Yield what follows the loss of this node."""
    layout, loss = following.layout, following.loss
    if loss.rerouted:
        yield f"{node} goes: its micro-batches go to its peers, and the layout stays: {loss.why}"
        yield f"if another goes, or rather than that: {layout.mixture}, {_seconds(layout.step_s)} a step"
    else:
        yield f"{node} goes: {layout.mixture}, {_seconds(layout.step_s)} a step; {_further(plan, layout)}"
        yield f"not by its peers: {loss.why}"
    yield ""
    places = iter(following.nodes)
    for pipeline in layout.pipelines:
        names = " ".join(next(places) for _ in range(pipeline.template))
        yield f"  {names}: {pipeline.micro_batches} micro-batches, {_seconds(pipeline.step_s)}"
    if layout.idle_nodes:
        yield f"  {' '.join(places)}: idle"
    yield ""
    if not loss.copies:
        yield "nothing is copied"
    for copy in loss.copies:
        source = "its checkpoint" if copy.source is None else following.before[copy.source]
        layers = f"layer {copy.first}" if copy.first == copy.last else f"layers {copy.first}-{copy.last}"
        yield f"{following.nodes[copy.to]} gets {layers} from {source}: {size_reported(copy.copied_bytes)}"


def _further(plan: Plan, layout: Layout) -> str:
    """Return how many more losses the layout takes at once, and whether that is less than was asked for."""
    if not layout.tolerates:
        return "no further loss tolerated"
    only = "" if layout.nodes >= (plan.tolerate + 1) * plan.nodes_min else "only "
    return f"tolerates {only}{layout.tolerates} more at once"


def _tolerated(plan: Plan) -> str:
    asked, needed = plan.tolerate, (plan.tolerate + 1) * plan.nodes_min
    if not asked:
        return "no loss is to be tolerated"
    if plan.hardware.nodes < needed:
        return f"with fewer than {needed} the loss of {asked} may leave no whole copy in memory"
    return f"with {needed} or more any {asked} may go at once, and a whole copy is left in memory"


def _lost(plan: Plan, loss: NodeLoss) -> str:
    """Return the names of the nodes of this kind, for the plan's last layout."""
    full = plan.layouts[-1]
    if not loss.template:
        return " ".join(plan.nodes[full.nodes - full.idle_nodes :])
    pairs = zip(full.pipelines, full.begins(), strict=True)
    names = [plan.nodes[begin + loss.node] for pipeline, begin in pairs if pipeline.template == loss.template]
    return " ".join(names) if len(names) < 6 else f"{' '.join(names[:2])} ... {names[-1]}"


def _step_s(loss: NodeLoss, after: Layout) -> float:
    """Return the step time after the loss."""
    if loss.rerouted and loss.reroute and loss.reroute.step_s:
        return loss.reroute.step_s
    return after.step_s


def _sources(loss: NodeLoss) -> str:
    if not loss.copies:
        return "-"
    if all(copy.source is None for copy in loss.copies):
        return "no node: from its checkpoint"
    sources = len({copy.source for copy in loss.copies if copy.source is not None})
    more = ", rest from its checkpoint" if any(copy.source is None for copy in loss.copies) else ""
    return f"{_nodes(sources)}{more}"


def _runs(numbers: Iterable[int]) -> str:
    """Return 4 4 4 5 as 3x4 5."""
    runs = [(number, len([*same])) for number, same in groupby(numbers)]
    reported = [f"{count}x{number}" if count > 1 else str(number) for number, count in runs]
    return " ".join(reported) if len(reported) <= 8 else " ".join([*reported[:4], "...", *reported[-3:]])


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


def _seconds(seconds: float) -> str:
    return f"{seconds:#.4g} s"


def _columns(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield aligned lines; not rich's, which a training image does not have."""
    lines = [titles, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
