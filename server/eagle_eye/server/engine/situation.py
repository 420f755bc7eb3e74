"""What policy may know besides the incident, and what it counts in it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from eagle_eye.schema.action import MemberRank, ResumeFrom
from eagle_eye.server.engine.checkpoints import NOTHING_REPORTED, SPOILING_FAULTS, Checkpoints
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


@dataclass(frozen=True, slots=True)
class Situation:
    """What policy may know besides the incident.

    ``actions`` are those of the policy's window, in any order; ``fleet_size`` how many vouched nodes were heard;
    ``members`` how many the job has; ``blind`` why the server cannot judge, "" when it can. ``restart_owner`` is the
    job's own word. ``ranks`` is the job's membership. ``standing`` holds the nodes that are not in service,
    ``neighbours`` the other running jobs on the nodes that incidents accuse. ``crashed``: the scheduler says that the
    job failed. ``hearing`` is when its scheduler was heard, ``ends_s`` when its time limit ends it (None: not known).
    ``incidents`` are the job's open ones. ``gpu_models`` are NVML's names of the GPUs that the job has on a node, by
    node; a node of which none is known is missing. ``checkpoints`` is how the job's checkpoints in memory stand.
    ``pace_left_ratio`` is what is left of its pace without one of its nodes, whose place no spare takes (None: one
    takes it, or nobody said).
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
    checkpoints: Checkpoints = NOTHING_REPORTED
    pace_left_ratio: float | None = None


def counted(situation: Situation, mode: Mode) -> list[Action]:
    """Return the actions of the window that count against budgets, oldest first.

    What was only kept in observe mode counts where the mode is observe, so that the ledger there is what acting would
    have been; it takes nothing from those that do act.
    """
    since_s = situation.now_s - situation.settings.window_s
    states = ASKED_STATES | {"would_act"} if mode == "observe" else ASKED_STATES
    return by_age(a for a in situation.actions if a.created_s >= since_s and a.state in states)


def by_age(actions: Iterable[Action]) -> list[Action]:
    """Return the actions oldest first, whatever order they came in."""
    return sorted(actions, key=lambda action: (action.created_s, action.id))


def own_actions(incident: Incident, situation: Situation) -> list[Action]:
    """Return what was asked for because of the incident in its attempt, oldest first, without preliminaries."""
    return by_age(
        action
        for action in situation.actions
        if action.incident_id == incident.id and action.attempt == incident.attempt and not action.preliminary
    )


def is_preliminary_of(action: Action, incident: Incident) -> bool:
    """Return whether the action is the checkpoint asked for before the incident's own action."""
    return action.preliminary and action.incident_id == incident.id and action.attempt == incident.attempt


def resume_from(incident: Incident, situation: Situation, leaving: Sequence[str]) -> ResumeFrom | None:
    """Return where the job goes on once these nodes have left, None: not known, or not to be trusted.

    After the onset of a fault of numbers a checkpoint may hold the damage.
    """
    before_s = incident.onset_s if incident.fault in SPOILING_FAULTS else math.inf
    return situation.checkpoints.resume_from(len(situation.ranks), leaving, before_s)


def terms(incident: Incident, situation: Situation) -> Terms:
    """Return what holds for the incident's job."""
    return situation.settings.for_job(incident.job)
