"""What is left of the throughput with fewer nodes, beside Oobleck and Bamboo: simulated, on layers measured here."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.replanning import traces
from benchmarks.replanning.systems import (
    BAMBOO_PAUSES_S,
    OOBLECK_PAUSES_S,
    Bamboo,
    Oobleck,
    Planned,
    bamboo_stages,
    oobleck_templates,
)
from benchmarks.replanning.traces import Pause, System
from eagle_eye.planning.files import Profile
from eagle_eye.planning.measuring import measure as measure_layers
from eagle_eye.planning.plan import Hardware
from eagle_eye.planning.planner import make_plan

MODEL = "benchmarks.replanning.model:job"
ROUNDS = 15
OURS = "Eagle Eye"
TOLERATE = 1
LOST_MAX = 3
EVERY_S = {"10 min": 600.0, "1 h": 3_600.0, "6 h": 21_600.0}  # of the paper's traces
FAILURES_MIN = 144  # of each trace, on average: a day of the most frequent ones
NODES_MIN, NODES_MAX = 4, 10  # all cuts of the layers are tried for Oobleck
LEFT_RATIO_MIN = 0.95  # asked for: of the share of the nodes that is left

Say = Callable[[str], None]


def measure(
    nodes: int, micro_batches: int, draws: int, seed: int, repair_s: float, pauses: Mapping[str, float | None], say: Say
) -> dict[str, Any]:
    """Return the figures. ``pauses`` are Eagle Eye's own, None where nobody has measured them.

    ``first_step_s`` after a loss, ``grow_s`` when a node is taken back, ``steps_lost`` the steps that are made again.
    """
    say(f"measuring the layers of {MODEL}")
    profile = measure_layers(MODEL, "cpu", ROUNDS)
    return simulated(profile, nodes, micro_batches, draws, seed, repair_s, pauses, say)


def simulated(
    profile: Profile,
    nodes: int,
    micro_batches: int,
    draws: int,
    seed: int,
    repair_s: float,
    pauses: Mapping[str, float | None],
    say: Say,
) -> dict[str, Any]:
    """Return the figures of these layers. Two nodes hold the model, and one does not."""
    whole = sum(2 * one.parameter_bytes + one.optimizer_bytes + one.activation_bytes for one in profile.layers)
    hardware = Hardware(nodes=nodes, gpus_per_node=1, gpus_per_stage=1, gpu_memory_bytes=whole - 1)
    names = [f"n{number}" for number in range(nodes)]
    plan = make_plan(profile, names, hardware, TOLERATE, micro_batches * profile.micro_batch)
    oobleck = oobleck_templates(profile, hardware, TOLERATE)
    stages = bamboo_stages(plan, LOST_MAX)
    full_s = Planned(plan, Pause(0.0), 0.0).step_s
    own_s, grow_s = pauses["first_step_s"], pauses["grow_s"]

    def ours(pause: Pause, back_s: float) -> System:
        return Planned(plan, pause, back_s)

    def theirs(pause: Pause, back_s: float) -> System:
        return Oobleck(oobleck, nodes, TOLERATE, micro_batches, pause, back_s)

    made: dict[str, Callable[[], System]] = {}
    if own_s is not None and grow_s is not None:
        own = Pause(own_s, loses_step=True, again_s=(pauses["steps_lost"] or 0.0) * full_s)
        made["Eagle Eye, its own pause"] = partial(ours, own, grow_s)
        made["Oobleck, with the same pause"] = partial(theirs, own, grow_s)
    for model, pause_s in OOBLECK_PAUSES_S.items():
        published = Pause(pause_s, loses_step=True)
        made[f"Eagle Eye, with Oobleck's pause of {model}"] = partial(ours, published, pause_s)
        made[f"Oobleck, pause of {model}"] = partial(theirs, published, pause_s)
    for model, pause_s in BAMBOO_PAUSES_S.items():
        made[f"Bamboo, pause of {model}"] = partial(Bamboo, stages, nodes, micro_batches, pause_s)
    found: dict[str, Any] = {
        "simulated": "1F1B event by event, on layers measured on this machine; nothing ran on so many nodes",
        "profile": {
            "model": MODEL, "layers": len(profile.layers), "micro_batch": profile.micro_batch, "device": profile.device,
            "layer_ms": [round(1e3 * (one.forward_s + one.backward_s), 3) for one in profile.layers],
        },
        "nodes": nodes, "nodes_min": plan.nodes_min, "micro_batches": micro_batches, "step_s": round(full_s, 3),
        "bamboo_depth": len(stages),
        "lost": _lost(full_s, nodes, {
            "Eagle Eye": partial(ours, Pause(0.0), 0.0), "Oobleck": partial(theirs, Pause(0.0), 0.0),
            "Bamboo": partial(Bamboo, stages, nodes, micro_batches, 0.0),
        }, seed),
        "pauses_s": {
            "Eagle Eye": own_s, "Eagle Eye, a node taken back": grow_s,
            "Eagle Eye, steps made again": pauses["steps_lost"],
            "Oobleck": OOBLECK_PAUSES_S, "Bamboo": BAMBOO_PAUSES_S,
        },
        "repair_s": repair_s,
        "frequencies": {},
    }  # fmt: skip
    ratios = found["lost"]["Eagle Eye"]["of_nodes_left_ratio"]
    found["of_nodes_left_ratio_mean"] = round(statistics.mean(ratios), 4)
    for name, every_s in EVERY_S.items():
        say(f"a failure each {name}")
        found["frequencies"][name] = _effective(full_s, nodes, made, every_s, repair_s, draws, seed)
    return found


def _lost(full_s: float, nodes: int, made: Mapping[str, Callable[[], System]], seed: int) -> dict[str, Any]:
    """Return what each makes of the first losses, without pauses: of the undisturbed throughput, and of the nodes left.

    Which nodes go matters to Oobleck alone: the mean of ten draws.
    """
    found: dict[str, Any] = {}
    for name, make in made.items():
        kept: list[list[float]] = [[] for _ in range(LOST_MAX + 1)]
        for number in range(10):
            order = random.Random(seed + number).sample(range(nodes), LOST_MAX)
            system = make()
            kept[0].append(full_s / system.step_s)
            for lost, node in enumerate(order, start=1):
                system.lose(node)
                kept[lost].append(full_s / system.step_s)
        ratios = [statistics.mean(one) for one in kept]
        of_left = [ratio * nodes / (nodes - lost) for lost, ratio in enumerate(ratios)]
        found[name] = {
            "of_undisturbed_ratio": [round(ratio, 4) for ratio in ratios],
            "of_nodes_left_ratio": [round(ratio, 4) for ratio in of_left[1:]],
        }
    return found


def _effective(
    full_s: float,
    nodes: int,
    made: Mapping[str, Callable[[], System]],
    every_s: float,
    repair_s: float,
    draws: int,
    seed: int,
) -> dict[str, Any]:
    """Return what each makes of the same traces, of what all nodes make undisturbed with our plan."""
    until_s = FAILURES_MIN * every_s
    drawn = [
        traces.draw(nodes, every_s, repair_s, until_s, random.Random(f"{seed}-{every_s}-{number}"))
        for number in range(draws)
    ]
    found: dict[str, Any] = {
        "traces": draws, "hours": round(until_s / 3_600, 1),
        "failures": sum(not event.back for events in drawn for event in events),
        "nodes_up_ratio": round(
            statistics.mean(traces.nodes_up(nodes, events, until_s) for events in drawn) / nodes, 4
        ),
        "of_undisturbed_ratio": {},
    }  # fmt: skip
    for name, make in made.items():
        ratios = [traces.steps(make(), events, until_s) * full_s / until_s for events in drawn]
        found["of_undisturbed_ratio"][name] = {
            "mean": round(statistics.mean(ratios), 4), "min": round(min(ratios), 4), "max": round(max(ratios), 4),
        }  # fmt: skip
    return found


def misses(found: Mapping[str, Any]) -> list[str]:
    """Return what was asked for and is not reached."""
    missed = []
    if (mean := found["of_nodes_left_ratio_mean"]) < LEFT_RATIO_MIN:
        missed.append(f"with {LOST_MAX} or fewer of {found['nodes']} nodes lost {mean:.1%} of their share is left")
    for name, one in found["frequencies"].items():
        ratios = {system: kept["mean"] for system, kept in one["of_undisturbed_ratio"].items()}
        own = next(ratio for system, ratio in ratios.items() if system.startswith(OURS))
        missed += [
            f"a failure each {name}: {system} makes {ratio:.1%}, Eagle Eye {own:.1%}"
            for system, ratio in ratios.items()
            if not system.startswith(OURS) and ratio > own
        ]
    return missed
