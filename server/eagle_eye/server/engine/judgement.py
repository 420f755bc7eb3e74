"""What the engine says of one job at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from eagle_eye.detectors.types import Verdict
from eagle_eye.schema.action import MemberRank
from eagle_eye.server.engine.checkpoints import NOTHING_REPORTED, Checkpoints
from eagle_eye.server.engine.scheduler_contact import NO_SCHEDULER, SchedulerContact


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the detectors said of one job at one moment.

    ``blind`` maps a detector that could not tell to the reason. ``state`` is the scheduler's word on the job,
    "running" where nobody said. ``heard`` of ``members`` nodes were heard lately: coverage. ``stepping`` says
    whether this attempt has made a step yet, ``advanced_s`` when the last one finished. ``crashed``: its scheduler
    says that it failed, which nobody wanted. ``hearing`` is when its scheduler was heard, ``awaiting`` whether a
    verdict, or what follows from one, waits for that. ``ends_s`` is when its time limit ends it, None where nobody
    said. ``owner`` is the user whose job it is, "" where nobody said. ``gpu_models`` are NVML's names of the GPUs that
    the job has on a node, by node; a node of which none is known is missing. ``checkpoints`` is how those in memory
    stand. ``pace_left_ratio`` is what is left of the job's pace without one of its nodes, whose place no spare takes;
    None: a spare takes it, or nobody said.
    """

    job: str
    attempt: int
    now_s: float
    verdicts: tuple[Verdict, ...]
    blind: dict[str, str] = field(default_factory=dict)
    state: str = "running"
    restart_owner: str = ""
    members: int = 0
    heard: int = 0
    stepping: bool = False
    advanced_s: float = 0.0
    ranks: tuple[MemberRank, ...] = ()
    watching_since_s: float = 0.0
    crashed: bool = False
    hearing: SchedulerContact = NO_SCHEDULER
    awaiting: bool = False
    ends_s: float | None = None
    owner: str = ""
    gpu_models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    checkpoints: Checkpoints = NOTHING_REPORTED
    pace_left_ratio: float | None = None

    @property
    def blindness(self) -> str:
        """Why the server cannot judge the job, "" when it can."""
        if 2 * self.heard < self.members:
            return f"{self.heard} of the job's {self.members} nodes are heard"
        return ""
