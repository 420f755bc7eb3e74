"""Excludes several failed or slow nodes of a job with one restart. Pure."""

from __future__ import annotations

from dataclasses import replace

from eagle_eye.detectors.faults import BY_NAME
from eagle_eye.server.engine import flapping
from eagle_eye.server.engine.budgets import exclusion_room, plan_mode
from eagle_eye.server.engine.choice_rules import floors_for, is_supported
from eagle_eye.server.engine.fusion import is_own_cause
from eagle_eye.server.engine.modes import CAREFULNESS
from eagle_eye.server.engine.node_terms import Floors
from eagle_eye.server.engine.ruling import NOT_APPLICABLE, PlannedAction, PolicyRule, Ruling, Values, changed, passed
from eagle_eye.server.engine.situation import Situation, own_actions
from eagle_eye.server.model.records import Incident


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
        and not flapping.is_lull(other, situation.settings, situation.now_s)
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


RULE = PolicyRule("failed_together", _failed_together)
