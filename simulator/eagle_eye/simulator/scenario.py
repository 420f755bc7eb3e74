"""The simulator's input: one run, described by a few numbers and names."""

from __future__ import annotations

from dataclasses import dataclass

STRENGTHS = ("faint", "weak", "medium", "strong")
PHYSICS = ("own", "second")
MAXIMUM_CELLS = 4e8  # steps x ranks or rows x ranks that fit into a few GiB


class WrongScenario(ValueError):
    """A scenario that cannot be simulated; the message gives the value, the limit and the remedy."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run to simulate. The same scenario always gives the same recording.

    ``fault`` names a fault, a look-guilty situation or ``none``. ``background`` names a situation that goes on at
    the same time. ``strength`` scales slowness: "faint" costs less than a restart would, the others more.
    ``creeping`` lets the fault grow over minutes where that makes sense. ``variant`` picks one of the ways in which
    the fault shows, None leaves it to the seed. ``step_s`` is the nominal duration of a step, before noise and
    waits. ``habits`` lets the seed also choose what is normal for this job (checkpoints, packed data); without it
    the job does nothing but train. ``physics`` second: shapes and parameters are drawn by the seed
    (physics.py), in place of the simulator's own.
    """

    fault: str = "none"
    nodes: int = 8
    gpus: int = 8
    seed: int = 0
    minutes: float = 8.0
    step_s: float = 2.0
    interval_s: float = 1.0
    strength: str = "medium"
    creeping: bool = False
    variant: str | None = None
    background: str | None = None
    tensor_parallel: int | None = None
    habits: bool = True
    physics: str = "own"

    def __post_init__(self) -> None:
        limits: tuple[tuple[str, float, float, float], ...] = (
            ("nodes", self.nodes, 1, 4096),
            ("gpus", self.gpus, 1, 16),
            ("seed", self.seed, 0, 2**63),
            ("minutes", self.minutes, 0.5, 7 * 24 * 60),
            ("step_s", self.step_s, 0.02, 600),
            ("interval_s", self.interval_s, 0.1, 600),
        )
        for name, value, lowest, highest in limits:
            if not lowest <= value <= highest:
                raise WrongScenario(f"{name} is {value:g}; expected {lowest:g} to {highest:g}")
        if self.strength not in STRENGTHS:
            raise WrongScenario(f"strength is {self.strength!r}; expected one of {', '.join(STRENGTHS)}")
        if self.physics not in PHYSICS:
            raise WrongScenario(f"physics is {self.physics!r}; expected one of {', '.join(PHYSICS)}")
        if self.tensor_parallel is not None and self.gpus % self.tensor_parallel:
            raise WrongScenario(f"tensor_parallel is {self.tensor_parallel}; it must divide the {self.gpus} GPUs")
        if self.duration_s < 10 * self.interval_s:
            raise WrongScenario(
                f"minutes is {self.minutes:g}: fewer than 10 rows of {self.interval_s:g} s; ask for more"
            )
        cells = self.duration_s / min(self.step_s, self.interval_s) * self.nodes * self.gpus
        if cells > MAXIMUM_CELLS:
            raise WrongScenario(
                f"{cells:.2g} cells do not fit into memory; fewer nodes, fewer minutes or longer steps do"
            )

    @property
    def duration_s(self) -> float:
        """Length of the trace in seconds."""
        return self.minutes * 60.0
