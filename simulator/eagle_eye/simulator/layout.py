"""Placement of a job's ranks: tensor parallelism inside the node, pipeline stages and replicas across nodes."""

from __future__ import annotations

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
