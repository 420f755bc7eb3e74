"""How long a plan takes, how soon it answers, and how good it is.

    python -m benchmarks.planning --layers 96 --nodes 64 --cases 2000 --out benchmarks/results/planning.json

Without arguments a look at a small size. Jobs are drawn from the seed. Exit code 1: a figure is missed; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.planning.exhaustive import Together, least_cut_s, least_mixture_s
from eagle_eye.planning.files import PROFILE_FORMAT, Layer, Profile
from eagle_eye.planning.plan import Hardware, Plan
from eagle_eye.planning.planner import make_plan, plan_layouts
from eagle_eye.planning.step_time import simulate, step_time_s
from eagle_eye.planning.templates import ModelDoesNotFit, plan_templates

GIB = 1 << 30
LAYERS_PER_NODE = (48, 12, 4)  # that its memory holds: few nodes a pipeline, some, many
SMALL_LAYERS, SMALL_NODES = 8, 6  # of what is searched exhaustively
PLAN_S_MAX, ANSWER_S_MAX, DEVIATION_MAX, SLOWER_MAX = 10.0, 0.010, 0.05, 1e-6  # what is asked for


def main() -> int:
    """Measure, print and keep."""
    args = _arguments()
    chance = random.Random(args.seed)
    result = {
        "speed": [_speed(args, chance, layers_per_node) for layers_per_node in LAYERS_PER_NODE],
        "step_times": _step_times(args.cases, chance),
        "exhaustive": _exhaustive(args.cases, chance),
        "settings": {"layers": args.layers, "nodes": args.nodes, "cases": args.cases, "seed": args.seed},
    }
    if args.out:
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    if args.json:
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
    else:
        _show(result)
    return 0 if _reached(result) else 1


def _speed(args: argparse.Namespace, chance: random.Random, layers_per_node: int) -> dict[str, Any]:
    """Plan a job of which a node holds so many layers, and have each node of each layout go."""
    job = Profile(
        format=PROFILE_FORMAT,
        micro_batch=1,
        layers=tuple(
            Layer(
                layer=number, forward_s=0.01 * chance.uniform(0.8, 1.2), backward_s=0.02 * chance.uniform(0.8, 1.2),
                parameter_bytes=GIB, optimizer_bytes=2 * GIB, activation_bytes=GIB // 64,
            )
            for number in range(args.layers)
        ),
    )  # fmt: skip
    memory_bytes = layers_per_node * 4 * GIB + args.layers * GIB // 64
    hardware = Hardware(nodes=args.nodes, gpus_per_node=1, gpus_per_stage=1, gpu_memory_bytes=memory_bytes)
    names = [f"n{number}" for number in range(args.nodes)]
    began_s = time.perf_counter()
    plan = make_plan(job, names, hardware, 1, 16 * args.nodes)
    planned_s = time.perf_counter() - began_s
    answers_s = _answers(plan)
    return {
        "nodes_min": plan.nodes_min,
        "templates": len(plan.templates),
        "layouts": len(plan.layouts),
        "plan_s": round(planned_s, 3),
        "answer_s_p50": round(statistics.median(answers_s), 6) if answers_s else 0.0,
        "answer_s_max": round(max(answers_s, default=0.0), 6),
        "file_bytes": len(msgspec.json.encode(plan)),
    }


def _answers(plan: Plan) -> list[float]:
    """Return how long it takes the plan to say what follows, for each node of each layout.

    The least of three times each: whoever shares the machine is not measured.
    """
    found = []
    for layout in plan.layouts[1:]:
        names = [f"n{number}" for number in range(layout.nodes)]
        for node in names:
            took_s = []
            for _ in range(3):
                began_s = time.perf_counter()
                plan.lost(names, node)
                took_s.append(time.perf_counter() - began_s)
            found.append(min(took_s))
    return found


def _step_times(cases: int, chance: random.Random) -> dict[str, Any]:
    """Return how far step times are from the event simulation, for stages that differ up to twentyfold."""
    deviations = []
    for _ in range(cases):
        stages = [Together(chance.uniform(0.1, 2.0), chance.uniform(0.1, 2.0)) for _ in range(chance.randint(1, 12))]
        micro_batches = chance.randint(1, 4 * len(stages))
        simulated_s = simulate(stages, [micro_batches])[-1].end_s
        deviations.append(abs(step_time_s(stages, micro_batches) / simulated_s - 1))
    return {"cases": cases, "deviation_max": max(deviations)}


def _exhaustive(cases: int, chance: random.Random) -> dict[str, Any]:
    """Return by how much planned jobs are slower than the best that there is, at most: of cuts and of mixtures."""
    cuts_slower, mixtures_slower, tried = 0.0, 0.0, 0
    while tried < cases:
        layers = tuple(
            Layer(
                layer=number, forward_s=chance.uniform(0.1, 2.0), backward_s=chance.uniform(0.1, 2.0),
                parameter_bytes=chance.randint(1, 20), optimizer_bytes=chance.randint(0, 20),
                activation_bytes=chance.randint(0, 4),
            )
            for number in range(chance.randint(1, SMALL_LAYERS))
        )  # fmt: skip
        job = Profile(format=PROFILE_FORMAT, micro_batch=1, layers=layers)
        nodes, tolerate, micro_batches = chance.randint(1, SMALL_NODES), chance.randint(0, 2), chance.randint(3, 8)
        hardware = Hardware(nodes=nodes, gpus_per_node=1, gpus_per_stage=1, gpu_memory_bytes=chance.randint(40, 400))
        try:
            templates = plan_templates(job, hardware, tolerate, micro_batches)
        except ModelDoesNotFit:
            continue
        tried += 1
        for template in templates:
            least_s = least_cut_s(job, template.nodes, template.micro_batches, hardware.stage_memory_bytes)
            cuts_slower = max(cuts_slower, template.step_s / least_s - 1)
        for layout in plan_layouts(templates, nodes, tolerate, micro_batches):
            pipelines_min = min(tolerate + 1, layout.nodes // templates[0].nodes)
            least_s = least_mixture_s(templates, layout.nodes, pipelines_min, micro_batches)
            mixtures_slower = max(mixtures_slower, layout.step_s / least_s - 1)
    return {"cases": cases, "cuts_slower_max": cuts_slower, "mixtures_slower_max": mixtures_slower}


def _reached(result: dict[str, Any]) -> bool:
    return (
        all(each["plan_s"] <= PLAN_S_MAX and each["answer_s_max"] <= ANSWER_S_MAX for each in result["speed"])
        and result["step_times"]["deviation_max"] <= DEVIATION_MAX
        and max(result["exhaustive"]["cuts_slower_max"], result["exhaustive"]["mixtures_slower_max"]) <= SLOWER_MAX
    )


def _show(result: dict[str, Any]) -> None:
    settings = result["settings"]
    print(f"{settings['layers']} layers, {settings['nodes']} nodes")
    for each in result["speed"]:
        print(
            f"  pipelines of {each['nodes_min']} nodes or more: planned in {each['plan_s']:.2f} s, a lost node answered"
            f" in {each['answer_s_p50'] * 1e3:.3f} ms (p50), {each['answer_s_max'] * 1e3:.3f} ms (max),"
            f" file {each['file_bytes'] / 1e6:.1f} MB"
        )
    deviation, cases = result["step_times"]["deviation_max"], settings["cases"]
    print(f"step times: {deviation:.1e} from the event simulation at most, of {cases}")
    cuts, mixtures = result["exhaustive"]["cuts_slower_max"], result["exhaustive"]["mixtures_slower_max"]
    print(f"slower than exhaustive search: cuts {cuts:.1e}, mixtures {mixtures:.1e} at most, of {cases} jobs")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=24, help="of the job that is planned (24)")
    parser.add_argument("--nodes", type=int, default=12, help="that it is planned for (12)")
    parser.add_argument("--cases", type=int, default=50, help="small jobs that are compared (50)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    for name in ("layers", "nodes", "cases"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: expected 1 or more")
    if args.nodes * min(LAYERS_PER_NODE) < args.layers:
        parser.error(f"--nodes {args.nodes}: {args.layers} layers take {-(-args.layers // min(LAYERS_PER_NODE))}")
    return args


if __name__ == "__main__":
    sys.exit(main())
