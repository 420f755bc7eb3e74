"""Policy rules that hold an action back: blind, already requested, in maintenance, or against people's orders. Pure."""

from __future__ import annotations

from dataclasses import replace

from eagle_eye.detectors.faults import BY_NAME
from eagle_eye.server.engine.budgets import plan_mode
from eagle_eye.server.engine.fusion import is_of_a_replica
from eagle_eye.server.engine.maintenance import in_force, moment
from eagle_eye.server.engine.modes import mode_of
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
from eagle_eye.server.engine.scheduler_contact import is_proof
from eagle_eye.server.engine.situation import (
    ASKED_STATES,
    DISRUPTIVE_KINDS,
    FRUITLESS_STATES,
    UNDER_WAY_STATES,
    Situation,
    is_preliminary_of,
    outcome_words,
    own_actions,
    terms,
)
from eagle_eye.server.model.records import Action, Incident

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
