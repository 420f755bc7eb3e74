"""Policy: which action to request for an incident, and if none, why. Pure.

``weigh`` walks a literal list of rules, each with a stable name (docs/reference/policy.md): first those that choose the
action, then those that hold it back, last the mode. Every rule's result is kept, with the values that it used, so that
an operator can see why an action was taken or not.
"""

from __future__ import annotations

from dataclasses import dataclass

from eagle_eye.detectors.faults import BY_NAME, Repair
from eagle_eye.schema.action import ActionKind, RestartScope
from eagle_eye.server.engine import budgets, choice_rules, deferred_drains, failed_together, hold_rules, shared_switch
from eagle_eye.server.engine.modes import Mode, mode_of
from eagle_eye.server.engine.ruling import NOT_APPLICABLE, PlannedAction, PolicyRule, Ruling
from eagle_eye.server.engine.situation import Situation
from eagle_eye.server.model.records import Incident, RuleWord

RULES: tuple[PolicyRule, ...] = (
    *choice_rules.RULES,
    failed_together.RULE,
    deferred_drains.RULE,
    choice_rules.BYSTANDERS,
    *hold_rules.BEFORE_BUDGETS,
    shared_switch.RULE,
    *budgets.RULES,
    *hold_rules.AFTER_BUDGETS,
    hold_rules.MODE,
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
    plan = PlannedAction(choice_rules.asked_kind(incident))
    words = [RuleWord(FAULT_RULE, "pass", "", {"fault": incident.fault, "asks": plan.kind})]
    hold, held_by = "", ""
    for rule in RULES:
        ruling = (
            rule.judge(incident, situation, plan) if plan.asks or rule is choice_rules.NODE_TERMS else NOT_APPLICABLE
        )
        words.append(_word(rule, ruling))
        if ruling.outcome == "hold" and not held_by and rule is not hold_rules.MODE:
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
