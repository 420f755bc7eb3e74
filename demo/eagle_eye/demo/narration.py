"""The story of one fault, read only from the server's API and the job's own step log, and told in a line per stage."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rich.console import Console

from eagle_eye.demo.faults import NO_SPARE, inject
from eagle_eye.demo.stack import Stack, StageFailed
from eagle_eye.schema.labels import metric_label


@dataclass(slots=True)
class DemoTimeline:
    """Writes stages to stdout as they are reached; keeps the measured times for the summary.

    ``as_json`` prints one JSON object a line instead: {"since_start_s", "since_fault_s", "stage", "text"}.
    """

    as_json: bool
    told_s: float = 2.0  # a shorter wait is worth no line
    began_s: float = field(default_factory=time.time)
    fault_s: float | None = None
    measured_s: dict[str, float] = field(default_factory=dict)
    _console: Console = field(default_factory=lambda: Console(highlight=False))

    def report_stage(self, stage: str, text: str, at_s: float | None = None, style: str = "") -> None:
        """Report a stage reached at ``at_s`` (Unix seconds, None: now)."""
        at_s = time.time() if at_s is None else at_s
        since_fault_s = None if self.fault_s is None else at_s - self.fault_s
        if self.as_json:
            line = {"since_start_s": round(at_s - self.began_s, 3), "since_fault_s": _rounded(since_fault_s)}
            sys.stdout.write(json.dumps({**line, "stage": stage, "text": text}) + "\n")
            sys.stdout.flush()
            return
        fault = "" if since_fault_s is None else f"fault {since_fault_s:+.1f} s"
        self._console.print(
            f"[dim]{at_s - self.began_s:7.1f} s  {fault:<14}[/dim] [bold]{stage:<10}[/bold] ", end="", soft_wrap=True
        )
        self._console.print(text, style=style or None, markup=False, soft_wrap=True)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say until exited what is being awaited: on a terminal at once, elsewhere in a line if it takes ``told_s``."""
        if self.as_json:
            yield
        elif self._console.is_terminal:
            with self._console.status(f"waiting: {what}"):
                yield
        else:
            timer = threading.Timer(self.told_s, self._waits, (what,))
            timer.start()
            try:
                yield
            finally:
                timer.cancel()

    def _waits(self, what: str) -> None:
        passed_s = time.time() - self.began_s
        self._console.print(f"{passed_s:7.1f} s  {'':<14} waiting    {what}", markup=False, soft_wrap=True)

    def measure(self, what: str, at_s: float) -> None:
        """Record how long after the fault something happened."""
        if self.fault_s is not None:
            self.measured_s[what] = at_s - self.fault_s

    def finish(self, success: bool, text: str, **more: Any) -> None:
        """Write the last line: what the demo showed, or the stage that failed."""
        if self.as_json:
            measured = {name: round(value, 3) for name, value in self.measured_s.items()}
            sys.stdout.write(json.dumps({"success": success, "text": text, "measured_s": measured, **more}) + "\n")
            sys.stdout.flush()
            return
        for name, value in self.measured_s.items():
            self._console.print(f"{'':>27} {name:<34} {value:6.2f} s", markup=False, soft_wrap=True)
        word = "[bold green]shown[/bold green]" if success else "[bold red]failed[/bold red]"
        self._console.print(f"{word}  ", end="")
        self._console.print(text, markup=False, soft_wrap=True)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


CULPRIT = "node2"
STEPS_BEFORE = 12  # one checkpoint is written by then, and the job's pace is known
STEPS_AFTER = 5
STARTED_WITHIN_S = 120.0
VERDICT_WITHIN_S = 60.0
RESTARTED_WITHIN_S = 90.0
STEPPED_WITHIN_S = 60.0
CHECKPOINT_EVERY = 10  # of the training script
QUIET_STEPS = range(5, 8)  # since the last checkpoint, which is then older than any onset, and before the next


@dataclass(frozen=True, slots=True)
class ExpectedEffects:
    """The expected effects of a fault."""

    fault: str
    action: str
    spoils_numbers: bool = False
    shrinks: bool = False


EXPECTED: dict[str, tuple[ExpectedEffects, ...]] = {
    "hang": (ExpectedEffects("hang", "exclude_node"),),
    "slow": (ExpectedEffects("straggler", "exclude_node"),),
    "unreachable": (ExpectedEffects("node_unreachable", "exclude_node"),),
    "crash": (ExpectedEffects("process_crash", "restart_job"), ExpectedEffects("process_crash", "exclude_node")),
    "nan": (ExpectedEffects("silent_data_corruption", "exclude_node", spoils_numbers=True),),
    NO_SPARE: (ExpectedEffects("hang", "exclude_node", shrinks=True),),
}


def play(fault: str, stack: Stack, timeline: DemoTimeline, healthy_s: float) -> str:
    """Play the fault's story to its end and return its moral. Raises StageFailed naming the stage that failed."""
    if fault == "none":
        return _play_nothing(stack, timeline, healthy_s)
    for episode, expected in enumerate(EXPECTED[fault]):
        before = training(stack, timeline, episode)
        attempt = before["attempt"]
        began_s, how = inject(fault, stack, CULPRIT)
        timeline.fault_s = began_s
        timeline.report_stage("fault", how, began_s, "yellow")
        follow(stack, timeline, attempt, expected, before)
    return f"{CULPRIT} was named, the job was restarted without it and its loss goes on"


def _play_nothing(stack: Stack, timeline: DemoTimeline, healthy_s: float) -> str:
    training(stack, timeline, 0)
    timeline.report_stage("watch", f"a healthy job is watched for {healthy_s:.0f} s")
    until_s = time.monotonic() + healthy_s
    stack.wait("a healthy job goes on", lambda: time.monotonic() >= until_s or None, healthy_s + STEPPED_WITHIN_S)
    asked, incidents = stack.items("actions"), stack.items("incidents")
    if asked or incidents:
        what = [f"{i['fault']} on {i['node']}: {i['summary']}" for i in incidents]
        raise StageFailed(f"nothing was wrong, but {len(asked)} actions and these incidents came: {'; '.join(what)}")
    steps = stack.steps()
    if steps[-1]["attempt"] != steps[0]["attempt"] or time.time() - steps[-1]["time_s"] > STEPPED_WITHIN_S:
        raise StageFailed(f"the job did not go on undisturbed: its last step was {steps[-1]}")
    timeline.report_stage("training", f"step {steps[-1]['step']}, loss {steps[-1]['loss']:.3f}")
    return f"nothing was wrong for {len(steps)} steps, and Eagle Eye said nothing"


def training(stack: Stack, timeline: DemoTimeline, restarts: int) -> dict[str, Any]:
    """Wait until the job, restarted so often, is well under way and between two checkpoints; return its newest step."""

    def under_way() -> dict[str, Any] | None:
        steps = stack.steps()
        mine = [step for step in steps if step["attempt"] == steps[0]["attempt"] + restarts]
        ready = len(mine) >= STEPS_BEFORE and mine[-1]["step"] % CHECKPOINT_EVERY in QUIET_STEPS
        return mine[-1] if ready else None

    step = stack.wait("the job trains", under_way, STARTED_WITHIN_S)
    nodes = sorted({rank["node"] for rank in _job(stack)["ranks"]})
    timeline.report_stage("training", f"step {step['step']}, loss {step['loss']:.3f} on {', '.join(nodes)}")
    return step


def follow(
    stack: Stack,
    timeline: DemoTimeline,
    attempt: int,
    expected: ExpectedEffects,
    before: dict[str, Any],
) -> None:
    """Follow the fault until the loss continues: each stage is awaited, checked and reported."""
    action = _verdict_and_action(stack, timeline, attempt, expected)
    _delivered(stack, timeline, action)
    job = _restarted(stack, timeline, action, expected)
    step = _stepped(stack, timeline, expected, before)
    later = stack.wait(
        "the loss continues",
        lambda: _nth_step(stack, attempt + 1, STEPS_AFTER),
        STEPPED_WITHIN_S,
    )
    first = stack.steps()[0]["loss"]
    if not (math.isfinite(later["loss"]) and later["loss"] < first):
        raise StageFailed(f"the loss continues: it is {later['loss']} after the restart; it began at {first}")
    timeline.report_stage(
        "training", f"the loss continues: {step['loss']:.3f} → {later['loss']:.3f} at step {later['step']}"
    )
    if expected.shrinks:
        if "no spare: 3 nodes go on" not in action["summary"]:
            raise StageFailed(f"the action says that there is no spare: it says {action['summary']!r}")
        _shrunk(timeline, before, later)
    if job["state"] != "running":
        raise StageFailed(f"the job runs again: the server knows it as {job['state']}")


def _shrunk(timeline: DemoTimeline, before: dict[str, Any], after: dict[str, Any]) -> None:
    _same("the number of ranks", before["ranks"] - 1, after["ranks"], "the step log")
    _same("the samples of a step", before["samples"], after["samples"], "the step log")
    timeline.report_stage(
        "layout", f"{after['ranks']} nodes train, {after['samples']} samples a step as on {before['ranks']}"
    )


def _verdict_and_action(
    stack: Stack, timeline: DemoTimeline, attempt: int, expected: ExpectedEffects
) -> dict[str, Any]:
    action = stack.wait(
        "an action is asked for", lambda: _first(stack, "actions", lambda a: a["attempt"] == attempt), VERDICT_WITHIN_S
    )
    incident = next(i for i in stack.items("incidents") if i["id"] == action["incident_id"])
    detected_s = _seconds(incident["detected"])
    timeline.measure("injection to verdict", detected_s)
    timeline.report_stage("verdict", f"{incident['fault']}: {incident['summary']}", detected_s, "red")
    for item in incident["evidence"]:
        timeline.report_stage("evidence", _evidence(item), detected_s, "dim")
    _same("the fault", expected.fault, incident["fault"])
    _same("the culprit", CULPRIT, incident["node"])
    _same("the action", expected.action, action["kind"])
    _same("the nodes to exclude", [CULPRIT] if expected.action == "exclude_node" else [], action["exclude"])
    return action


def _delivered(stack: Stack, timeline: DemoTimeline, action: dict[str, Any]) -> None:
    def accepted() -> dict[str, Any] | None:
        reports = stack.items("actions", incident_id=action["incident_id"])[0]["reports"]
        return next((report for report in reports if report["state"] == "accepted"), None)

    report = stack.wait("the webhook is delivered and accepted", accepted, VERDICT_WITHIN_S)
    received_s = _seconds(report["time"])
    timeline.measure("injection to webhook received", received_s)
    timeline.report_stage("webhook", f"signed, delivered and accepted by the launcher: {action['kind']}", received_s)


def _restarted(
    stack: Stack, timeline: DemoTimeline, action: dict[str, Any], expected: ExpectedEffects
) -> dict[str, Any]:
    def done() -> dict[str, Any] | None:
        now = stack.items("actions", incident_id=action["incident_id"])[0]
        if now["state"] in ("failed", "refused", "expired"):
            raise StageFailed(f"the action is carried out: it {now['state']}: {now['reports'][-1:]}")
        return now if now["state"] == "done" else None

    finished = stack.wait("the action is carried out", done, RESTARTED_WITHIN_S)
    report = finished["reports"][-1]
    job = _job(stack)
    nodes = sorted({rank["node"] for rank in job["ranks"]})
    _same("the job's attempt", action["attempt"] + 1, job["attempt"])
    _same("whether the culprit takes part", expected.action != "exclude_node", CULPRIT in nodes)
    if expected.action == "exclude_node":
        standing = next(n for n in stack.items("nodes") if n["node"] == CULPRIT)
        _same(f"the standing of {CULPRIT}", "excluded", standing["state"])
        timeline.report_stage(
            "excluded", f"{CULPRIT} is out; the job runs on {', '.join(nodes)}", _seconds(report["time"])
        )
    timeline.report_stage("restarted", report["detail"], _seconds(report["time"]))
    return job


def _stepped(stack: Stack, timeline: DemoTimeline, expected: ExpectedEffects, before: dict[str, Any]) -> dict[str, Any]:
    attempt = before["attempt"] + 1
    step = stack.wait("the job makes steps again", lambda: _nth_step(stack, attempt, 1), STEPPED_WITHIN_S)
    timeline.measure("injection to first new step", step["time_s"])
    timeline.report_stage("training", _resumed(step, _last_step(stack, attempt - 1)), step["time_s"])
    # Steps that a fault has corrupted are not resumed from; those of a hung or slow job are good.
    last = _last_sound(stack, attempt - 1) if expected.spoils_numbers else _last_step(stack, attempt - 1)
    if not 0 < step["resumed_from"] <= last:
        raise StageFailed(f"the job resumes from step {last} or before: it resumed from step {step['resumed_from']}")
    return step


def _resumed(step: dict[str, Any], last: int) -> str:
    """Return where the job resumed, after an attempt that had reached step ``last``."""
    source, resumed = step["source"] or {"where": "storage", "nodes": []}, step["resumed_from"]
    where = f"memory of {', '.join(source['nodes'])}" if source["where"] == "memory" else "storage"
    lost = last - resumed
    steps = "1 step" if lost == 1 else f"{lost} steps"
    return f"resumed from {where}, step {resumed}, {steps} lost; first new step {step['step']}"


def _last_step(stack: Stack, attempt: int) -> int:
    """Return the last step that the attempt had finished."""
    return max(int(s["step"]) for s in stack.steps() if s["attempt"] == attempt)


def _last_sound(stack: Stack, attempt: int) -> int:
    """Return the last step of the attempt after which parameters were numbers.

    Those that the next step's loss shows: gradients spoil them after the loss of their own step was computed.
    """
    finite = [s["step"] for s in stack.steps() if s["attempt"] == attempt and math.isfinite(s["loss"])]
    return int(max(finite)) - 1


def _nth_step(stack: Stack, attempt: int, count: int) -> dict[str, Any] | None:
    mine = [step for step in stack.steps() if step["attempt"] == attempt]
    return mine[count - 1] if len(mine) >= count else None


def _job(stack: Stack) -> dict[str, Any]:
    return next(job for job in stack.items("jobs") if job["job"] == stack.job)


def _first(stack: Stack, kind: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
    return next((item for item in reversed(stack.items(kind)) if item["job"] == stack.job and wanted(item)), None)


def _same(what: str, expected: object, seen: object, who: str = "the server") -> None:
    if expected != seen:
        raise StageFailed(f"{what}: expected {expected!r}, {who} says {seen!r}")


def _evidence(item: dict[str, Any]) -> str:
    unit = {"seconds": "s", "ratio": ""}.get(item["unit"], item["unit"])
    if item["value"] == 1 and unit == "collectives":
        unit = "collective"
    value = f"{_number(item['value'])} {unit}".rstrip()
    text = f"{item['node'] or 'the job'}: {metric_label(item['metric'])} {value}"
    if item["peers_median"] is not None:
        text += f", peers {_number(item['peers_median'])}"
    return text + (f", threshold {_number(item['threshold'])}" if item["threshold"] is not None else "")


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else str(value)


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
