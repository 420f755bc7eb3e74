"""Policy: what may be asked for because of an incident, and if nothing, why not. Pure.

``decide`` walks literal lists of rules. A rule returns the reason for which the action must wait, or None. Every
hold carries its reason to the incident, so that an operator reads why nothing was done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from eagle_eye.detectors.faults import BY_NAME, Repair
from eagle_eye.schema.action import ActionKind
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.records import Action, Incident

# Who restarts a job when the job did not say: we ask for it.
OUR_RESTART_OWNERS = frozenset({"", "eagle-eye"})
ASKED_STATES = frozenset({"awaiting", "requested", "accepted", "running", "done", "would_act"})
UNDER_WAY_STATES = frozenset({"awaiting", "requested", "accepted", "running"})
INDEPENDENT_KINDS_MIN = 2
NODE_KINDS = frozenset({"exclude_node", "drain_node"})  # actions against one node


@dataclass(frozen=True, slots=True)
class Situation:
    """What policy may know besides the incident.

    ``actions`` are those of the policy's window, newest last; ``fleet_size`` how
    many nodes were heard of at all; ``members`` how many the job has; ``blind`` why the server cannot judge, ""
    when it can.
    """

    settings: PolicySettings
    actions: Sequence[Action]
    fleet_size: int
    members: int
    job_state: str
    restart_owner: str
    blind: str
    now_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What to ask for. ``hold`` is the reason for which it waits, "" when it need not.

    A kind of "notify" or "none" is never asked of a subscriber: the incident itself tells.
    """

    kind: ActionKind
    exclude: tuple[str, ...] = ()
    restart: bool = False
    hold: str = ""
    repair: Repair = "none"


def decide(incident: Incident, situation: Situation) -> Decision:
    """Return what to ask for because of the incident."""
    fault = BY_NAME[incident.fault]
    kind, why = _kind(incident, situation)
    if kind in ("notify", "none"):
        return Decision(kind, hold=why, repair=fault.repair)
    exclude = (incident.node,) if kind in NODE_KINDS and incident.node is not None else ()
    hold = next((reason for rule in _HOLDS if (reason := rule(incident, kind, exclude, situation))), "")
    return Decision(
        kind=kind,
        exclude=exclude,
        restart=kind in ("exclude_node", "restart_job") and situation.restart_owner in OUR_RESTART_OWNERS,
        hold=hold,
        repair=fault.repair,
    )


def _kind(incident: Incident, situation: Situation) -> tuple[ActionKind, str]:
    """Return the action for the incident's fault as it presents itself, and why it is less than usual."""
    settings = situation.settings
    kind = _asked_kind(incident)
    if kind in ("notify", "none"):
        return kind, ""
    if kind in NODE_KINDS and incident.node is None:
        return "notify", f"{len(incident.nodes)} nodes are concerned and no single one is accused"
    if kind == "exclude_node" and not incident.fact and len(incident.kinds) < INDEPENDENT_KINDS_MIN:
        return (
            "notify",
            f"one kind of evidence only ({', '.join(incident.kinds)}): not enough to exclude a node",
        )
    doubtful = not incident.fact and incident.confidence < settings.confidence_min
    if doubtful and not (incident.fault == "hang" and incident.node is None):
        return "notify", f"confidence {incident.confidence:.2f} is below {settings.confidence_min:.2f}"
    slow = BY_NAME[incident.fault].trouble == "slow" and kind == "exclude_node"
    if slow and incident.slowdown_ratio <= 0:
        return "notify", "how much the job is slower for it is not known: nothing says that a restart would pay"
    if slow:
        gain_s = settings.remaining_s * incident.slowdown_ratio / (1 + incident.slowdown_ratio)
        if gain_s <= settings.restart_cost_s:
            return "notify", (
                f"a restart costs {settings.restart_cost_s:.0f} s and would save {gain_s:.0f} s"
                f" of the remaining {settings.remaining_s:.0f} s"
            )
    if kind != "restart_job" or incident.application:
        return kind, ""
    if incident.node is not None and _restarted_for(incident, situation):
        return "exclude_node", ""
    return kind, ""


def _asked_kind(incident: Incident) -> ActionKind:
    """Return what the incident's presentation asks for, else what its fault does."""
    if incident.asks:
        return cast("ActionKind", incident.asks)  # a verdict's own word, which is typed
    if incident.fault == "hang" and incident.node is None:
        return "restart_job"
    return BY_NAME[incident.fault].action


def _restarted_for(incident: Incident, situation: Situation) -> bool:
    """Whether the job was lately restarted because of this very node."""
    return any(
        action.kind == "restart_job"
        and action.job == incident.job
        and action.attempt < incident.attempt
        and action.state in ASKED_STATES
        and situation.now_s - action.created_s <= situation.settings.repeat_window_s
        and action.node == incident.node
        for action in situation.actions
    )


def _hold_blind(_i: Incident, _k: ActionKind, _e: tuple[str, ...], situation: Situation) -> str | None:
    return f"no action while blind: {situation.blind}" if situation.blind else None


def _hold_job_not_running(_i: Incident, _k: ActionKind, _e: tuple[str, ...], situation: Situation) -> str | None:
    if situation.job_state != "running":
        return f"the job is {situation.job_state}: it was meant to stop"
    return None


def _hold_under_way(incident: Incident, _k: ActionKind, _e: tuple[str, ...], situation: Situation) -> str | None:
    for action in situation.actions:
        if action.job == incident.job and action.attempt == incident.attempt:
            if action.state in UNDER_WAY_STATES or action.state == "done":
                return f"action {action.id} for attempt {incident.attempt} is {action.state} already"
            if action.incident_id == incident.id:
                return f"action {action.id} for this incident ended as {action.state}"
    return None


def _hold_last_node(_i: Incident, kind: ActionKind, exclude: tuple[str, ...], situation: Situation) -> str | None:
    if kind == "exclude_node" and situation.members <= len(exclude):
        return f"the job has {situation.members} nodes: excluding {len(exclude)} would leave none"
    return None


def _hold_job_budget(incident: Incident, kind: ActionKind, _e: tuple[str, ...], situation: Situation) -> str | None:
    settings = situation.settings
    mine = [a for a in _asked(situation) if a.job == incident.job]
    within = f"within {settings.window_s:.0f} s; the limit is"
    excluded, restarts = sum(len(a.exclude) for a in mine), sum(a.restart for a in mine)
    if kind == "exclude_node" and excluded >= settings.exclusions_per_job:
        return f"{excluded} nodes of this job were excluded {within} {settings.exclusions_per_job}"
    if restarts >= settings.restarts_per_job:
        return f"this job was restarted {restarts} times {within} {settings.restarts_per_job}"
    return None


def _hold_fleet_budget(_i: Incident, kind: ActionKind, exclude: tuple[str, ...], situation: Situation) -> str | None:
    if kind != "exclude_node":
        return None
    settings = situation.settings
    limit = max(settings.exclusions_fleet_floor, int(settings.exclusions_fleet_ratio * situation.fleet_size))
    count = sum(len(a.exclude) for a in _asked(situation))
    if count + len(exclude) > limit:
        within = f"within {settings.window_s:.0f} s"
        return f"{count} nodes were excluded {within}; the limit for {situation.fleet_size} nodes is {limit}"
    return None


def _asked(situation: Situation) -> list[Action]:
    since_s = situation.now_s - situation.settings.window_s
    return [a for a in situation.actions if a.created_s >= since_s and a.state in ASKED_STATES]


_HOLDS = (
    _hold_blind,
    _hold_job_not_running,
    _hold_under_way,
    _hold_last_node,
    _hold_job_budget,
    _hold_fleet_budget,
)
