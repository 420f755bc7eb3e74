"""The causes of everything in a run: tracks, stops, outages, pauses, attempts, events and labels."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from eagle_eye.simulator.job import ClusterLayout, SimulatedJob
from eagle_eye.simulator.physics import OWN, Physics
from eagle_eye.simulator.scenario import STRENGTHS, Scenario, WrongScenario
from eagle_eye.simulator.tracks import Quantity, Track

WHOLE_NODE = -1


class Place(NamedTuple):
    """A GPU: positions of its node and in its node."""

    node: int
    device: int


class StopKind(Enum):
    """How a job comes to a stop, as the collective counts show it."""

    LATE = "late"  # the culprits do not issue the collective that all others wait in
    TRANSFER = "transfer"  # all issued it; the culprits' part never completes, others completed one more
    SYMMETRIC = "symmetric"  # all issued it, nobody completes it


@dataclass(frozen=True, slots=True)
class EndlessStep:
    """The step in progress at ``time_s`` never ends. ``culprits`` are ranks (N, G positions)."""

    time_s: float
    kind: StopKind
    culprits: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True)
class Death:
    """Processes end at ``time_s`` until the next attempt."""

    time_s: float
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class MissingRows:
    """No rows of a node, or (``device`` given) no rows of one device, from ``start_s`` to ``end_s``."""

    node: int
    start_s: float
    end_s: float = math.inf
    device: int | None = None


@dataclass(frozen=True, slots=True)
class Blank:
    """Metrics whose names start with ``prefix`` are not observed on these devices, the row is still there."""

    node: int
    start_s: float
    prefix: str = "gpu_"
    end_s: float = math.inf
    device: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedPause:
    """Between two steps, from about ``start_s`` on, the job does something else for ``seconds``.

    ``busy``: share of its usual activity that the GPUs keep (evaluation 0.6; a checkpoint 0). ``spins``: ranks but
    the first wait in a collective, which looks like full utilisation. ``announced``: the training code says so.
    ``alone``: only the first rank does it, ``cpus`` processors' worth; all others have entered the next collective.
    """

    kind: str
    start_s: float
    seconds: float
    busy: float = 0.0
    spins: bool = True
    announced: bool = True
    disk_bytes_per_s: float = 0.0
    alone: bool = False
    cpus: float = 1.0


@dataclass(frozen=True, slots=True)
class SimulatedAttempt:
    """One start of the job. ``slow_steps`` are factors on its first steps (compilation, caches)."""

    start_s: float
    first_step: int
    slow_steps: tuple[float, ...] = ()
    stop: EndlessStep | None = None


class PlannedEvent(NamedTuple):
    """An event; ``node`` None for the whole job."""

    time_s: float
    kind: str
    node: int | None
    device: int
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PlannedLabel:
    """What was done to the job. ``expect`` None: decided by how much slower the job became."""

    start_s: float
    nodes: tuple[int, ...]
    fault: str
    expect: str | None
    end_s: float = math.inf


@dataclass(slots=True)
class Story:
    """Everything that happens in one run; the faults and situations add to it."""

    scenario: Scenario
    layout: ClusterLayout
    job: SimulatedJob
    rng: np.random.Generator
    tracks: list[Track] = field(default_factory=list)
    attempts: list[SimulatedAttempt] = field(default_factory=list)  # [] means one that began long before the trace
    deaths: list[Death] = field(default_factory=list)
    outages: list[MissingRows] = field(default_factory=list)
    blanks: list[Blank] = field(default_factory=list)
    pauses: list[PlannedPause] = field(default_factory=list)
    planned_events: list[PlannedEvent] = field(default_factory=list)
    labels: list[PlannedLabel] = field(default_factory=list)
    gone: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)  # nodes that leave an elastic job
    background_tracks: int = 0  # how many of the tracks are not the fault's
    physics: Physics = OWN

    def onset(self, earliest: float = 0.35, latest: float = 0.55) -> float:
        """Return a random moment between two shares of the trace's length."""
        return float(self.rng.uniform(earliest, latest)) * self.scenario.duration_s

    def culprit(self) -> Place:
        """Return a random GPU."""
        return Place(int(self.rng.integers(self.layout.nodes)), int(self.rng.integers(self.layout.gpus)))

    def variant(self, *names: str, odds: tuple[float, ...] | None = None) -> str:
        """Return the variant that was asked for, else one by seed. Raises WrongScenario for an unknown one."""
        drawn = str(self.rng.choice(list(names), p=odds))
        asked = self.scenario.variant
        if asked is not None and asked not in names:
            raise WrongScenario(f"variant is {asked!r}; {self.scenario.fault} has {', '.join(names)}")
        return asked or drawn

    def strength(self, faint: float, weak: float, medium: float, strong: float) -> float:
        """Return the value for the strength that was asked for, varied by +-10% of its distance from 1.

        In the second physics any value from weak to strong, unless faint was asked for.
        """
        if self.physics.continuous_strength and self.scenario.strength != "faint":
            return 1.0 + (weak - 1.0) * math.exp(math.log((strong - 1.0) / (weak - 1.0)) * float(self.rng.random()))
        value = (faint, weak, medium, strong)[STRENGTHS.index(self.scenario.strength)]
        return 1.0 + (value - 1.0) * float(self.rng.uniform(0.9, 1.1))

    def rise_s(self) -> float:
        """Return how long the fault takes to grow: 0 when it is sudden."""
        return float(self.rng.uniform(0.2, 0.35)) * self.scenario.duration_s if self.scenario.creeping else 0.0

    def change(
        self,
        quantity: Quantity,
        value: float,
        start_s: float,
        *,
        at: Place | None = None,
        nodes: tuple[int, ...] | None = None,
        end_s: float = math.inf,
        rise_s: float = 0.0,
    ) -> None:
        """Add a cause: on one GPU (``at``), on nodes, or everywhere."""
        where, device = ((at.node,), at.device) if at is not None else (nodes, None)
        self.tracks += self.physics.shown(Track(quantity, value, start_s, end_s, rise_s, where, device))

    def say(
        self, time_s: float, kind: str, node: int | None = None, device: int = WHOLE_NODE, **attributes: object
    ) -> None:
        """Add an event."""
        self.planned_events += [
            PlannedEvent(heard_s, kind, node, device, attributes) for heard_s in self.physics.heard_s(kind, time_s)
        ]

    def label(self, start_s: float, nodes: tuple[int, ...], fault: str, expect: str | None) -> None:
        """Add a label that lasts until the trace's end."""
        self.labels.append(PlannedLabel(start_s, nodes, fault, expect))

    def stop(self, time_s: float, kind: StopKind, *culprits: Place) -> None:
        """Bring the job's first attempt to a stop for good."""
        first = self.attempts[0] if self.attempts else SimulatedAttempt(-math.inf, self.job.first_step)
        self.attempts[:1] = [
            SimulatedAttempt(first.start_s, first.first_step, first.slow_steps, EndlessStep(time_s, kind, culprits))
        ]

    def places(self, node: int) -> tuple[Place, ...]:
        """Return all GPUs of a node."""
        return tuple(Place(node, device) for device in range(self.layout.gpus))

    def everywhere(self) -> tuple[Place, ...]:
        """Return all GPUs of the job."""
        return tuple(place for node in range(self.layout.nodes) for place in self.places(node))

    def rank(self, place: Place) -> int:
        """Return the rank at a place."""
        return place.node * self.layout.gpus + place.device
