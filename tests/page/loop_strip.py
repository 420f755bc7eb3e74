"""The README's strip of the loop, made of one run of the demo: what was told when, who trained, and each step."""

from __future__ import annotations

import contextlib
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from eagle_eye.demo.narration import CULPRIT, DemoTimeline, play
from eagle_eye.demo.stack import Stack, open_site

WIDTH, CHART_HEIGHT = 980, 96  # CSS pixels
BEFORE_S, AFTER_S = 6.0, 1.0  # of the steps that are drawn: before the fault, after the last of them
TICKS_MAX = 12
CHEAP = {"batch": "16"}  # steps that leave some of a busy machine to the rest of the loop
NODE = {  # what a node does: its sign and word; colours follow from the word
    "trains": "●",
    "stopped": "■",
    "accused": "!",
    "waits": "◌",
    "excluded": "✕",
    "restarts": "↻",
    "spare": "○",
}
STYLE = """
:root { color-scheme: light dark; --ground: light-dark(#fff, #0d1117); --panel: light-dark(#f4f5f7, #161b24);
  --ink: light-dark(#161c26, #e6ebf3); --quiet: light-dark(#566072, #9aa6b8); --line: light-dark(#c9d0da, #3a4558);
  --bad: light-dark(#ad211a, #ff9d94); --good: light-dark(#17693a, #74d39a); }
* { box-sizing: border-box; margin: 0; }
html { overflow: hidden; }
body { background: var(--ground); color: var(--ink); font: 14px/1.35 system-ui, sans-serif;
  width: 980px; padding: 6px; }
ol { display: grid; grid-template-columns: repeat(4, minmax(0, 1fr)); gap: 10px; list-style: none; padding: 0; }
li { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }
h2 { font-size: 16px; display: flex; justify-content: space-between; margin-bottom: 8px; }
h2 time { font-weight: 400; color: var(--quiet); }
p { min-height: 58px; margin-top: 10px; }
.nodes { display: grid; gap: 4px; }
.nodes span { border: 1px solid var(--line); border-radius: 5px; padding: 2px 8px; display: flex; }
.nodes i { margin-left: auto; font-style: normal; }
.nodes b { width: 1.4em; }
.trains b, .restarts b { color: var(--good); }
.stopped, .accused, .excluded { color: var(--bad); border-color: var(--bad) !important; }
.accused { outline: 2px solid var(--bad); }
.waits, .spare { color: var(--quiet); }
svg { display: block; margin-top: 8px; width: 100%; font: 13px system-ui, sans-serif; fill: var(--ink); }
"""


class Moment(NamedTuple):
    """One part of the strip: ``since_s`` the fault, what each node does then, and what was told."""

    name: str
    since_s: float
    nodes: dict[str, str]
    text: str


class LoopRun(NamedTuple):
    """What the strip shows of a run; ``steps`` are seconds since the fault and numbers of the steps."""

    moments: tuple[Moment, ...]
    steps: tuple[tuple[float, int], ...]


@dataclass(slots=True)
class KeptTimeline(DemoTimeline):
    """Keeps what the demo tells: the stage, seconds since the fault (None: before it), and the text."""

    told: list[tuple[str, float | None, str]] = field(default_factory=list)

    def report_stage(self, stage: str, text: str, at_s: float | None = None, style: str = "") -> None:
        """Keep it, and write it as the demo does."""
        self.told.append((stage, None if self.fault_s is None or at_s is None else at_s - self.fault_s, text))
        DemoTimeline.report_stage(self, stage, text, at_s, style)

    def first(self, stage: str) -> tuple[float, str]:
        """Return when and what was first told of a stage after the fault."""
        return next((since_s, text) for told, since_s, text in self.told if told == stage and since_s is not None)


def run(folder: Path) -> LoopRun:
    """Run the demo's hang and return what is drawn of it. Raises StageFailed where it did not come through."""
    timeline = KeptTimeline(as_json=False)
    with contextlib.closing(open_site()) as site, contextlib.closing(Stack(site, folder, CHEAP)) as stack:
        stack.start()
        play("hang", stack, timeline, 0.0)
        (incident,) = (one for one in stack.items("incidents") if one["node"] == CULPRIT)
        (job,) = (one for one in stack.items("jobs") if one["job"] == stack.job)
        names = [node.name for node in site.nodes]
        steps = stack.steps()
    assert timeline.fault_s is not None
    after = {rank["node"] for rank in job["ranks"]}
    made = tuple((step["time_s"] - timeline.fault_s, int(step["step"])) for step in steps)
    return LoopRun(_moments(timeline, incident, names, after), made)


def _moments(
    timeline: KeptTimeline, incident: dict[str, Any], names: Sequence[str], after: set[str]
) -> tuple[Moment, ...]:
    came = after - _before(timeline)

    def nodes(culprit: str, others: str, spare: str) -> dict[str, str]:
        return {name: culprit if name == CULPRIT else spare if name in came else others for name in names}

    (fault_s, fault), (verdict_s, _), (out_s, out), (again_s, again) = (
        timeline.first(stage) for stage in ("fault", "verdict", "excluded", "training")
    )
    sure = f"confidence {incident['confidence']:.2f}"
    verdict = f"{incident['fault']} of {CULPRIT}, {sure}: {incident['summary'].partition(';')[0]}"
    return (
        Moment("Fault", fault_s, nodes("stopped", "trains", "spare"), f"{fault}, and nobody is told"),
        Moment("Verdict", verdict_s, nodes("accused", "waits", "spare"), verdict),
        Moment("Excluded", out_s, nodes("excluded", "restarts", "restarts"), out),
        Moment("Trains again", again_s, nodes("excluded", "trains", "trains"), again),
    )


def _before(timeline: KeptTimeline) -> set[str]:
    """Return the nodes that trained before the fault, as the demo told them: "step 12, loss 3.065 on node1, node2"."""
    text = next(text for stage, _, text in timeline.told if stage == "training")
    return set(text.rpartition(" on ")[2].split(", "))


def page(shown: LoopRun) -> str:
    """Return the strip as a page of HTML, for light and dark."""
    items = "".join(_item(number, moment) for number, moment in enumerate(shown.moments, start=1))
    return f"<!doctype html><meta charset=utf-8><style>{STYLE}</style><ol>{items}</ol>{_chart(shown)}"


def _item(number: int, moment: Moment) -> str:
    nodes = "".join(
        f'<span class="{does}"><b>{NODE[does]}</b>{html.escape(name)}<i>{does}</i></span>'
        for name, does in moment.nodes.items()
    )
    when = f"+{moment.since_s:.1f} s"
    head = f"<h2>{number} {moment.name}<time>{when}</time></h2>"
    return f"<li>{head}<div class=nodes>{nodes}</div><p>{html.escape(moment.text)}</p></li>"


def _chart(shown: LoopRun) -> str:
    """Return the job's steps over time as a staircase that stands still from the fault to the first new step."""
    last_s = max(since_s for since_s, _ in shown.steps) + AFTER_S
    drawn = [(since_s, step) for since_s, step in shown.steps if since_s >= -BEFORE_S]
    low, high = drawn[0][1], max(step for _, step in drawn)
    left, right, top, bottom = 62.0, WIDTH - 30.0, 22.0, CHART_HEIGHT - 20.0

    def x(since_s: float) -> float:
        return left + (since_s + BEFORE_S) / (last_s + BEFORE_S) * (right - left)

    def y(step: float) -> float:
        return bottom - (step - low) / max(high - low, 1) * (bottom - top)

    path = f"M{x(drawn[0][0]):.1f} {y(low):.1f}" + "".join(f"H{x(s):.1f}V{y(step):.1f}" for s, step in drawn[1:])
    marks, taken = [], 0.0
    for number, moment in enumerate(shown.moments, start=1):
        at = x(moment.since_s)
        taken = max(at, taken + 14)  # numbers that would overlap stand beside each other
        marks.append(
            f'<line x1={at:.1f} x2={at:.1f} y1={top - 6} y2={bottom} stroke="var(--quiet)" stroke-dasharray="2 3"/>'
            f"<text x={taken:.1f} y=12 text-anchor=middle font-weight=700>{number}</text>"
        )
    stands = f"<rect x={x(0):.1f} y={top} width={x(shown.moments[-1].since_s) - x(0):.1f} height={bottom - top}"
    every_s = next(length for length in (2, 5, 10, 20, 60) if last_s / length <= TICKS_MAX or length == 60)
    seconds = range(0, int(last_s) + 1, every_s)
    ticks = "".join(
        f"<text x={x(since_s):.1f} y={CHART_HEIGHT - 4} text-anchor=middle>+{since_s} s</text>" for since_s in seconds
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {CHART_HEIGHT + 4}" aria-hidden=true>'
        f'{stands} fill="var(--bad)" opacity="0.13"/>{"".join(marks)}'
        f'<path d="{path}" fill="none" stroke="var(--good)" stroke-width="2.5"/>'
        f"<text x=2 y={y(high) + 5:.1f}>step {high}</text><text x=2 y={y(low):.1f}>step {low}</text>{ticks}</svg>"
    )
