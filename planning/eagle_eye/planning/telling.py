"""Shows a plan to people: as text and columns, and a layout's step as a chart. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby

from eagle_eye.checkpoint.shared_memory import reported as size_reported
from eagle_eye.planning.plan import Layout, Next, NodeLoss, Plan, Template
from eagle_eye.planning.step_time import MicroBatchPass, simulate

PASSES_MAX = 4_000  # per pipeline: beyond it micro-batches are left out, with a note in the chart
STAGES_MAX = 128
_LEFT, _WIDTH, _TOP, _ROW, _GAP = 168, 1_040, 64, 20, 46
_TITLE_PX = 7.0  # a digit's width
_STYLE = """
  svg { font: 12px system-ui, sans-serif; background: #ffffff; }
  text { fill: #1f2328; }
  .said { fill: #59636e; }
  .bubble { fill: #eceff2; }
  .forward { fill: #4a7fc1; }
  .backward { fill: #e0a13c; }
  .pass { stroke: #ffffff; stroke-width: 0.6; }
  .number { font-size: 10px; text-anchor: middle; pointer-events: none; }
  .forward + .number { fill: #ffffff; }
  .backward + .number { fill: #1f2328; }
  @media (prefers-color-scheme: dark) {
    svg { background: #0d1117; }
    text { fill: #e6edf3; }
    .said { fill: #9198a1; }
    .bubble { fill: #21262d; }
    .forward { fill: #3b6fb0; }
    .backward { fill: #c98a2b; }
    .pass { stroke: #0d1117; }
    .backward + .number { fill: #0d1117; }
  }
"""


def gantt(plan: Plan, layout: Layout) -> str:
    """Return the chart: one pipeline of each template of the layout, the one with the most micro-batches.

    All share one time scale, so that the shorter ones' bubbles at the end are visible. Raises ValueError for pipelines
    with more than ``STAGES_MAX`` stages.
    """
    templates = {template.nodes: template for template in plan.templates}
    rows: list[str] = []
    shown: list[tuple[Template, int, int, list[MicroBatchPass]]] = []
    for pipeline in layout.pipelines:
        if pipeline.template not in {template.nodes for template, *_ in shown}:
            template = templates[pipeline.template]
            if len(template.stages) > STAGES_MAX:
                raise ValueError(f"a picture of {len(template.stages)} stages: at most {STAGES_MAX} are drawn")
            drawn = min(pipeline.micro_batches, max(PASSES_MAX // (2 * len(template.stages)), 1))
            shown.append((template, pipeline.micro_batches, drawn, simulate(template.stages, [drawn])))
    step_s = max(passes[-1].end_s for *_, passes in shown)
    at = _TOP
    for template, batches, drawn, passes in shown:
        alike = [pipeline for pipeline in layout.pipelines if pipeline.template == template.nodes]
        number = f"{len(alike)} pipelines of {template.nodes}" if len(alike) > 1 else f"a pipeline of {template.nodes}"
        said = f"{number} {'node' if template.nodes == 1 else 'nodes'}, "
        said += f"{'up to ' if alike[-1].micro_batches < batches else ''}{batches} micro-batches"
        said += f" (drawn: {drawn} of {batches})" if drawn < batches else ""
        rows += _pipeline(template, said, passes, step_s, at)
        at += _GAP + _ROW * len(template.stages)
    head = (
        f"{layout.nodes} nodes, {plan.micro_batches} micro-batches of {plan.micro_batch}:"
        f" {layout.step_s:.4g} s a step, {plan.global_batch / layout.step_s:.4g} samples/s"
    )
    size = f'width="{_LEFT + _WIDTH + 16}" height="{at}" viewBox="0 0 {_LEFT + _WIDTH + 16} {at}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(head)}</title>",
            f"<style>{_STYLE}</style>",
            f'<text x="8" y="22" font-weight="600">{escape(head)}</text>',
            *_legend(),
            *rows,
            "</svg>",
            "",
        ]
    )


def _legend() -> Iterator[str]:
    for x, kind, words in ((8, "forward", "forward"), (92, "backward", "backward"), (184, "bubble", "bubble")):
        yield f'<rect class="{kind}" x="{x}" y="32" width="12" height="12"/><text x="{x + 18}" y="42">{words}</text>'


def _pipeline(template: Template, said: str, passes: list[MicroBatchPass], step_s: float, top: int) -> Iterator[str]:
    scale = _WIDTH / step_s
    busy = sum(each.end_s - each.begin_s for each in passes) / (passes[-1].end_s * len(template.stages))
    said += f"; bubbles {1 - busy:.0%}"
    yield f'<text x="8" y="{top + 14}" class="said">{escape(said)}</text>'
    top += 22
    for place, stage in enumerate(template.stages):
        y = top + place * _ROW
        layers = f"{stage.first}-{stage.last}" if stage.last > stage.first else f"{stage.first}"
        yield f'<text x="8" y="{y + 14}">node {stage.node + 1}, layers {layers}</text>'
        width = passes[-1].end_s * scale
        yield f'<rect class="bubble" x="{_LEFT}" y="{y + 1}" width="{width:.2f}" height="{_ROW - 2}"/>'
    for each in passes:
        x, width = _LEFT + each.begin_s * scale, (each.end_s - each.begin_s) * scale
        y = top + each.stage * _ROW + 1
        kind = "backward" if each.backward else "forward"
        yield (
            f'<rect class="{kind} pass" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 2}">'
            f"<title>micro-batch {each.micro_batch}, {kind}: {each.begin_s:.4g} to {each.end_s:.4g} s</title></rect>"
        )
        if width >= _TITLE_PX * len(str(each.micro_batch)):
            yield f'<text class="number" x="{x + width / 2:.2f}" y="{y + 13}">{each.micro_batch}</text>'


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
