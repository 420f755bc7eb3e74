"""Draws a layout's step: a Gantt chart of 1F1B as a self-contained SVG, light and dark. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from eagle_eye.planning.plan import Layout, Plan, Template
from eagle_eye.planning.simulation import MicroBatchPass, simulate

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
