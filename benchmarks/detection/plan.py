"""Which traces are simulated: tuning and reporting cases with disjoint seeds, drawn once from a plan's few numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from benchmarks.detection.mix import draw
from eagle_eye.simulator.simulate import ENDING

REPORT_SEED, TUNING_SEED = 70_000_000, 9_000_000  # the first seed of either; a plan never has so many cases
FAULT_MINUTES = 10.0  # onset at a third to a half: the fault then lasts longer than Minder's four minutes
FAULT_NODES = (4, 8, 8, 16, 16, 32)
STEPS_S = (1.0, 2.0, 2.0, 5.0, 10.0)
STRENGTHS = ("weak", "medium", "medium", "strong")
CREEPING_SHARE = 0.15
BACKGROUND_SHARE = 0.10  # of fault traces in which something harmless goes on as well


class Case(msgspec.Struct, frozen=True):
    """One trace to simulate; ``kind`` is fault, healthy or guilty (looks guilty, is not)."""

    key: str
    kind: str
    fault: str
    seed: int
    nodes: int
    gpus: int
    minutes: float
    step_s: float
    interval_s: float
    strength: str
    creeping: bool
    background: str | None

    @property
    def node_days(self) -> float:
        """How long how many nodes are watched."""
        return self.nodes * self.minutes / 1440.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a run consists of. Two runs of one plan judge the same traces."""

    faults: int
    node_days: float  # of traces in which nothing is wrong
    profiles: Sequence[str]
    situations: Sequence[str]  # that look guilty
    tuning_faults: int
    tuning_quiet: int
    gpus: int
    quiet_nodes: int
    quiet_minutes: float
    quiet_interval_s: float

    def digest(self) -> str:
        """Return a short name that changes with the plan."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:12]

    def reporting(self) -> list[Case]:
        """Return the cases that are reported."""
        quiet = int(np.ceil(self.node_days / max(self.quiet_nodes * self.quiet_minutes / 1440.0, 1e-9)))
        cases = self._cases("report", REPORT_SEED, self.faults, quiet)
        # Mixed, so that a run that was interrupted is still a sample of everything.
        return [cases[i] for i in np.random.default_rng(REPORT_SEED).permutation(len(cases))]

    def tuning(self) -> list[Case]:
        """Return the cases on which baselines are fitted and tuned, and nothing is reported."""
        return self._cases("tuning", TUNING_SEED, self.tuning_faults, self.tuning_quiet)

    def seeds(self) -> dict[str, str]:
        """Return the ranges of seeds, for the reader."""
        ranges = {"report": self.reporting(), "tuning": self.tuning()}
        return {
            name: f"{min(case.seed for case in cases)}-{max(case.seed for case in cases)}"
            for name, cases in ranges.items()
            if cases
        }

    def _cases(self, name: str, first_seed: int, faults: int, quiet: int) -> list[Case]:
        rng = np.random.default_rng(first_seed)
        cases = [
            Case(
                key=f"{name}-fault-{number:05d}",
                kind="fault",
                fault=fault,
                seed=first_seed + number,
                nodes=int(rng.choice(FAULT_NODES)),
                gpus=self.gpus,
                minutes=FAULT_MINUTES,
                step_s=float(rng.choice(STEPS_S)),
                interval_s=1.0,
                strength=str(rng.choice(STRENGTHS)),
                creeping=bool(rng.random() < CREEPING_SHARE),
                background=self._situation(rng, beside=True) if rng.random() < BACKGROUND_SHARE else None,
            )
            for number, fault in enumerate(draw(faults, rng))
        ]
        for number in range(quiet):
            situation = self._situation(rng) if number % 2 else None
            cases.append(
                Case(
                    key=f"{name}-quiet-{number:05d}",
                    kind="guilty" if situation else "healthy",
                    fault=situation or "none",
                    seed=first_seed + faults + number,
                    nodes=self.quiet_nodes,
                    gpus=self.gpus,
                    minutes=self.quiet_minutes,
                    step_s=float(rng.choice(STEPS_S)),
                    interval_s=self.quiet_interval_s,
                    strength="medium",
                    creeping=False,
                    background=None,
                )
            )
        return cases

    def _situation(self, rng: np.random.Generator, beside: bool = False) -> str | None:
        """Return a situation; ``beside`` a fault none that ends or restarts the job: that would tell of two at once."""
        names = [name for name in self.situations if not beside or name not in ENDING]
        return str(rng.choice(names)) if names else None
