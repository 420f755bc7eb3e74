"""The engine's result for one job at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from eagle_eye.detectors.types import Verdict
from eagle_eye.schema.action import MemberRank
from eagle_eye.server.engine.checkpoints import NOTHING_REPORTED, AttemptCheckpoints
from eagle_eye.server.engine.scheduler_contact import NO_SCHEDULER, SchedulerContact


@dataclass(frozen=True, slots=True)
class Judgement:
    """The detectors' results for one job at one moment.

    ``blind`` maps a blind detector to the reason. ``state`` is the scheduler's state of the job, "running" if not
    reported. ``heard`` of ``members`` nodes were heard recently: coverage. ``stepping`` is True once this attempt has
    made a step, ``advanced_s`` is when the last one finished. ``crashed``: its scheduler reports a failure that was not
    requested. ``hearing`` is when its scheduler was heard, ``awaiting`` whether a verdict, or its consequence, waits
    for that. ``ends_s`` is when its time limit ends it, None if not reported. ``owner`` is the job's user, "" if not
    reported. ``gpu_models`` are the NVML names of the job's GPUs by node; nodes without a known name are missing.
    ``checkpoints`` is the state of those in memory. ``pace_left_ratio`` is the remaining share of the job's pace
    without one of its nodes, if no spare replaces it; None: a spare does, or not reported. ``log`` says that no step is
    read in the job's log, which goes on; "" if it is read, or not known.
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
    checkpoints: AttemptCheckpoints = NOTHING_REPORTED
    pace_left_ratio: float | None = None
    log: str = ""

    @property
    def blindness(self) -> str:
        """Why the server cannot judge the job, "" if it can."""
        if 2 * self.heard < self.members:
            return f"{self.heard} of the job's {self.members} nodes are heard"
        return ""
