"""Policy: which action to request for an incident, and if none, why. Pure.

``weigh`` walks a literal list of rules, each with a stable name (docs/reference/policy.md): first those that choose the
action, then those that hold it back, last the mode. Every rule's result is kept, with the values that it used, so that
an operator can see why an action was taken or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eagle_eye.detectors.faults import BY_NAME, Repair
from eagle_eye.schema.action import ActionKind, RestartScope
from eagle_eye.server.engine import incidents, rules
from eagle_eye.server.engine.incidents import is_of_a_replica, is_own_cause
from eagle_eye.server.engine.judgement import is_proof
from eagle_eye.server.engine.ledger import is_ours
from eagle_eye.server.engine.rules import (
    ASKED_STATES,
    DISRUPTIVE_KINDS,
    FRUITLESS_STATES,
    NODE_KINDS,
    NOT_APPLICABLE,
    UNDER_WAY_STATES,
    PlannedAction,
    PolicyRule,
    Ruling,
    Situation,
    Values,
    changed,
    counted,
    floors_for,
    held,
    is_preliminary_of,
    is_supported,
    outcome_words,
    own_actions,
    passed,
    terms,
)
from eagle_eye.server.engine.settings import CAREFULNESS, Floors, Mode, in_force, mode_of, moment
from eagle_eye.server.model.records import Action, Incident, RuleWord

# Holds an exclusion back where nodes of other jobs at the node's switch are accused as well.
#
# A window is one job's, and one cell's; incidents are on record for all. Trouble of the network that begins at one
# moment at two nodes of one switch, in jobs that share nothing else, is more likely one switch than two nodes.

# What a switch can do to a node. A fact about its GPUs, its processes or its memory is none of it.
OF_THE_NETWORK = frozenset({"network_hang", "hang", "node_unreachable", "nic_degraded", "straggler", "switch_down"})
STATES = frozenset({"suspected", "confirmed", "acting"})
TOGETHER_S = 120.0  # between the onsets of one trouble, as two jobs see it: a step of each, and the floor of a verdict


def _witnesses(incident: Incident, switch: str, situation: Situation) -> list[Incident]:
    """Return those of the other jobs' incidents that accuse another node on the switch of this one's at the time."""
    return [
        other
        for other in situation.elsewhere
        if other.fault in OF_THE_NETWORK
        and other.state in STATES
        and not other.merged_into
        and abs(other.onset_s - incident.onset_s) <= TOGETHER_S
        and incident.node not in _accused(other)
        and any(situation.switch_of.get(node) == switch for node in _accused(other))
    ]


def _accused(incident: Incident) -> tuple[str, ...]:
    return (incident.node,) if incident.node is not None else tuple(incident.nodes)


def _shared_switch(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    """Hold the exclusion of a node whose switch has other jobs' nodes in the same trouble."""
    switch = situation.switch_of.get(incident.node or "", "")
    if plan.kind not in NODE_KINDS or not switch or incident.fault not in OF_THE_NETWORK:
        return NOT_APPLICABLE
    found = _witnesses(incident, switch, situation)
    named = ", ".join(
        f"{node} ({one.job})" for one in found for node in _accused(one) if situation.switch_of.get(node) == switch
    )
    values = {"switch": switch, "accused": named}
    if not found:
        return passed(values)
    why = (
        f"{named} at the same switch {switch} began within {TOGETHER_S:.0f} s of it, in other jobs: what may be the"
        " switch is reported; look at the switch, or exclude by hand"
    )
    return held(why, values)


SHARED_SWITCH = PolicyRule("shared_switch", _shared_switch)


def plan_mode(incident: Incident, situation: Situation, plan: PlannedAction) -> Mode:
    """Return the mode of the plan."""
    settings = situation.settings
    return mode_of(settings.mode, settings.modes, incident.job, incident.fault, plan.kind).mode


def breaker_until_s(actions: Sequence[Action], count: int, window_s: float, rest_s: float) -> float | None:
    """Return until when the breaker is open given these actions, oldest first; None if they never tripped it.

    It trips at the ``count``-th action within ``window_s``, and again at each further one.
    """
    times = [action.created_s for action in actions if action.kind in DISRUPTIVE_KINDS]
    trips = [late for early, late in zip(times, times[count - 1 :], strict=False) if late - early <= window_s]
    return max(trips) + rest_s if trips else None


def exclusions_left(incident: Incident, situation: Situation, mode: Mode) -> int:
    """Return how many more exclusions the budgets of job and fleet allow."""
    mine = terms(incident, situation).exclusions_per_job - _excluded(counted(situation, mode), incident.job)
    return min(mine, fleet_limit(situation) - _excluded(counted(situation, mode)))


def restarts_left(incident: Incident, situation: Situation, mode: Mode) -> int:
    """Return how many more restarts the budgets of job and fleet allow."""
    actions = [action for action in counted(situation, mode) if action.restart]
    mine = terms(incident, situation).restarts_per_job - sum(action.job == incident.job for action in actions)
    return min(mine, situation.settings.restarts_fleet - len(actions))


def nodes_left(incident: Incident, situation: Situation, mode: Mode, excluded: int) -> int:
    """Return how many nodes the job has after ``excluded`` exclusions, including spares known to be ready."""
    return situation.members - excluded + (spares_ready(incident, situation, mode) or 0)


def exclusion_room(incident: Incident, situation: Situation, mode: Mode, taken: int) -> int:
    """Return how many more nodes may leave the job besides ``taken``, by budgets and its minimum of nodes."""
    kept = nodes_left(incident, situation, mode, taken) - terms(incident, situation).nodes_min
    return min(exclusions_left(incident, situation, mode) - taken, kept)


def spares_ready(incident: Incident, situation: Situation, mode: Mode) -> int | None:
    """Return how many spares are ready, less one for each node excluded in the window; None: not known."""
    spares = terms(incident, situation).spares
    exclusions = [action for action in counted(situation, mode) if action.kind == "exclude_node"]
    return None if spares is None else max(0, spares - _excluded(exclusions, incident.job))


def _nodes_min(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    if plan.kind != "exclude_node":
        return NOT_APPLICABLE
    mode = plan_mode(incident, situation, plan)
    least = terms(incident, situation).nodes_min
    spares = spares_ready(incident, situation, mode)
    left = nodes_left(incident, situation, mode, len(plan.exclude))
    values = {"members": situation.members, "spares": spares, "left": left, "nodes_min": least}
    if left >= least:
        return passed(values)
    known = "spares are not known (policy.jobs, spares)" if spares is None else f"{spares} spares stand ready"
    would = "leave none" if left <= 0 else f"leave {left}, fewer than {least} (policy.jobs, nodes_min)"
    why = f"the job has {situation.members} nodes and {known}: excluding {len(plan.exclude)} would {would}"
    return held(why, values)


def _job_exclusions(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    if plan.kind != "exclude_node":
        return NOT_APPLICABLE
    limit, window_s = terms(incident, situation).exclusions_per_job, situation.settings.window_s
    count = _excluded(counted(situation, plan_mode(incident, situation, plan)), incident.job)
    values = {"excluded": count, "exclusions_per_job": limit, "window_s": window_s}
    if count + len(plan.exclude) <= limit:
        return passed(values)
    why = (
        f"{count} nodes of this job were excluded within {window_s:.0f} s; the limit is {limit}"
        " (policy.exclusions_per_job): look for a common cause, exclude by hand, or raise it"
    )
    return held(why, values)


def _fleet_exclusions(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    if plan.kind not in NODE_KINDS:
        return NOT_APPLICABLE
    limit, window_s = fleet_limit(situation), situation.settings.window_s
    count = _excluded(counted(situation, plan_mode(incident, situation, plan)))
    values = {"excluded": count, "limit": limit, "fleet_size": situation.fleet_size, "window_s": window_s}
    if count + len(plan.exclude) <= limit:
        return passed(values)
    why = (
        f"{count} nodes were excluded or drained within {window_s:.0f} s; the limit for {situation.fleet_size} nodes"
        f" is {limit} (policy.exclusions_fleet_ratio): look for a common cause, exclude by hand, or raise it"
    )
    return held(why, values)


def _job_restarts(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    if not plan.restart:
        return NOT_APPLICABLE
    limit, window_s = terms(incident, situation).restarts_per_job, situation.settings.window_s
    actions = counted(situation, plan_mode(incident, situation, plan))
    count = sum(action.restart for action in actions if action.job == incident.job)
    values = {"restarts": count, "restarts_per_job": limit, "window_s": window_s}
    if count < limit:
        return passed(values)
    why = (
        f"this job was restarted {count} times within {window_s:.0f} s; the limit is {limit} (policy.restarts_per_job)"
    )
    return _without_restart(plan, why, "restart it by hand, or raise it", values)


def _fleet_restarts(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    if not plan.restart:
        return NOT_APPLICABLE
    limit, window_s = situation.settings.restarts_fleet, situation.settings.window_s
    count = sum(action.restart for action in counted(situation, plan_mode(incident, situation, plan)))
    values = {"restarts": count, "restarts_fleet": limit, "window_s": window_s}
    if count < limit:
        return passed(values)
    why = f"jobs were restarted {count} times within {window_s:.0f} s; the limit is {limit} (policy.restarts_fleet)"
    return _without_restart(plan, why, "look for a common cause, restart by hand, or raise it", values)


def _without_restart(plan: PlannedAction, why: str, remedy: str, values: Values) -> Ruling:
    """Reduce a plan when no restart is left: as where a job may not be restarted, the node alone leaves.

    Holding the exclusion back would make ``may_restart = false``, the more careful setting, the one that does more.
    """
    if plan.kind == "restart_job":
        return held(f"{why}: {remedy}", values)
    reported = f"{why}: the node is excluded, no more; {remedy}"
    return changed(replace(plan, restart=False, notes=(*plan.notes, reported)), reported, values)


def _breaker(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    if plan.kind not in DISRUPTIVE_KINDS:
        return NOT_APPLICABLE
    settings = situation.settings
    actions = counted(situation, plan_mode(incident, situation, plan))
    until_s = breaker_until_s(actions, settings.breaker_actions, settings.breaker_window_s, settings.breaker_rest_s)
    values = {
        "breaker_actions": settings.breaker_actions,
        "breaker_window_s": settings.breaker_window_s,
        "open_until_s": until_s,
    }
    if until_s is None or until_s <= situation.now_s:
        return passed(values)
    why = (
        f"the breaker is open: {settings.breaker_actions} exclusions and restarts within"
        f" {settings.breaker_window_s:.0f} s are no single faults (policy.breaker_actions); it closes"
        f" {settings.breaker_rest_s:.0f} s after the last of them; look for a common cause, or act by hand"
    )
    return held(why, values)


def _excluded(actions: Sequence[Action], job: str | None = None) -> int:
    """Return how many nodes the actions exclude; a drain counts as one."""
    return sum(len(action.exclude) for action in actions if job is None or action.job == job)


def fleet_limit(situation: Situation) -> int:
    """Return how many exclusions and drains the fleet may have within the policy's window."""
    settings = situation.settings
    return max(settings.exclusions_fleet_floor, int(settings.exclusions_fleet_ratio * situation.fleet_size))


BUDGET_RULES = (
    PolicyRule("nodes_min", _nodes_min),
    PolicyRule("job_exclusions", _job_exclusions),
    PolicyRule("job_restarts", _job_restarts),
    PolicyRule("fleet_exclusions", _fleet_exclusions),
    PolicyRule("fleet_restarts", _fleet_restarts),
    PolicyRule("breaker", _breaker),
)


DETAIL_CHARS_MAX = 200  # of a subscriber's report in a sentence for display
OBSERVED = "observe mode: nothing is asked of anyone"


def _blind(_i: Incident, situation: Situation, _p: PlannedAction) -> Ruling:
    if situation.blind:
        return held(f"no action while blind: {situation.blind}", {"blind": situation.blind})
    return passed({"blind": ""})


def _job_state(_i: Incident, situation: Situation, _p: PlannedAction) -> Ruling:
    values: Values = {"job_state": situation.job_state}
    if situation.job_state != "running" and not situation.crashed:
        return held(f"the job is {situation.job_state}: it was meant to stop", values)
    return passed(values)


def _scheduler(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    """Hold what a scheduler may have caused until it reports; proof against hardware waits at most ``patience_s``.

    It then excludes without a restart: whether the job still has to run is for the scheduler to decide.
    """
    hearing = situation.hearing
    if not hearing.source:
        return NOT_APPLICABLE
    age_s = None if hearing.heard_s is None else situation.now_s - hearing.heard_s
    values: dict[str, float | str | None] = {
        "scheduler": hearing.source,
        "heard_age_s": age_s,
        "onset_age_s": situation.now_s - incident.onset_s,
    }
    if hearing.covers(incident.onset_s):
        return passed(values)
    last = "never heard" if age_s is None else f"last heard {age_s:.0f} s ago"
    why = f"{hearing.source} has not been heard since this began ({last}): it may have ended the job itself"
    remedy = f"look at job_sources on /readyz, or act by hand ([job_sources.{hearing.source}])"
    if plan.kind == "restart_job" or not is_proof(incident):
        return held(f"{why}; {remedy}", values)
    if not plan.restart:
        return passed(values)
    values["patience_s"] = hearing.patience_s
    if situation.now_s - incident.onset_s < hearing.patience_s:
        return held(f"{why}; it is asked, and waited for at most {hearing.patience_s:.0f} s", values)
    reported = f"{why}: the node is excluded, no more"
    return changed(replace(plan, restart=False, notes=(*plan.notes, reported)), reported, values)


def _maintenance(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    windows = situation.settings.maintenance
    if not windows:
        return NOT_APPLICABLE
    touched = {*plan.exclude, *incident.nodes}
    if plan.kind in DISRUPTIVE_KINDS:  # stops the job on all its nodes, and may be a consequence of the maintenance
        touched.update(rank.node for rank in situation.ranks)
    found = in_force(windows, incident.job, touched, situation.now_s)
    if found is None:
        return passed({"windows": len(windows)})
    what = found.window.reason or "maintenance"
    whom = f" of {found.node}" if found.node else ""
    why = (
        f"{what}{whom} until {moment(found.window.until_s)} ({found.where}): nothing is done until then;"
        " shorten the window if it is over"
    )
    return held(why, {"from": moment(found.window.from_s), "until": moment(found.window.until_s), "key": found.where})


def maintenance_hold(incident: Incident, situation: Situation, plan: PlannedAction) -> str:
    """Return why a plan waits for the end of a maintenance window, "" if none is open."""
    return _maintenance(incident, situation, plan).reason


def _standing(_i: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    """Hold the drain of a node that is already out of service, by a person or an earlier action."""
    if plan.kind != "drain_node":
        return NOT_APPLICABLE
    out = [situation.standing[node] for node in plan.exclude if node in situation.standing]
    if not out:
        return passed({"standing": "in_service"})
    why = f"{out[0].node} is {out[0].state} already ({out[0].reason or 'no reason given'}) and stays as it is"
    return held(why, {"standing": out[0].state, "reason": out[0].reason})


def _under_way(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    """Hold every action while one that stops the job is under way; a drain or checkpoint only blocks its own kind."""
    for action in situation.oldest_first:
        concerns = (action.job, action.attempt) == (incident.job, incident.attempt) and not action.preliminary
        if is_of_a_replica(incident.kinds) and not {*plan.exclude} & {*action.exclude}:
            continue  # the other replica groups go on meanwhile
        if concerns and _takes_along(action, incident, plan):
            why = f"action {action.id} because of incident {action.incident_id} excludes {incident.node} as well"
            return held(why, {"action": action.id, "state": action.state, "kind": action.kind})
        if concerns and action.state in ASKED_STATES and _same(action, incident, situation, plan):
            why = f"action {action.id} for attempt {incident.attempt} is {action.state} already"
            return held(why, {"action": action.id, "state": action.state, "kind": action.kind})
    return passed({})


def _takes_along(action: Action, incident: Incident, plan: PlannedAction) -> bool:
    """Whether the node leaves, or would have left, with an action because of another one."""
    stands = action.kind in DISRUPTIVE_KINDS and action.state in (*ASKED_STATES, "would_act")
    return stands and action.node != incident.node and incident.node in plan.exclude and incident.node in action.exclude


def _same(action: Action, incident: Incident, situation: Situation, plan: PlannedAction) -> bool:
    if action.kind in DISRUPTIVE_KINDS:
        if action.state == "done" and incident.onset_s > action.updated_s:
            return False  # the job went on in this attempt, as where replicas are replaced one by one
        if _is_back(action, incident, situation):
            return False
        # The exclusion of a node without a restart leaves the restart to be requested.
        return action.restart or action.state != "done" or not plan.restart
    return action.kind == plan.kind and set(plan.exclude) <= set(action.exclude)


def _is_back(action: Action, incident: Incident, situation: Situation) -> bool:
    """Whether the nodes that it excluded are in service again in this attempt, and the trouble has returned since."""
    returned = incident.flaps > 0 and incident.since_s > action.updated_s
    out = any(node in situation.standing for node in action.exclude)
    return action.state == "done" and bool(action.exclude) and returned and not out


def _tries(incident: Incident, situation: Situation, _p: PlannedAction) -> Ruling:
    """Retry what failed, or was not taken up in time, ``tries_max`` times and then hand it to people."""
    ended = [a for a in own_actions(incident, situation) if a.state not in (*ASKED_STATES, "withdrawn")]
    if not ended:
        return NOT_APPLICABLE
    last = ended[-1]
    most, settings = situation.settings.tries_max, situation.settings
    values: Values = {"tries": len(ended), "tries_max": most, "action": last.id, "state": last.state}
    if last.state == "would_act":
        return held(f"action {last.id} is what would have been asked for; a new mode counts for new incidents", values)
    if last.state not in FRUITLESS_STATES or last.state == "rejected":
        return held(f"{outcome_words(last)}; for this incident act by hand", values)
    said = str(last.reports[-1].get("detail", ""))[:DETAIL_CHARS_MAX] if last.reports else ""
    reported = outcome_words(last) + (f", with the words: {said}" if said else "")
    if len(ended) >= most:
        return held(
            f"{reported} (attempt {len(ended)} of {most}, policy.tries_max): act by hand and resolve it", values
        )
    if situation.now_s - last.updated_s < settings.retry_s:
        return held(f"{reported} (attempt {len(ended)} of {most}): the next is {settings.retry_s:.0f} s later", values)
    return passed(values)


def _checkpoint_first(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    """Delay what is slow until a checkpoint; what has stopped or computes wrong numbers can't make a good one."""
    wait_s = terms(incident, situation).checkpoint_wait_s
    planned = plan.kind == "exclude_node" and BY_NAME[incident.fault].trouble == "slow"
    if not planned or wait_s <= 0 or plan_mode(incident, situation, plan) != "act":
        return NOT_APPLICABLE
    values: dict[str, float | str | None] = {"checkpoint_wait_s": wait_s}
    made = (a for a in situation.oldest_first if is_preliminary_of(a, incident) and a.state != "withdrawn")
    asked = next(made, None)
    if asked is None:
        why = f"a checkpoint is asked for first, and waited for at most {wait_s:.0f} s (policy.checkpoint_wait_s)"
        return changed(replace(plan, first="checkpoint_now"), why, values)
    values.update({"action": asked.id, "state": asked.state})
    if asked.state in UNDER_WAY_STATES and 0 <= situation.now_s - asked.created_s < wait_s:
        why = f"a checkpoint comes first: action {asked.id}, for at most {wait_s:.0f} s (policy.checkpoint_wait_s)"
        return held(why, values)
    return passed(values)


def _copies_first(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    """Delay what can wait until the newest step in memory has all its copies again, within seconds."""
    reported, wait_s = situation.checkpoints, situation.settings.copies_wait_s
    planned = plan.kind == "drain_node" or (plan.kind == "exclude_node" and BY_NAME[incident.fault].trouble == "slow")
    if not planned or not reported.copies_wanted or wait_s <= 0 or plan_mode(incident, situation, plan) != "act":
        return NOT_APPLICABLE
    values: Values = {"copies": reported.copies, "copies_wanted": reported.copies_wanted, "copies_wait_s": wait_s}
    if reported.thin_since_s is not None and 0 <= situation.now_s - reported.thin_since_s < wait_s:
        why = (
            f"{reported.copies} of {reported.copies_wanted} copies of step {reported.step} are there: the others are"
            f" waited for, at most {wait_s:g} s (policy.copies_wait_s)"
        )
        return held(why, values)
    return passed(values)


def _mode(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    settings = situation.settings
    mode, where = mode_of(settings.mode, settings.modes, incident.job, incident.fault, plan.kind)
    values: Values = {"mode": mode, "key": where}
    if mode == "observe":
        return Ruling("hold", f"{OBSERVED} ({where})", values)
    if mode == "approve":
        return Ruling("hold", f"approve mode: a person decides, eagle-eye actions approve ({where})", values)
    return passed(values)


BEFORE_BUDGETS = (
    PolicyRule("blind", _blind),
    PolicyRule("job_state", _job_state),
    PolicyRule("scheduler", _scheduler),
    PolicyRule("maintenance", _maintenance),
    PolicyRule("standing", _standing),
    PolicyRule("under_way", _under_way),
    PolicyRule("tries", _tries),
)
AFTER_BUDGETS = (PolicyRule("copies_first", _copies_first), PolicyRule("checkpoint_first", _checkpoint_first))
MODE = PolicyRule("mode", _mode)


def _deferred_drains(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    """Let a node that is due to leave at the next restart leave now, if a known spare takes its place."""
    if not plan.restart:
        return NOT_APPLICABLE
    waiting = [node for node in _draining(incident, situation) if node not in plan.exclude]
    if not waiting:
        return NOT_APPLICABLE
    exclusion_plan = replace(plan, kind="exclude_node")
    mode, taken = plan_mode(incident, situation, exclusion_plan), len(plan.exclude)
    room = min((spares_ready(incident, situation, mode) or 0) - taken, exclusion_room(incident, situation, mode, taken))
    if restarts_left(incident, situation, mode) <= 0:
        room = 0  # there is no restart with which they could leave
    if CAREFULNESS[mode] > CAREFULNESS[plan_mode(incident, situation, plan)]:
        room = 0  # otherwise the restart itself would wait for whoever decides on exclusions
    leaving = waiting[: max(room, 0)]
    values: Values = {"waiting": ", ".join(waiting), "leaving": ", ".join(leaving), "room": room}
    if not leaving:
        return passed(values, f"{', '.join(waiting)} stays for now: no known spare, no budget, or another mode")
    why = f"{', '.join(leaving)} was to leave when the job restarts anyway, and leaves now"
    plan = replace(exclusion_plan, exclude=(*plan.exclude, *leaving), notes=(*plan.notes, why))
    return changed(plan, why, values)


def _draining(incident: Incident, situation: Situation) -> list[str]:
    """Return the job's nodes with a requested drain that have not been put back into service since."""
    drains = [a for a in counted(situation, "act") if a.kind == "drain_node" and a.job == incident.job]
    out = {node for node, record in situation.standing.items() if is_ours(record)}
    nodes = {node for a in drains for node in a.exclude if node in out or a.state in UNDER_WAY_STATES}
    nodes -= situation.standing.keys() - out  # somebody else has drained it since: no longer ours
    return sorted(nodes & {rank.node for rank in situation.ranks}) if nodes else []


DEFERRED_DRAINS = PolicyRule("deferred_drains", _deferred_drains)


def _failed_together(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    """Exclude further nodes with the first if the next attempt would fail or be slow because of them."""
    if plan.kind != "exclude_node" or not plan.restart:
        return NOT_APPLICABLE
    others = [other for other in situation.incidents if _has_to_go(other, incident, situation, plan)]
    if not others:
        return NOT_APPLICABLE
    mode, taken = plan_mode(incident, situation, plan), len(plan.exclude)
    room = exclusion_room(incident, situation, mode, taken)
    leaving = others[: max(room, 0)]
    nodes = tuple(other.node for other in leaving if other.node is not None)
    values: Values = {
        "failed": ", ".join(other.node or "" for other in others),
        "leaving": ", ".join(nodes),
        "room": room,
    }
    if not leaving:
        return passed(values, f"{values['failed']} has failed too, and stays: no budget, or too few nodes left")
    why = "; ".join(f"{other.node} leaves with it: {other.summary} (incident {other.id})" for other in leaving)
    return changed(replace(plan, exclude=(*plan.exclude, *nodes), notes=(*plan.notes, why)), why, values)


def _has_to_go(other: Incident, incident: Incident, situation: Situation, plan: PlannedAction) -> bool:
    """Whether its own action would be the same, and has not been carried out yet."""
    return (
        other.id != incident.id
        and (other.job, other.attempt) == (incident.job, incident.attempt)
        and (is_own_cause(other) or _is_slow_as_well(other, incident, situation))
        and other.node not in plan.exclude
        and _floors(other, situation).action == "exclude_node"
        and not own_actions(other, situation)
        and not incidents.is_lull(other, situation.settings, situation.now_s)
        and CAREFULNESS[plan_mode(other, situation, plan)] <= CAREFULNESS[plan_mode(incident, situation, plan)]
    )


def _is_slow_as_well(other: Incident, incident: Incident, situation: Situation) -> bool:
    """Whether another node is as certainly slow: the next attempt would have no earlier time to detect it against."""
    return (
        BY_NAME[incident.fault].trouble == BY_NAME[other.fault].trouble == "slow"
        and other.node is not None
        and is_supported(other, _floors(other, situation))
        and other.slowdown_ratio > 0
    )


def _floors(other: Incident, situation: Situation) -> Floors:
    return floors_for(other, situation.settings, situation.gpu_models)


FAILED_TOGETHER = PolicyRule("failed_together", _failed_together)


RULES: tuple[PolicyRule, ...] = (
    *rules.CHOICE_RULES,
    FAILED_TOGETHER,
    DEFERRED_DRAINS,
    rules.BYSTANDERS,
    *BEFORE_BUDGETS,
    SHARED_SWITCH,
    *BUDGET_RULES,
    *AFTER_BUDGETS,
    MODE,
)
FAULT_RULE = "fault"  # the first entry: what the fault asks for before any rule
RULE_NAMES = (FAULT_RULE, *(rule.name for rule in RULES))


@dataclass(frozen=True, slots=True)
class Decision:
    """What to request, and in which ``mode``.

    ``hold`` is the reason why it waits or why it is less than the fault's own action, "" if neither; ``rule`` names the
    rule that gave it. A kind of "notify" or "none" is never requested from a subscriber: the incident event suffices.
    ``first`` is an action to request before this one. ``notes`` are for whoever carries it out. ``restart_scope`` is
    the smallest safe restart, None without one.
    """

    kind: ActionKind
    exclude: tuple[str, ...] = ()
    restart: bool = False
    hold: str = ""
    repair: Repair = "none"
    rule: str = ""
    mode: Mode = "act"
    first: ActionKind | None = None
    notes: tuple[str, ...] = ()
    restart_scope: RestartScope | None = None


@dataclass(frozen=True, slots=True)
class Weighing:
    """A decision with every rule's result, in the rules' order."""

    decision: Decision
    words: tuple[RuleWord, ...]


def decide(incident: Incident, situation: Situation) -> Decision:
    """Return what to request for the incident."""
    return weigh(incident, situation).decision


def weigh(incident: Incident, situation: Situation) -> Weighing:
    """Return what to request for the incident, and each rule's result.

    The first rule that holds gives the reason. Once only a notification is left, the remaining rules have nothing to
    judge; terms for nodes may turn a fault's notification into an action. The mode is no hold: waiting for approval, or
    only observing, is a decision too.
    """
    plan = PlannedAction(rules.asked_kind(incident))
    words = [RuleWord(FAULT_RULE, "pass", "", {"fault": incident.fault, "asks": plan.kind})]
    hold, held_by = "", ""
    for rule in RULES:
        ruling = rule.judge(incident, situation, plan) if plan.asks or rule is rules.NODE_TERMS else NOT_APPLICABLE
        words.append(_word(rule, ruling))
        if ruling.outcome == "hold" and not held_by and rule is not MODE:
            hold, held_by = ruling.reason, rule.name
        plan = ruling.plan or plan
    settings = situation.settings
    decision = Decision(
        kind=plan.kind,
        exclude=plan.exclude,
        restart=plan.restart,
        hold=hold,
        repair=BY_NAME[incident.fault].repair,
        rule=held_by,
        mode=mode_of(settings.mode, settings.modes, incident.job, incident.fault, plan.kind).mode,
        first=None if hold else plan.first,
        notes=plan.notes,
        restart_scope=_restart_scope(incident, plan) if plan.restart else None,
    )
    return Weighing(decision, tuple(words))


def _restart_scope(incident: Incident, plan: PlannedAction) -> RestartScope:
    """Return the fault's own scope, if this incident meets its preconditions."""
    scope = BY_NAME[incident.fault].restart_scope
    if scope == "process_group" and plan.exclude:
        return "job"  # not a crash by itself then: the excluded node is considered the cause
    if scope == "rank" and plan.exclude != (incident.node,):
        return "job"  # it is not known whose processes to end first
    return scope


def _word(rule: PolicyRule, ruling: Ruling) -> RuleWord:
    return RuleWord(rule.name, ruling.outcome, ruling.reason, dict(ruling.values))
