"""The training job: where its ranks are placed, its step's duration and parts, and its normal behaviour."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from eagle_eye.simulator.arrays import Integers, stream
from eagle_eye.simulator.physics import OWN, Physics
from eagle_eye.simulator.scenario import Scenario

PIPELINES = (1, 2, 4, 8)  # depths in use; the public ByteDance traces have 4 (Lin et al., OSDI 2025)
TENSOR_PARALLEL = (1, 2, 4, 8)  # where it is not all of a node's GPUs
MODELS = (
    # name, power limit W, idle W, boost Hz, memory Hz, memory bytes, NVLinks, PCIe generation (NVIDIA data sheets)
    ("NVIDIA H100 80GB HBM3", 700.0, 70.0, 1.980e9, 2.619e9, 80e9, 18, 5),
    ("NVIDIA H200", 700.0, 75.0, 1.980e9, 3.201e9, 141e9, 18, 5),
    ("NVIDIA A100-SXM4-80GB", 400.0, 55.0, 1.410e9, 1.593e9, 80e9, 12, 4),
)
SPINE_NODES = 32  # nodes of a rail-optimised pod


@dataclass(frozen=True, slots=True)
class Model:
    """A GPU model by its data sheet."""

    name: str
    power_limit_w: float
    idle_w: float
    boost_hz: float
    memory_hz: float
    memory_bytes: float
    nvlinks: int
    pcie_generation: int


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """Nodes, their place in the building and the ranks on them.

    Rank r runs on node r // G, device r % G; with tensor parallelism innermost and the pipeline outermost, as
    Megatron-LM numbers ranks. ``switch`` is each node's leaf switch; ``link_switch`` [node][link] the switch of each
    RDMA port, which in a rail-optimised network differs from link to link.
    """

    names: tuple[str, ...]
    gpus: int
    tp: int
    pp: int
    dp: int
    switch: tuple[str, ...]
    links: tuple[str, ...]
    link_switch: tuple[tuple[str, ...], ...]
    models: tuple[Model, ...]  # one a node

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.names)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.gpus

    def stage(self) -> Integers:
        """Return each rank's pipeline stage, (N, G)."""
        return (np.arange(self.world) // (self.tp * self.dp)).reshape(self.nodes, self.gpus)

    def replica(self) -> Integers:
        """Return each rank's data-parallel replica, (N, G)."""
        return (np.arange(self.world) // self.tp % self.dp).reshape(self.nodes, self.gpus)

    def lane(self) -> Integers:
        """Return each rank's place in its tensor-parallel group, (N, G)."""
        return (np.arange(self.world) % self.tp).reshape(self.nodes, self.gpus)

    def under(self, switch: str) -> tuple[int, ...]:
        """Return the positions of the nodes that have a port on this switch."""
        return tuple(n for n in range(self.nodes) if switch == self.switch[n] or switch in self.link_switch[n])


def lay_out(scenario: Scenario, physics: Physics = OWN) -> ClusterLayout:
    """Return the layout that the seed chooses for this many nodes and GPUs."""
    rng = stream(scenario.seed, "layout")
    nodes, gpus = scenario.nodes, scenario.gpus
    # One node alone has no peers across nodes: its ranks are then replicas of each other.
    tp = scenario.tensor_parallel or (gpus if nodes > 1 else 1)
    if physics.any_tensor_parallel and scenario.tensor_parallel is None:
        tp = int(stream(scenario.seed, "tensor parallel").choice([t for t in TENSOR_PARALLEL if gpus % t == 0]))
    depths = [p for p in PIPELINES if nodes % p == 0 and (p == 1 or nodes // p >= 2)]
    pp = int(rng.choice(depths))
    leaf = int(rng.choice([8, 12, 16]))
    within = int(rng.integers(0, leaf))  # the scheduler hands out nodes from the midst of a leaf on
    ports = gpus if rng.random() < 0.7 else max(1, gpus // 2)
    rails = nodes > leaf and rng.random() < 0.5
    first = int(rng.integers(0, 400))
    letters = "".join(rng.choice(list("bcdfghjkm"), 2))
    model = Model(*MODELS[int(rng.choice(len(MODELS), p=[0.6, 0.2, 0.2]))])
    switch = tuple(f"leaf-{(n + within) // leaf:02d}" for n in range(nodes))
    return ClusterLayout(
        names=tuple(f"{letters}{first + n:04d}" for n in range(nodes)),
        gpus=gpus,
        tp=tp,
        pp=pp,
        dp=nodes * gpus // (tp * pp),
        switch=switch,
        links=tuple(f"mlx5_{port}" for port in range(ports)),
        link_switch=tuple(
            tuple(f"rail-{n // SPINE_NODES}-{port}" if rails else switch[n] for port in range(ports))
            for n in range(nodes)
        ),
        models=(model,) * nodes,
    )


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
