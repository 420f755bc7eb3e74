"""Four nodes, no spare, and one of them is lost: how long until the others make a new step. All of it is real."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.recovery.figures import percentile
from benchmarks.recovery.outcome import steps_lost
from benchmarks.replanning.planned import NODES, STARTED_WITHIN_S, PlannedStack, trains
from eagle_eye.demo.stack import GLOBAL_BATCH, StageFailed, open_site

LOSSES = ("unreachable", "hang")  # in turns: what excludes a node at once
STEPS_FOR_EVER = 1_000_000
STEPS_BEFORE = 30  # the pace is known by then
STEPS_AFTER = 3
STEPPED_WITHIN_S = 120.0
P50_S_MAX, P95_S_MAX, STEPS_LOST_MAX = 10.0, 15.0, 1  # asked for

Say = Callable[[str], None]


class Loss(msgspec.Struct, kw_only=True):
    """One loss. ``first_step_s``: until the first step after it has ended, None where none came.

    ``grow_s``: from the last step without the node to the first one with it.
    """

    kind: str
    node: str
    first_step_s: float | None = None
    steps_lost: int = 0
    where: str = ""  # the state came from: memory or storage
    grow_s: float | None = None
    note: str = ""


def measure(
    repetitions: int, seed: int, folder: Path, until_s: float, say: Say, heard: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Return the part's figures, and give them to ``heard`` after each loss; none comes after ``until_s``.

    The first one that does not end as it should is the last. Raises StageFailed where the job does not start.
    """
    chance = random.Random(seed)
    done: list[Loss] = []
    with (
        contextlib.closing(open_site(NODES)) as site,
        contextlib.closing(PlannedStack(site, folder, STEPS_FOR_EVER, repair_s=0.0)) as stack,
    ):
        say("starting")
        stack.start()
        while len(done) < repetitions and time.monotonic() < until_s:
            stack.wait("all nodes train", lambda: _full(stack), STARTED_WITHIN_S)
            done.append(Loss(kind=LOSSES[len(done) % len(LOSSES)], node=chance.choice(NODES)))
            say(f"{len(done)} of {repetitions}: {done[-1].kind} on {done[-1].node}")
            try:
                _lose(stack, done[-1])
            except StageFailed as failure:
                done[-1].note = str(failure)
            heard(figures(done, repetitions, site.description))
            if done[-1].note:
                break
    return figures(done, repetitions, site.description)


def _full(stack: PlannedStack) -> bool | None:
    stack.tick()
    return trains(stack.steps(), len(NODES), STEPS_BEFORE) or None


def _lose(stack: PlannedStack, loss: Loss) -> None:
    """The node was lost, the others have trained on, and it has come back."""

    def stepped(since: int, nodes: int, count: int) -> list[dict[str, Any]] | None:
        mine = [step for step in stack.steps() if step["attempt"] > since and step["ranks"] == nodes]
        return mine if len(mine) >= count else None

    def grown() -> list[dict[str, Any]] | None:
        stack.tick()
        return stepped(first["attempt"], len(NODES), 1)

    before, left = stack.steps()[-1], len(NODES) - 1
    harm = stack.harm(loss.kind, loss.node)
    first = stack.wait("a new step", lambda: stepped(before["attempt"], left, 1), STEPPED_WITHIN_S)[0]
    loss.first_step_s = round(first["time_s"] - harm.at_s, 3)
    loss.steps_lost = steps_lost(stack.steps(), before["attempt"], first["attempt"])
    loss.where = first["source"]["where"] if first["source"] else "storage"
    if first["samples"] != GLOBAL_BATCH:
        raise StageFailed(f"a step has {first['samples']} samples on {left} nodes; expected {GLOBAL_BATCH}")
    stack.wait("further steps", lambda: stepped(before["attempt"], left, STEPS_AFTER), STEPPED_WITHIN_S)
    back = stack.wait("the node is back", grown, STARTED_WITHIN_S)[0]
    last_s = max(step["time_s"] for step in stack.steps() if step["time_s"] < back["time_s"])
    loss.grow_s = round(back["time_s"] - last_s, 3)


def figures(done: Sequence[Loss], asked: int, site: str) -> dict[str, Any]:
    """Return the report: a loss after which no step came took for ever."""
    grown = [one.grow_s for one in done if one.grow_s is not None]
    return {
        "asked": asked,
        "repetitions": len(done),
        "nodes": site,
        "first_step_s": _first_step_s(done),
        "by_kind": {kind: _first_step_s([one for one in done if one.kind == kind]) for kind in LOSSES},
        "steps_lost": {
            "mean": round(sum(one.steps_lost for one in done) / len(done), 2) if done else None,
            "max": max((one.steps_lost for one in done), default=None),
        },
        "grow_s": {"p50": percentile(grown, 0.5), "max": percentile(grown, 1.0)},
        "each": msgspec.to_builtins(list(done)),
    }


def _first_step_s(done: Sequence[Loss]) -> dict[str, float | None]:
    waited = [math.inf if one.first_step_s is None else one.first_step_s for one in done]
    return {name: percentile(waited, share) for name, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0))}


def misses(found: dict[str, Any]) -> list[str]:
    """Return what was asked for and is not reached."""
    waited, lost = found["first_step_s"], found["steps_lost"]["max"]
    missed = [f"lost_node: {one['kind']} on {one['node']}: {one['note']}" for one in found["each"] if one["note"]]
    if found["repetitions"] < found["asked"]:
        missed.append(f"lost_node: {found['repetitions']} of {found['asked']} repetitions")
    for name, limit_s in (("p50", P50_S_MAX), ("p95", P95_S_MAX)):
        if waited[name] is None or waited[name] > limit_s:
            missed.append(f"lost_node: {name} {waited[name]} s until a new step; asked {limit_s:g}")
    if lost is None or lost > STEPS_LOST_MAX:
        missed.append(f"lost_node: {lost} steps lost; asked {STEPS_LOST_MAX} at most")
    return missed
