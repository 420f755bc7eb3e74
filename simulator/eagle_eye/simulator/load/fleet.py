"""The synthetic agents: names, jobs, ranks; and the common part of their frames."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.frame import KEYS_MAX, WIRE_VERSION, Block, Frame, Rank
from eagle_eye.schema.metrics import Scope
from eagle_eye.simulator.load.values import METRICS, Integers

NODES_MAX = 100_000
AGENT_VERSION = "loadtest"


@dataclass(frozen=True)
class Load:
    """The requested load. ``job_nodes``: hosts per job, the last one smaller. Times in seconds.

    ``spread`` is the share of the interval over which the nodes send, in turn: 0 all at once, 1 evenly.
    Acknowledgements of frames that are due after ``warm_up_s`` are counted apart as well.
    """

    nodes: int
    gpus: int = 8
    interval_s: float = 1.0
    duration_s: float = 60.0
    job_nodes: int = 128
    step_s: float = 2.0
    spread: float = 1.0
    prefix: str = "load"
    seed: int = 0
    warm_up_s: float = 0.0

    def check(self) -> None:
        """Check that it is possible. Raises ConfigurationError."""
        limits = {
            "--nodes": (self.nodes, 1, NODES_MAX),
            "--gpus": (self.gpus, 1, KEYS_MAX),
            "--interval": (self.interval_s, 0.1, 3_600.0),
            "--duration": (self.duration_s, self.interval_s, 30 * 86_400.0),
            "--job-nodes": (self.job_nodes, 1, NODES_MAX),
            "--step-seconds": (self.step_s, 0.01, 3_600.0),
            "--spread": (self.spread, 0.0, 1.0),
            "--warm-up": (self.warm_up_s, 0.0, self.duration_s),
        }
        for flag, (value, least, most) in limits.items():
            if not least <= value <= most:
                raise ConfigurationError(f"{flag}: expected {least:g} to {most:g}, got {value:g}")
        if not (0 < len(self.prefix) <= 200 and self.prefix.isprintable()):
            raise ConfigurationError(f"--prefix: expected 1 to 200 printable characters, got {self.prefix[:80]!r}")

    @property
    def intervals(self) -> int:
        """How many frames each node makes."""
        return max(round(self.duration_s / self.interval_s), 1)


class SimulatedFleet:
    """The nodes in sending order; a job's nodes are scattered in it, as at a real site."""

    def __init__(self, load: Load, stream: str) -> None:
        """``stream`` distinguishes this run's frames from those of every other."""
        places = np.random.default_rng([load.seed, 1]).permutation(load.nodes)
        self.jobs: Integers = places // load.job_nodes
        sizes = Counter(self.jobs.tolist())
        self.names = [f"{load.prefix}-{number:05d}" for number in range(1, load.nodes + 1)]
        self.frames: list[Frame] = []
        for name, place, number in zip(self.names, places.tolist(), self.jobs.tolist(), strict=True):
            job = f"{load.prefix}-job-{number:03d}"
            first = place % load.job_nodes * load.gpus
            world = sizes[number] * load.gpus
            ranks = [Rank(job, first + device, world, device) for device in range(load.gpus)]
            self.frames.append(_frame(name, stream, job, ranks, load))


def _frame(node: str, stream: str, job: str, ranks: list[Rank], load: Load) -> Frame:
    """Return what a node's frames have in common: all but sequence, time and numbers."""
    return Frame(
        version=WIRE_VERSION,
        node=node,
        boot_id=stream,
        stream=stream,
        sequence=1,
        time_s=1.0,
        interval_s=load.interval_s,
        agent_version=AGENT_VERSION,
        job=job,
        ranks=ranks,
        blocks=[Block(Scope.DEVICE, list(range(load.gpus)), list(METRICS), b"")],
        collectors={"loadtest": "ok"},
    )
