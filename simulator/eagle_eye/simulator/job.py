"""The training job: its step duration, the parts of a step, and its normal behaviour."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eagle_eye.simulator.arrays import stream
from eagle_eye.simulator.layout import ClusterLayout
from eagle_eye.simulator.physics import OWN, Physics
from eagle_eye.simulator.scenario import Scenario

OVERHEAD_SHARE = 0.015  # of a step: optimizer and host work between steps
TENSOR_SHARE = 0.07  # of a stage's compute: collectives inside the node


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """What distinguishes one training job from another. Shares are of a nominal step.

    ``packed_from_s``: from then on a step's work differs from replica to replica (packed sequences); inf never.
    ``wide_sequence``: the widest process group in use is the world, else each stage's data-parallel group, whose
    collectives are counted apart. ``spread_collectives``: collectives are spread over the step (sharded parameters)
    and overlap with compute; else they sit at its end.
    """

    name: str
    step_s: float
    compute_s: float  # of a stage of weight 1
    communication_s: float  # after the last arriver
    stage_weights: tuple[float, ...]
    microbatches: int
    collectives: int  # per step, on the widest group
    first_step: int
    spread_collectives: bool
    wide_sequence: bool
    packed_from_s: float
    says_work_units: bool
    says_local_grad: bool
    says_checksum: bool
    data_wait_s: float
    tokens: float  # per rank and step
    tensor_active: float  # while busy
    checkpoint_every_s: float
    checkpoint_s: float
    checkpoint_announced: bool
    exports_xid: bool
    expert_spread: float = 0.0  # by how much ranks' loads differ, as a router deals them out anew and anew


def hire(scenario: Scenario, layout: ClusterLayout, physics: Physics = OWN) -> SimulatedJob:
    """Return the job that the seed chooses."""
    rng = stream(scenario.seed, "job")
    pp = layout.pp
    communication = float(rng.uniform(*physics.communication))
    # Public traces have an even pipeline at best within 1% and at worst a last stage of 1.6x (Lin et al., OSDI 2025).
    weights = [1.0] * pp
    uneven = pp > 1 and rng.random() < 0.15
    if uneven and scenario.habits:
        weights[-1] = float(rng.uniform(1.1, 1.6))
    microbatches = pp * int(rng.choice([4, 8]))
    packed = rng.random() < 0.2
    checkpoints = rng.random() < physics.checkpoint_odds
    every_s = float(rng.uniform(0.3, 0.8)) * scenario.duration_s
    habits = scenario.habits
    wide_p = rng.random()
    spread = pp == 1
    return SimulatedJob(
        name=f"train-{int(rng.integers(1000, 9999))}",
        step_s=scenario.step_s,
        compute_s=stage_compute_s(scenario.step_s, communication, weights, microbatches),
        communication_s=communication * scenario.step_s,
        stage_weights=tuple(weights),
        microbatches=microbatches,
        collectives=int(rng.integers(40, 160)) if spread else int(rng.integers(3, 9)),
        first_step=int(rng.integers(200, 90_000)),
        spread_collectives=spread,
        wide_sequence=pp == 1 or bool(wide_p < 0.85),
        packed_from_s=-math.inf if packed and habits else math.inf,
        # Sequence lengths say nothing of which experts they go to.
        says_work_units=bool(rng.random() < 0.5) and not physics.uneven_experts,
        says_local_grad=bool(rng.random() < 0.75),
        says_checksum=bool(rng.random() < 0.5),
        data_wait_s=float(rng.uniform(*physics.data_wait)) * scenario.step_s,
        tokens=float(rng.choice([4096, 8192, 16384])),
        tensor_active=float(rng.uniform(*physics.tensor_active)),
        checkpoint_every_s=every_s if checkpoints and habits else math.inf,
        checkpoint_s=float(rng.uniform(*physics.checkpoint_s)),
        checkpoint_announced=bool(rng.random() < physics.announced_odds),
        exports_xid=bool(rng.random() < 0.5),
    )


def stage_compute_s(step_s: float, communication: float, weights: list[float], microbatches: int) -> float:
    """Return the compute of a stage of weight 1 so that a noiseless step takes ``step_s``."""
    longest = max(weights)
    pipeline = longest + (sum(weights) - longest) / microbatches
    return step_s * (1.0 - communication - OVERHEAD_SHARE) / (pipeline * (1.0 + TENSOR_SHARE))
