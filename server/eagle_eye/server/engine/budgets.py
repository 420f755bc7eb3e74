"""Policy rules on budgets: exclusions, restarts, the circuit breaker, and a job's minimum of nodes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eagle_eye.server.engine.modes import Mode, mode_of
from eagle_eye.server.engine.ruling import (
    NOT_APPLICABLE,
    PlannedAction,
    PolicyRule,
    Ruling,
    Values,
    changed,
    held,
    passed,
)
from eagle_eye.server.engine.situation import (
    DISRUPTIVE_KINDS,
    NODE_KINDS,
    Situation,
    counted,
    terms,
)
from eagle_eye.server.model.records import Action, Incident


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


RULES = (
    PolicyRule("nodes_min", _nodes_min),
    PolicyRule("job_exclusions", _job_exclusions),
    PolicyRule("job_restarts", _job_restarts),
    PolicyRule("fleet_exclusions", _fleet_exclusions),
    PolicyRule("fleet_restarts", _fleet_restarts),
    PolicyRule("breaker", _breaker),
)
