"""The engine's result for one job at one moment, its checkpoints in memory, and when its scheduler was heard. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.types import Floats, Verdict
from eagle_eye.schema.action import MemberRank, ResumeFrom
from eagle_eye.server.model.records import Job

REPORTED = "memory_checkpoint_bytes"  # reported by every node whose ranks keep checkpoints in memory
_STEP, _PERSISTED = "memory_checkpoint_step", "memory_checkpoint_persisted_step"
_AGE = "memory_checkpoint_age_steps"
_COPIES, _WANTED = "memory_checkpoint_copies", "memory_checkpoint_copies_wanted"
_NUMBERS = frozenset({_STEP, _AGE, _COPIES, _WANTED})
# Complete steps before the newest of which a node holds all its copies; with how long ago it captured them.
_OLDER_STEPS = (
    "memory_checkpoint_previous_step",
    "memory_checkpoint_second_oldest_step",
    "memory_checkpoint_oldest_step",
)
_OLDER_AGES = (
    "memory_checkpoint_previous_age_seconds",
    "memory_checkpoint_second_oldest_age_seconds",
    "memory_checkpoint_oldest_age_seconds",
)
_TIME_S, _THIN_SINCE_S = "time_s", "thin_since_s"  # kept with them
STALE_S = 30.0
STEPS_KEPT = 256  # steps with a known first report: four minutes at one per second
OLDER_MAX = 8  # complete steps before the newest: nodes report three each, not all at the same time
# A checkpoint after the onset of these faults may hold the damage; orchestrators distrust it likewise.
SPOILING_FAULTS = frozenset({"loss_not_finite", "loss_divergence", "silent_data_corruption"})

Reported = tuple[int, float]  # a step, and when it was first reported


@dataclass(frozen=True, slots=True)
class StepInMemory:
    """A complete step in memory, captured at ``captured_s`` or before.

    ``nodes`` have copies of it; ``lacking`` may not have all that they should, or are silent.
    """

    step: int
    captured_s: float
    nodes: tuple[str, ...]
    lacking: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AttemptCheckpoints:
    """The state of an attempt's checkpoints, by its nodes' latest reports.

    ``step`` is the newest that is complete in memory (None: none is known), ``since_s`` when it was first reported,
    ``at_risk_steps`` the steps that ranks have finished since, ``step_s`` the duration of a step (None: not known).
    ``copies`` of ``copies_wanted`` shards are held, by ``nodes``; ``lacking`` have fewer than they should, or are
    silent; ``thin_since_s`` is since when a reporting node has had fewer, None: none has. ``older`` are earlier steps
    held in memory, the newest first. ``persisted`` are steps on storage, each with the time of its first report, the
    newest last.
    """

    step: int | None = None
    since_s: float = math.nan
    at_risk_steps: float = 0.0
    copies: int = 0
    copies_wanted: int = 0
    nodes: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    thin_since_s: float | None = None
    persisted: tuple[Reported, ...] = ()
    step_s: float | None = None
    older: tuple[StepInMemory, ...] = ()

    def resume_from(self, ranks: int, removal: Sequence[str] = (), before_s: float = math.inf) -> ResumeFrom | None:
        """Return where a job of ``ranks`` ranks resumes once the nodes ``removal`` have left, None: not known.

        It is the newest step, in memory or on storage. Memory qualifies only if every shard is certain to keep a copy,
        and nothing that was captured, or first reported, after ``before_s``, since it may hold a fault's damage.
        """
        replicas = self.copies_wanted // ranks if ranks else 1
        # Each shard is held by this many nodes: if fewer of them lack copies, or leave, one remains that has it.
        kept = (
            one
            for one in (*self._newest(), *self.older)
            if one.captured_s < before_s and len({*one.lacking, *removal}) < replicas
        )
        in_memory = next(kept, None)
        on_storage = next((step for step, reported_s in reversed(self.persisted) if reported_s < before_s), None)
        if in_memory is not None and in_memory.step >= (on_storage or 0):
            return ResumeFrom(in_memory.step, "memory", [node for node in in_memory.nodes if node not in removal])
        return None if on_storage is None else ResumeFrom(on_storage, "storage", [])

    def _newest(self) -> tuple[StepInMemory, ...]:
        if self.step is None:
            return ()
        return (StepInMemory(self.step, self.since_s, self.nodes, self.lacking),)


NOTHING_REPORTED = AttemptCheckpoints()


class CheckpointLog:
    """Records nodes' reports row by row; ``stand`` returns the resulting state."""

    def __init__(self) -> None:
        self._whole: Reported = (-1, math.nan)
        self._persisted: deque[Reported] = deque(maxlen=STEPS_KEPT)
        self._of_node = {name: np.empty(0) for name in (_TIME_S, _STEP, _AGE, _COPIES, _WANTED, _THIN_SINCE_S)}
        self._older = np.empty((2, len(_OLDER_STEPS), 0))  # steps, and when they were captured

    def record_rows(
        self, time_s: float, metrics: Sequence[str], columns: slice | NDArray[np.intp], values: Floats
    ) -> None:
        """Record rows of nodes, by their columns; ``values`` is (metrics, columns)."""
        places = np.arange(columns.start, columns.stop) if isinstance(columns, slice) else columns
        self._fit(int(places.max(initial=-1)) + 1)
        of_node = self._of_node
        of_node[_TIME_S][places] = np.fmax(of_node[_TIME_S][places], time_s)
        for name, row in zip(metrics, values, strict=True):
            if name in _NUMBERS:
                of_node[name][places] = np.where(np.isfinite(row), row, of_node[name][places])
            elif name == _PERSISTED and np.isfinite(row).any():
                step = int(row[np.isfinite(row)].max())
                if not self._persisted or step > self._persisted[-1][0]:
                    self._persisted.append((step, time_s))
        self._take_older(time_s, places, dict(zip(metrics, values, strict=True)))
        self._note_whole(of_node[_STEP][places], time_s)
        thin, since_s = of_node[_COPIES][places] < of_node[_WANTED][places], of_node[_THIN_SINCE_S][places]
        of_node[_THIN_SINCE_S][places] = np.where(thin, np.fmin(since_s, time_s), np.nan)

    def stand(self, nodes: Sequence[str], step_s: float | None = None) -> AttemptCheckpoints:
        """Return the state of the checkpoints; ``nodes`` are the columns' names."""
        if not len(self._of_node[_TIME_S]):
            return NOTHING_REPORTED
        newest_s = float(np.nanmax(self._of_node[_TIME_S]))
        reported = self._of_node[_TIME_S] >= newest_s - STALE_S  # a silent node's last report is not current
        of_node = {name: np.where(reported, kept, np.nan) for name, kept in self._of_node.items()}
        wanted = self._of_node[_WANTED]  # including silent nodes: each shard has as many copies as before
        step = int(np.nanmax(of_node[_STEP], initial=-1.0))
        if step < self._whole[0]:  # the program restarted from an earlier step
            self._whole = (step, newest_s)
        thin_since_s = float(np.nanmin(of_node[_THIN_SINCE_S], initial=math.inf))
        return AttemptCheckpoints(
            step=step if step >= 0 else None,
            since_s=self._whole[1],
            at_risk_steps=float(np.nanmax(of_node[_AGE], initial=0.0)),
            copies=int(np.nansum(of_node[_COPIES])),
            copies_wanted=int(np.nansum(wanted)),
            nodes=tuple(node for node, many in zip(nodes, of_node[_COPIES], strict=False) if many > 0),
            lacking=tuple(compress(nodes, (wanted > 0) & ~(of_node[_COPIES] >= wanted))),
            thin_since_s=thin_since_s if math.isfinite(thin_since_s) else None,
            persisted=tuple(self._persisted),
            step_s=step_s,
            older=_older(of_node, np.where(reported, self._older, np.nan), nodes, wanted > 0, step),
        )

    def _take_older(self, time_s: float, places: NDArray[np.intp], rows: Mapping[str, Floats]) -> None:
        """Replace the older steps of a node that reports on its checkpoints: it holds those reported, and no others."""
        nothing = np.full(len(places), np.nan)
        step = np.array([rows.get(name, nothing) for name in _OLDER_STEPS])
        age_s = np.array([rows.get(name, nothing) for name in _OLDER_AGES])
        known = (step >= 0) & (step < np.inf) & (age_s >= 0) & (age_s < np.inf)
        found = np.where(known, (step, time_s - age_s), np.nan)
        self._older[:, :, places] = np.where(np.isfinite(rows[REPORTED]), found, self._older[:, :, places])

    def _note_whole(self, steps: Floats, time_s: float) -> None:
        step = int(np.nanmax(steps, initial=-1.0))
        if step > self._whole[0]:
            self._whole = (step, time_s)

    def _fit(self, width: int) -> None:
        more = width - len(self._of_node[_TIME_S])
        if more > 0:
            nothing = np.full(more, np.nan)
            self._of_node = {name: np.concatenate((kept, nothing)) for name, kept in self._of_node.items()}
            self._older = np.concatenate((self._older, np.full((*self._older.shape[:2], more), np.nan)), axis=2)


def _older(
    of_node: Mapping[str, Floats], older: Floats, nodes: Sequence[str], members: NDArray[np.bool_], newest: int
) -> tuple[StepInMemory, ...]:
    """Return the steps before the newest that nodes hold, the newest first; of many those that most nodes hold."""
    steps, captured_s = older
    reported, times = np.unique(steps[steps < newest], return_counts=True)
    found = []
    for step in reported[np.argsort(times)[-OLDER_MAX:]]:
        at_s = np.fmax.reduce(np.where(steps == step, captured_s, np.nan))
        # The newest step of a node heard a moment earlier is another one's previous step.
        its_newest = (of_node[_STEP] == step) & (of_node[_COPIES] >= of_node[_WANTED])
        has = members & (np.isfinite(at_s) | its_newest)
        lacking = tuple(compress(nodes, members & ~has))
        found.append(StepInMemory(int(step), float(np.nanmax(at_s)), tuple(compress(nodes, has)), lacking))
    return tuple(sorted(found, key=lambda kept: kept.step, reverse=True))


# When schedulers were last heard, and which faults have to wait for them.
#
# A scheduler that ends a job kills its ranks, and agents see them die before the scheduler has been asked for the
# reason. So faults that a scheduler may have caused are not reported before it was asked again. Hardware's own reports
# do not wait.

MARGIN_S = 2.0  # possible offset between nodes' clocks and ours, and so of a fault's onset
CAUSED_BY_SCHEDULERS = frozenset({"process_crash"})  # facts that are no proof against hardware
FAILED_S = 60.0  # how long a job that ended by itself is still judged: its cause may only be reported now


class Claim(Protocol):
    """A verdict or an incident."""

    @property
    def fault(self) -> str:
        """The fault's name."""
        ...

    @property
    def fact(self) -> bool:
        """Whether its evidence alone is proof."""
        ...

    @property
    def onset_s(self) -> float:
        """When it began."""
        ...


@dataclass(frozen=True, slots=True)
class SchedulerReports:
    """What one scheduler reported. ``heard_s`` is when it last answered; None: never.

    ``jobs`` are those of our jobs that it covers. ``patience_s`` is how long a fault waits for it.
    """

    source: str
    heard_s: float | None
    jobs: frozenset[str] = field(default_factory=frozenset)
    patience_s: float = 30.0


@dataclass(frozen=True, slots=True)
class SchedulerContact:
    """When the scheduler of one job was last heard; ``source`` "": the job has none, and nothing waits."""

    source: str = ""
    heard_s: float | None = None
    patience_s: float = 0.0

    def covers(self, onset_s: float) -> bool:
        """Whether the scheduler has reported since ``onset_s``: what it did to the job is known."""
        return not self.source or (self.heard_s is not None and self.heard_s >= onset_s + MARGIN_S)

    def is_awaited(self, claim: Claim, now_s: float) -> bool:
        """Whether the claim must not be reported yet."""
        waits = not is_proof(claim) and not self.covers(claim.onset_s)
        return waits and now_s - claim.onset_s < self.patience_s

    def can_answer(self, claim: Claim, now_s: float) -> bool:
        """Whether an answer requested now would be late enough to cover the claim."""
        return bool(self.source) and now_s >= claim.onset_s + MARGIN_S


NO_SCHEDULER = SchedulerContact()


def is_proof(claim: Claim) -> bool:
    """Return whether hardware or a kernel reported it: no scheduler can have caused it."""
    return claim.fact and claim.fault not in CAUSED_BY_SCHEDULERS


def hearing(job: str, started_s: float, words: Collection[SchedulerReports]) -> SchedulerContact:
    """Return when the job's scheduler was heard.

    A job that began after the last report of a scheduler may be its: it counts as such until the next report.
    """
    for word in words:
        if job in word.jobs:
            return SchedulerContact(word.source, word.heard_s, word.patience_s)
    for word in words:
        if word.heard_s is None or word.heard_s < started_s + MARGIN_S:
            return SchedulerContact(word.source, word.heard_s, word.patience_s)
    return NO_SCHEDULER


def failed_by_itself(job: Job) -> bool:
    """Return whether the job's scheduler reports that it failed, and no launcher that it is over."""
    return job.scheduled_state == "failed" and job.declared_state in ("", "running")


def since_s(job: Job | None) -> float:
    """Return since when the job is in its state; -inf if not reported."""
    return -math.inf if job is None else job.since_s if job.since_s is not None else job.updated_s


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
