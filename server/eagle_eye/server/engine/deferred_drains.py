"""Executes drains that were deferred until the job restarts anyway. Pure."""

from __future__ import annotations

from dataclasses import replace

from eagle_eye.server.engine.budgets import exclusion_room, plan_mode, restarts_left, spares_ready
from eagle_eye.server.engine.modes import CAREFULNESS
from eagle_eye.server.engine.ruling import NOT_APPLICABLE, PlannedAction, PolicyRule, Ruling, Values, changed, passed
from eagle_eye.server.engine.situation import UNDER_WAY_STATES, Situation, counted
from eagle_eye.server.engine.standing import is_ours
from eagle_eye.server.model.records import Incident


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


RULE = PolicyRule("deferred_drains", _deferred_drains)
