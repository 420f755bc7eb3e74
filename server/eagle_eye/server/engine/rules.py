"""What policy knows besides the incident, how a rule rules, and the rules that choose the action. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, cast

from eagle_eye.detectors.faults import BY_NAME
from eagle_eye.schema.action import ActionKind, MemberRank, ResumeFrom
from eagle_eye.server.engine.judgement import (
    NO_SCHEDULER,
    NOTHING_REPORTED,
    SPOILING_FAULTS,
    AttemptCheckpoints,
    SchedulerContact,
)
from eagle_eye.server.engine.settings import (
    OUR_RESTART_OWNERS,
    STRENGTH,
    Floors,
    Mode,
    PolicySettings,
    Terms,
    groups_of,
)
from eagle_eye.server.model.records import Action, Incident, Node, Outcome

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


Values = Mapping[str, float | str | None]


@dataclass(frozen=True, slots=True)
class PlannedAction:
    """The planned action, as left by the rules so far.

    ``first`` is an action to request before it, None for none. ``notes`` are for whoever carries it out.
    """

    kind: ActionKind
    exclude: tuple[str, ...] = ()
    restart: bool = False
    first: ActionKind | None = None
    notes: tuple[str, ...] = ()

    @property
    def asks(self) -> bool:
        """Whether a subscriber is to be asked for anything."""
        return self.kind not in ("notify", "none")


@dataclass(frozen=True, slots=True)
class Ruling:
    """A rule's result: its outcome, the reason (a sentence with value, limit and remedy), and the plan if changed.

    A "hold" without a plan holds the action back; one with a plan reduces it.
    """

    outcome: Outcome
    reason: str = ""
    values: Values = field(default_factory=dict)
    plan: PlannedAction | None = None


class PolicyRule(NamedTuple):
    """A rule with its stable name, used in records, in the API, in policy cases and in docs/reference/policy.md."""

    name: str
    judge: Callable[[Incident, Situation, PlannedAction], Ruling]


NOT_APPLICABLE = Ruling("not_applicable")


def passed(values: Values, reason: str = "") -> Ruling:
    """Return that the rule does not object to the plan."""
    return Ruling("pass", reason, values)


def held(reason: str, values: Values) -> Ruling:
    """Return that the action is held back."""
    return Ruling("hold", reason, values)


def lowered(plan: PlannedAction, reason: str, values: Values) -> Ruling:
    """Return that the plan is reduced."""
    return Ruling("hold", reason, values, plan)


def changed(plan: PlannedAction, reason: str, values: Values) -> Ruling:
    """Return that the plan is changed."""
    return Ruling("changes", reason, values, plan)


INDEPENDENT_KINDS_MIN = 2
SLOW_BY = "compute_time"  # the one kind that suffices alone: it names the rank that the others wait for
CAUSELESS = "straggler"  # slow without a known reason: in a small job some rank always computes a little longer
DRAIN_CONFIDENCE_MIN = 0.6  # detectors' confidence for a rank that chance does not explain
SLOWDOWN_MIN = 0.01  # a smaller slowdown cannot be told from normal variation of a job's pace
TELL = PlannedAction("notify")


def asked_kind(incident: Incident) -> ActionKind:
    """Return the action asked for by this presentation of the incident, else the fault's own."""
    if incident.asks:
        return cast("ActionKind", incident.asks)  # from a verdict, which is typed
    if incident.fault == "hang" and incident.node is None:
        return "restart_job"
    return BY_NAME[incident.fault].action


def floors_for(incident: Incident, settings: PolicySettings, gpu_models: Mapping[str, Sequence[str]]) -> Floors:
    """Return the floors for the incident's nodes; ``gpu_models`` are as in Situation.

    Where the evidence asks for an action of its own, or the program is to blame, terms never increase the action.
    """
    nodes = [incident.node] if incident.node is not None else incident.nodes
    asked = asked_kind(incident)
    floors = settings.for_nodes(nodes, incident.fault, asked, gpu_models)
    capped = incident.application or asked != BY_NAME[incident.fault].action
    if capped and STRENGTH[floors.action] > STRENGTH[asked]:
        rest = {term: key for term, key in floors.where.items() if term != "action"}
        return replace(floors, action=asked, where=rest)
    return floors


def is_supported(incident: Incident, floors: Floors) -> bool:
    """Return whether the evidence suffices to act: the rules evidence and confidence pass."""
    return not (_lacks_kinds(incident, floors.action) or _lacks_confidence(incident, floors.confidence_min))


def _floors(incident: Incident, situation: Situation) -> Floors:
    return floors_for(incident, situation.settings, situation.gpu_models)


def _lacks_kinds(incident: Incident, kind: ActionKind) -> bool:
    return kind == "exclude_node" and not incident.fact and len(incident.kinds) < INDEPENDENT_KINDS_MIN


def _lacks_confidence(incident: Incident, confidence_min: float) -> bool:
    return not _needs_no_confidence(incident) and incident.confidence < confidence_min


def _needs_no_confidence(incident: Incident) -> bool:
    return incident.fact or (incident.fault == "hang" and incident.node is None)


def _node_terms(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    """Apply the operator's terms for these nodes; floors are checked by their own rules."""
    floors = _floors(incident, situation)
    if not floors.where:
        return NOT_APPLICABLE
    nodes = [incident.node] if incident.node is not None else incident.nodes
    models = sorted({name for node in nodes for name in situation.gpu_models.get(node, ())})
    reported = {term: f"{getattr(floors, term)} ({key})" for term, key in floors.where.items()}
    groups = {group for node in nodes for group in groups_of(node, situation.settings.node_groups)}
    kind = {"gpu_models": ", ".join(models) or "not known", "groups": ", ".join(sorted(groups))}
    values: Values = {**kind, **reported}
    if floors.action == plan.kind:
        return passed(values)
    why = (
        f"{floors.action} in place of {plan.kind} for {incident.fault} on {', '.join(nodes)} ({floors.where['action']})"
    )
    also = ", ".join(f"{term} {said}" for term, said in reported.items() if term != "action")
    why += f"; also {also}" if also else ""
    if floors.action == "notify":
        return lowered(TELL, f"reported only, {why}", values)
    return changed(PlannedAction(floors.action), why, values)


def _accused(incident: Incident, _: Situation, plan: PlannedAction) -> Ruling:
    if plan.kind not in NODE_KINDS:
        return NOT_APPLICABLE
    values: Values = {"node": incident.node, "nodes": float(len(incident.nodes))}
    if incident.node is None:
        return lowered(TELL, f"{len(incident.nodes)} nodes are concerned and no single one is accused", values)
    return passed(values)


def _drain_instead(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    """Drain instead of excluding what is slow by one strong kind of evidence; a check then decides."""
    slow = BY_NAME[incident.fault].trouble == "slow" and SLOW_BY in incident.kinds
    floors = _floors(incident, situation)
    if plan.kind != "exclude_node" or not slow or is_supported(incident, floors):
        return NOT_APPLICABLE
    lasted_s = situation.now_s - max(incident.onset_s, incident.since_s)
    values: Values = {
        "lasted_s": lasted_s,
        "drain_after_s": floors.drain_after_s,
        "slowdown_ratio": incident.slowdown_ratio,
        "drain_slowdown_min": floors.drain_slowdown_min,
        "confidence": incident.confidence,
    }
    costs = incident.slowdown_ratio >= floors.drain_slowdown_min > 0
    if lasted_s < floors.drain_after_s or not costs or incident.confidence < DRAIN_CONFIDENCE_MIN:
        return passed(values)
    why = (
        f"too little to exclude {incident.node} for, but it has lasted {lasted_s:.0f} s and costs"
        f" {100 * incident.slowdown_ratio:.0f}%: it leaves when the job restarts anyway, and a check settles it"
    )
    return changed(PlannedAction("drain_node"), why, values)


def _evidence(incident: Incident, _: Situation, plan: PlannedAction) -> Ruling:
    if plan.kind != "exclude_node":
        return NOT_APPLICABLE
    values: Values = {
        "kinds": ", ".join(incident.kinds),
        "kinds_min": INDEPENDENT_KINDS_MIN,
        "fact": str(incident.fact),
    }
    if _lacks_kinds(incident, plan.kind):
        why = f"one kind of evidence only ({', '.join(incident.kinds)}): not enough to exclude a node"
        return lowered(TELL, why, values)
    return passed(values)


def _confidence(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    floors = _floors(incident, situation)
    if _needs_no_confidence(incident) or (plan.kind, floors.action) == ("drain_node", "exclude_node"):
        return NOT_APPLICABLE
    least = floors.confidence_min
    values: Values = {"confidence": incident.confidence, "confidence_min": least}
    if _lacks_confidence(incident, least):
        key = floors.where.get("confidence_min", "policy.confidence_min")
        why = f"confidence {incident.confidence:.2f} is below {least:.2f} ({key}): look at it yourself"
        return lowered(TELL, why, values)
    return passed(values)


def _cost(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    if plan.kind != "exclude_node" or BY_NAME[incident.fault].trouble != "slow":
        return NOT_APPLICABLE
    mine = terms(incident, situation)
    slowdown = incident.slowdown_ratio
    remaining_s = mine.remaining_s
    if situation.ends_s is not None:  # its time limit
        remaining_s = min(remaining_s, max(situation.ends_s - situation.now_s, 0.0))
    left = 1.0 if situation.pace_left_ratio is None else situation.pace_left_ratio
    # The remaining time at the pace with the node, and at the pace without it.
    gain_s = remaining_s * (1 - 1 / (1 + slowdown) / left) if slowdown > 0 and left > 0 else 0.0
    at_risk = _at_risk(incident, situation)
    if at_risk is not None:
        mine = replace(mine, lost_work_s=at_risk.seconds)
    values: Values = {
        "slowdown_ratio": slowdown,
        "remaining_s": remaining_s,
        "gain_s": gain_s,
        "lost_work_s": mine.lost_work_s,
        "restart_s": mine.restart_s,
        "queue_s": mine.queue_s,
        **({} if at_risk is None else {"steps_at_risk": at_risk.steps}),
        **({} if situation.pace_left_ratio is None else {"pace_left_ratio": left}),
    }
    if slowdown <= 0:
        why = "how much the job is slower for it is not known: nothing says that a restart would pay"
        return lowered(TELL, why, values)
    least = _floors(incident, situation).drain_slowdown_min
    if incident.fault == CAUSELESS and slowdown < least:
        values = {**values, "drain_slowdown_min": least}
        why = (
            f"nothing says why it is slow, and it makes steps {100 * slowdown:.1f}% longer: a node leaves for"
            f" {100 * least:.0f}% or more then (policy.drain_slowdown_min)"
        )
        return lowered(TELL, why, values)
    if slowdown < SLOWDOWN_MIN:
        why = (
            f"it makes steps {100 * slowdown:.1f}% longer: below {100 * SLOWDOWN_MIN:.0f}% it cannot be told"
            " from how a job's pace changes by itself"
        )
        return lowered(TELL, why, values)
    if left < 1 and gain_s <= 0:
        why = (
            f"no spare: with {incident.node} the job has {1 / (1 + slowdown):.0%} of its pace; without it"
            f" {_without_it(situation.members, left)}"
        )
        return lowered(TELL, why, values)
    if gain_s <= mine.cost_s:
        why = (
            f"a restart costs {mine.cost_s:.0f} s (lost work {mine.lost_work_s:.0f}, start {mine.restart_s:.0f}, queue"
            f" {mine.queue_s:.0f}) and would save {gain_s:.0f} s of the remaining {remaining_s:.0f} s"
            " (policy.remaining_s, also for single jobs)"
        )
        return lowered(TELL, why, values)
    return passed(values)


def _without_it(members: int, pace_left_ratio: float) -> str:
    if pace_left_ratio <= 0:
        return "too few nodes are left, and the job waits for one"
    return f"{members - 1} nodes go on at {pace_left_ratio:.0%} of the job's pace by plan"


class _AtRisk(NamedTuple):
    """The work since a step, in steps and in seconds."""

    steps: float
    seconds: float


def _at_risk(incident: Incident, situation: Situation) -> _AtRisk | None:
    """Return the work since the newest step in memory from which the job could resume; None if none is known."""
    found = resume_from(incident, situation, [incident.node] if incident.node is not None else [])
    reported = situation.checkpoints
    if found is None or found.where != "memory" or reported.step is None or reported.step_s is None:
        return None
    steps = reported.at_risk_steps + reported.step - found.step
    return _AtRisk(steps, steps * reported.step_s)


def _repetition(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    """Turn a second restart for the same node into its exclusion, unless the program is to blame."""
    if plan.kind != "restart_job" or incident.application or incident.node is None:
        return NOT_APPLICABLE
    times = sum(
        action.kind == "restart_job"
        and action.job == incident.job
        and action.attempt < incident.attempt
        and action.state in (*ASKED_STATES, "would_act")
        and situation.now_s - action.created_s <= situation.settings.repeat_window_s
        and action.node == incident.node
        for action in situation.actions
    )
    values: Values = {
        "restarts": float(times),
        "repeat_window_s": situation.settings.repeat_window_s,
        "node": incident.node,
    }
    if not times:
        return passed(values)
    why = f"the job was restarted {times} times because of {incident.node} already: now it is excluded"
    return changed(PlannedAction("exclude_node"), why, values)


def _target(incident: Incident, _: Situation, plan: PlannedAction) -> Ruling:
    """Set the nodes to exclude and whether to restart."""
    exclude = (incident.node,) if plan.kind in NODE_KINDS and incident.node is not None else ()
    restart = plan.kind in ("exclude_node", "restart_job")
    full = replace(plan, exclude=exclude, restart=restart)
    return Ruling("pass", "", {"exclude": ", ".join(exclude), "restart": str(restart)}, full)


def _may_restart(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    if not plan.restart:
        return NOT_APPLICABLE
    may = terms(incident, situation).may_restart
    values: Values = {"may_restart": str(may)}
    if may:
        return passed(values)
    if plan.kind == "restart_job":
        why = f"job {incident.job} may not be restarted (policy.jobs, may_restart): restart it yourself, or allow it"
        return lowered(TELL, why, values)
    why = f"job {incident.job} may not be restarted (policy.jobs, may_restart): the node is excluded, no more"
    return changed(replace(plan, restart=False, notes=(*plan.notes, why)), why, values)


def _restart_owner(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    """Respect that one owner restarts a job; if operator and job name different ones, we do not."""
    if not plan.restart:
        return NOT_APPLICABLE
    configured, reported = terms(incident, situation).restart_owner, situation.restart_owner
    owner = next((name for name in (configured, reported) if name not in OUR_RESTART_OWNERS), "")
    values: Values = {"restart_owner": owner or "eagle-eye", "policy.jobs": configured, "the job's word": reported}
    if not owner:
        return passed(values)
    if plan.kind == "restart_job":
        return lowered(TELL, f"{owner} restarts job {incident.job}, not we: nothing is asked for", values)
    why = f"{owner} restarts job {incident.job}: the node is excluded, no more"
    return changed(replace(plan, restart=False, notes=(*plan.notes, why)), why, values)


def _spare(_: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    """Say what the job continues with if its launcher has no spare; the cost rule decides whether that pays."""
    left = situation.pace_left_ratio
    if plan.kind != "exclude_node" or left is None:
        return NOT_APPLICABLE
    why = f"no spare: {_without_it(situation.members, left)}"
    return changed(replace(plan, notes=(*plan.notes, why)), why, {"pace_left_ratio": left})


def _bystanders(_: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    if plan.kind != "exclude_node":
        return NOT_APPLICABLE
    others = {node: situation.neighbours.get(node, ()) for node in plan.exclude}
    named = "; ".join(f"{node} also runs {', '.join(sorted(jobs))}" for node, jobs in sorted(others.items()) if jobs)
    if not named:
        return passed({"bystanders": 0})
    why = f"{named}: these jobs are to be spared, let them end before the node is repaired"
    return changed(replace(plan, notes=(*plan.notes, why)), why, {"bystanders": named})


NODE_TERMS = PolicyRule("node_terms", _node_terms)
CHOICE_RULES = (
    NODE_TERMS,
    PolicyRule("accused", _accused),
    PolicyRule("drain_instead", _drain_instead),
    PolicyRule("evidence", _evidence),
    PolicyRule("confidence", _confidence),
    PolicyRule("cost", _cost),
    PolicyRule("repetition", _repetition),
    PolicyRule("target", _target),
    PolicyRule("spare", _spare),
    PolicyRule("may_restart", _may_restart),
    PolicyRule("restart_owner", _restart_owner),
)
BYSTANDERS = PolicyRule("bystanders", _bystanders)
