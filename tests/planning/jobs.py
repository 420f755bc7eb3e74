"""Jobs to plan: profiles by hand and by chance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

from eagle_eye.planning.files import PROFILE_FORMAT, Layer, Profile
from eagle_eye.planning.plan import Hardware, Plan
from eagle_eye.planning.planner import make_plan

GIB = 1 << 30


def layer(
    number: int,
    forward_s: float = 0.01,
    backward_s: float = 0.02,
    parameter_bytes: int = GIB,
    optimizer_bytes: int = 2 * GIB,
    activation_bytes: int = GIB // 4,
) -> Layer:
    return Layer(
        layer=number, forward_s=forward_s, backward_s=backward_s, parameter_bytes=parameter_bytes,
        optimizer_bytes=optimizer_bytes, activation_bytes=activation_bytes,
    )  # fmt: skip


def profile(layers: Sequence[Layer] | int, micro_batch: int = 1) -> Profile:
    """Return the layers' profile; of a number so many that are alike, each 4 GiB beside 0.25 GiB a micro-batch."""
    found = [layer(number) for number in range(layers)] if isinstance(layers, int) else layers
    return Profile(format=PROFILE_FORMAT, micro_batch=micro_batch, layers=tuple(found), device="H100")


def hardware(nodes: int, memory_bytes: int = 80 * GIB, gpus_per_node: int = 1, gpus_per_stage: int = 1) -> Hardware:
    return Hardware(
        nodes=nodes, gpus_per_node=gpus_per_node, gpus_per_stage=gpus_per_stage, gpu_memory_bytes=memory_bytes
    )


def plan(
    nodes: int, layers: int = 8, batch: int = 16, gpus: int = 1, together: int = 1, gib: int = 20, job: str = ""
) -> Plan:
    """Return a plan for layers of 4 GiB each, on GPUs of ``gib``; two nodes hold eight of them."""
    names = [f"n{number}" for number in range(1, nodes + 1)]
    return make_plan(profile(layers), names, hardware(nodes, gib * GIB, gpus, together), 1, batch, job)


def written(folder: Path, what: object) -> str:
    """Return the path of a file with this in it."""
    file = folder / "profile.json"
    file.write_text(json.dumps(what))
    return str(file)


def document(layers: int, **changed: object) -> dict[str, object]:
    """Return a profile's file; ``changed`` are keys of its last layer."""
    each: list[dict[str, object]] = [
        {
            "layer": number, "forward_s": 0.01, "backward_s": 0.02, "parameter_bytes": GIB,
            "optimizer_bytes": 2 * GIB, "activation_bytes": GIB // 4,
        }
        for number in range(layers)
    ]  # fmt: skip
    each[-1] |= changed
    return {"format": PROFILE_FORMAT, "micro_batch": 1, "device": "H100", "layers": each}


@st.composite
def profiles(draw: st.DrawFn, layers_max: int = 8) -> Profile:
    """Layers whose times and sizes differ by a factor of twenty."""
    seconds = st.floats(0.05, 1.0)
    count = draw(st.integers(1, layers_max))
    return profile(
        [
            layer(
                number,
                forward_s=draw(seconds),
                backward_s=draw(seconds),
                parameter_bytes=draw(st.integers(1, 20)),
                optimizer_bytes=draw(st.integers(0, 20)),
                activation_bytes=draw(st.integers(0, 4)),
            )
            for number in range(count)
        ]
    )
