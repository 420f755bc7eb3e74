"""Policy's input besides the incident, and what it counts in it. Pure."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from eagle_eye.schema.action import MemberRank, ResumeFrom
from eagle_eye.server.engine.checkpoints import NOTHING_REPORTED, SPOILING_FAULTS, AttemptCheckpoints
from eagle_eye.server.engine.job_terms import Terms
from eagle_eye.server.engine.modes import Mode
from eagle_eye.server.engine.scheduler_contact import NO_SCHEDULER, SchedulerContact
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import Action, Incident, Node

NODE_KINDS = frozenset({"exclude_node", "drain_node"})  # actions against one node
DISRUPTIVE_KINDS = frozenset({"exclude_node", "restart_job"})  # actions that stop a job
UNDER_WAY_STATES = frozenset({"awaiting", "requested", "accepted", "running"})
ASKED_STATES = UNDER_WAY_STATES | {"done"}
FRUITLESS_STATES = frozenset({"failed", "refused", "rejected", "expired"})


@dataclass(frozen=True)
class Situation:
    """Policy's input besides the incident.

    ``actions`` are those of the policy's window, in any order; ``fleet_size`` is how many vouched nodes were heard;
    ``members`` how many the job has; ``blind`` why the server cannot judge, "" if it can. ``restart_owner`` is as
    reported by the job. ``ranks`` is the job's membership. ``standing`` holds the nodes that are not in service,
    ``neighbours`` the other running jobs on the nodes that incidents accuse. ``crashed``: the scheduler reports that
    the job failed. ``hearing`` is when its scheduler was heard, ``ends_s`` when its time limit ends it (None: not
    known). ``incidents`` are the job's open ones. ``gpu_models`` are the NVML names of the job's GPUs by node; nodes
    without a known name are missing. ``checkpoints`` is the state of the job's checkpoints in memory.
    ``pace_left_ratio`` is the remaining share of its pace without one of its nodes, if no spare replaces it (None: one
    does, or not reported). ``elsewhere`` are other jobs' open incidents, ``switch_of`` the switches of the nodes that
    they and this job's accuse, as far as they are known.
    """

    settings: PolicySettings
    actions: Sequence[Action]
    fleet_size: int
    members: int
    job_state: str
    restart_owner: str
    blind: str
    now_s: float
    ranks: Sequence[MemberRank] = ()
    standing: Mapping[str, Node] = field(default_factory=dict)
    neighbours: Mapping[str, Sequence[str]] = field(default_factory=dict)
    crashed: bool = False
    hearing: SchedulerContact = NO_SCHEDULER
    ends_s: float | None = None
    incidents: Sequence[Incident] = ()
    gpu_models: Mapping[str, Sequence[str]] = field(default_factory=dict)
    checkpoints: AttemptCheckpoints = NOTHING_REPORTED
    pace_left_ratio: float | None = None
    elsewhere: Sequence[Incident] = ()
    switch_of: Mapping[str, str] = field(default_factory=dict)

    # Once for each situation: most rules ask, and there may be thousands of actions.

    @cached_property
    def oldest_first(self) -> Sequence[Action]:
        """The actions, oldest first."""
        return by_age(self.actions)

    @cached_property
    def counted(self) -> Sequence[Action]:
        """The actions of the window that were asked for, oldest first."""
        return self._within_window(ASKED_STATES)

    @cached_property
    def counted_observing(self) -> Sequence[Action]:
        """Likewise, with those that would have been asked for."""
        return self._within_window(ASKED_STATES | {"would_act"})

    def _within_window(self, states: Container[str]) -> Sequence[Action]:
        since_s = self.now_s - self.settings.window_s
        return [a for a in self.oldest_first if a.created_s >= since_s and a.state in states]


def outcome_words(action: Action) -> str:
    """Return how an action ended, for people."""
    if action.state == "expired":
        return f"action {action.id} expired: nobody approved it or took it up in time"
    verb = {"failed": "", "done": "is "}.get(action.state, "was ")
    return f"action {action.id} {verb}{action.state}"


def counted(situation: Situation, mode: Mode) -> Sequence[Action]:
    """Return the actions of the window that count against budgets, oldest first.

    Actions only recorded in observe mode count where the mode is observe, so that the budgets there are what acting
    would have made them; they do not count in other modes.
    """
    return situation.counted_observing if mode == "observe" else situation.counted


def by_age(actions: Iterable[Action]) -> list[Action]:
    """Return the actions oldest first, whatever order they came in."""
    return sorted(actions, key=lambda action: (action.created_s, action.id))


def own_actions(incident: Incident, situation: Situation) -> list[Action]:
    """Return what was requested for the incident in its attempt, oldest first, without preliminaries."""
    return [
        action
        for action in situation.oldest_first
        if action.incident_id == incident.id and action.attempt == incident.attempt and not action.preliminary
    ]


def is_preliminary_of(action: Action, incident: Incident) -> bool:
    """Return whether the action is the checkpoint requested before the incident's own action."""
    return action.preliminary and action.incident_id == incident.id and action.attempt == incident.attempt


def resume_from(incident: Incident, situation: Situation, removal: Sequence[str]) -> ResumeFrom | None:
    """Return where the job resumes once these nodes have left, None: not known, or not to be trusted.

    After the onset of a fault of numbers a checkpoint may hold the damage.
    """
    before_s = incident.onset_s if incident.fault in SPOILING_FAULTS else math.inf
    return situation.checkpoints.resume_from(len(situation.ranks), removal, before_s)


def terms(incident: Incident, situation: Situation) -> Terms:
    """Return the terms of the incident's job."""
    return situation.settings.for_job(incident.job)
