"""Which traces are simulated: tuning and reporting cases with disjoint seeds, drawn once from a plan's few numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from benchmarks.detection.mix import draw
from eagle_eye.simulator.simulate import ENDING

# The first seed of each, reported by physics; a plan never has so many cases.
REPORT_SEEDS = {"own": 70_000_000, "second": 80_000_000}
TUNING_SEED = 9_000_000
FAULT_MINUTES = 10.0  # onset at a third to a half: the fault then lasts longer than Minder's four minutes
FAULT_NODES = (4, 8, 8, 16, 16, 32)
STEPS_S = (1.0, 2.0, 2.0, 5.0, 10.0)
STRENGTHS = ("weak", "medium", "medium", "strong")
CREEPING_SHARE = 0.15
BACKGROUND_SHARE = 0.10  # of fault traces in which something harmless goes on as well
# What jobs of the second physics are like, drawn evenly in the logarithm: nodes 2 to 64, up to quiet_nodes where
# nothing is wrong; steps from small models' to the 46 s of a public timeline and beyond.
SECOND_NODES, SECOND_GPUS, SECOND_STEP_S = (2.0, 64.0), (4, 8), (0.3, 60.0)
SECOND_INTERVALS_S = (1.0, 2.0, 3.0, 5.0, 10.0, 15.0)
SECOND_STEPS, SECOND_ROWS = 60, 900  # a trace has so many steps at least, and no more rows


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
    physics: str = "own"

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
    physics: str = "own"
    first_seed: int | None = None  # of the reported cases

    def digest(self) -> str:
        """Return a short name that changes with the plan."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:12]

    def reporting(self) -> list[Case]:
        """Return the cases that are reported."""
        first_seed = REPORT_SEEDS[self.physics] if self.first_seed is None else self.first_seed
        quiet = int(np.ceil(self.node_days / max(self.quiet_nodes * self.quiet_minutes / 1440.0, 1e-9)))
        if self.physics == "own":
            cases = self._cases("report", first_seed, self.faults, quiet)
        else:
            # Smaller jobs than quiet_nodes need more traces for the same node-days.
            whole = [_second(case) for case in self._cases("report", first_seed, self.faults, 8 * quiet)]
            cases = [case for case in whole if case.kind == "fault"]
            watched = 0.0
            for case in whole[len(cases) :]:
                if watched < self.node_days:
                    cases.append(case)
                    watched += case.node_days
        # Mixed, so that a run that was interrupted is still a sample of everything.
        return [cases[i] for i in np.random.default_rng(first_seed).permutation(len(cases))]

    def tuning(self) -> list[Case]:
        """Return the cases on which baselines are fitted and tuned, and nothing is reported; of own physics always."""
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


def _second(case: Case) -> Case:
    """Return the case as a job of the second physics: its own size, steps and intervals."""
    rng = np.random.default_rng([case.seed, 2])

    def log(low: float, high: float) -> float:
        return float(low * (high / low) ** rng.random())

    least, most = SECOND_NODES
    nodes = round(log(least, most if case.kind == "fault" else max(most, case.nodes)))
    step_s = log(*SECOND_STEP_S)
    minutes = max(case.minutes, SECOND_STEPS * step_s / 60.0)
    lowest_s = max(case.interval_s, 60.0 * minutes / SECOND_ROWS) if case.kind == "fault" else case.interval_s
    intervals_s = [interval_s for interval_s in SECOND_INTERVALS_S if interval_s >= lowest_s] or [15.0]
    return msgspec.structs.replace(
        case,
        nodes=nodes,
        gpus=int(rng.choice(SECOND_GPUS)),
        step_s=round(step_s, 3),
        minutes=round(minutes, 2),
        interval_s=float(rng.choice(intervals_s)),
        physics="second",
    )
