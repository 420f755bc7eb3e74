"""One situation in a world of its own, and the claim: nothing was asked of anybody."""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from pathlib import Path

import msgspec

from benchmarks.innocence.situations import Situation
from benchmarks.innocence.world import Pace, World


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """``problem`` "": it went as it must. ``told`` are the incidents that people saw."""

    name: str
    about: str
    where: str  # "engine on a fake clock", "real processes", "real Slurm"
    problem: str
    told: list[str] = []
    actions: list[str] = []
    simulated_s: float | None = None
    took_s: float = 0.0
    skipped: str = ""


def examine(situation: Situation, pace: Pace) -> Examined:
    """Return what came of the situation."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="innocence-") as folder, closing(World(Path(folder), pace)) as world:
        world.step = 0.0 if situation.training else None
        world.declare()
        if situation.training:
            world.run(pace.calm_s)
        spoken = situation.play(world)
        world.run(pace.calm_s)
        actions = world.actions()
        return Examined(
            name=situation.name,
            about=situation.about,
            where="engine on a fake clock",
            problem=_problem(situation, spoken, actions, world),
            told=world.notices(),
            actions=actions,
            simulated_s=world.clocks.steady_s,
            took_s=round(time.monotonic() - began_s, 2),
        )


def _problem(situation: Situation, spoken: str | None, actions: list[str], world: World) -> str:
    if situation.guilty:
        return "" if actions else "nothing was asked for, so that this world shows nothing"
    ours = {node: said for node, said in world.out().items() if said[1] == "server"}
    return spoken or "; ".join(actions) or "; ".join(f"{node} is {state}" for node, (state, _) in ours.items())
