"""Whether what is on record of a fault suffices to let policy do more about it: observe, then approve, then act. Pure.

A decision is one incident for which policy wanted an action, however often it asked. Its outcome is the ledger's where
the action was not carried out: what happened to the node afterwards shows whether it would have been right. Where it
was, only people can say: one whose incident was marked as a false alarm was wrong; one that a person approved, and that
nobody called false within the ledger's window, was right.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from eagle_eye.detectors.faults import BY_NAME, FAULTS
from eagle_eye.server.accounts import goodput
from eagle_eye.server.accounts.goodput import TimelineSpan
from eagle_eye.server.engine.settings import CAREFULNESS, AskedKind, Mode, ModeRule, PolicySettings, matches, mode_of
from eagle_eye.server.model.records import Action, Attempt, AuditEntry, Incident, NodeCheck, Ticket
from eagle_eye.server.store.store import OPEN_INCIDENT_STATES

# Of the lower end of a precision's interval: no number of outcomes reaches 1.
PrecisionMin = Annotated[float, Meta(ge=0, le=0.99)]


class AccountSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the past is accounted for, how long the accounts are kept, and when they suffice for another mode."""

    # How long after an action that was not carried out its outcome is examined.
    hindsight_s: Annotated[float, Meta(ge=3_600, le=30 * 86_400)] = 2 * 86_400.0
    # Attempts, tickets, driver errors, and GPUs that are no longer reported.
    retention_s: Annotated[float, Meta(ge=60 * 86_400)] = 400 * 86_400.0
    step_decisions_min: Annotated[int, Meta(ge=1)] = 10  # whose outcome is known; with fewer no statement is made
    approve_precision_min: PrecisionMin = 0.5  # what approve needs: people look at each action
    act_precision_min: PrecisionMin = 0.8  # what act needs


# The ledger: actions kept in observe mode, rejected by a person or left to expire, and what happened afterwards.

JUDGED_STATES = ("would_act", "rejected", "expired")
JUDGED_KINDS = frozenset({"exclude_node", "drain_node", "restart_job"})
# Verbs of people and subscribers, and the states that schedulers report.
TAKEN_OUT_VERBS = frozenset({"exclude", "drain", "excluded", "draining"})
RESUMED_S = 60.0  # a step that ended this long after the verdict was not in progress when the job was reported stopped
Z95 = 1.959963984540054  # of the normal distribution, for a 95% interval

Standing = Literal["right", "wrong", "pending", "cannot_tell"]
# right: node_failed, checked_sick, ticket, job_stopped. wrong: marked_false, ran_on, went_on. pending: waiting.
# cannot_tell: taken_out, left_out, job_ended, persisted, out_of_sight.
Why = Literal[
    "node_failed",
    "checked_sick",
    "ticket",
    "taken_out",
    "left_out",
    "job_stopped",
    "marked_false",
    "ran_on",
    "went_on",
    "waiting",
    "job_ended",
    "persisted",
    "out_of_sight",
]


class ActionOutcome(NamedTuple):
    """The outcome of one action so far; ``time_s`` is when the deciding event happened, None while undecided."""

    standing: Standing
    why: Why
    detail: str
    time_s: float | None = None


@dataclass(frozen=True, slots=True)
class Afterwards:
    """What is on record of the time since an action.

    ``incident`` is its own, None when it is gone. ``incidents`` are those of all jobs that accuse its nodes; ``verbs``
    the audit trail of the nodes; ``checks`` and ``tickets`` theirs. ``attempts`` are the job's, ``members`` the nodes
    of each by its id, where still kept.
    """

    incident: Incident | None
    incidents: Sequence[Incident] = ()
    verbs: Sequence[AuditEntry] = ()
    checks: Sequence[NodeCheck] = ()
    tickets: Sequence[Ticket] = ()
    attempts: Sequence[Attempt] = ()
    members: Mapping[str, Collection[str]] = field(default_factory=dict)


def is_judged(action: Action) -> bool:
    """Return whether the action was requested, not carried out, and would have stopped something."""
    return action.state in JUDGED_STATES and would_stop(action)


def would_stop(action: Action) -> bool:
    """Return whether the action is one that stops something, or takes it out, when it is carried out."""
    return action.kind in JUDGED_KINDS and not action.preliminary


def accused(action: Action) -> frozenset[str]:
    """Return the nodes that the action blames; none for a restart with unknown culprit."""
    return frozenset(action.exclude) or frozenset({action.node} if action.node else ())


def look_back(action: Action, after: Afterwards, now_s: float, window_s: float) -> ActionOutcome:
    """Return the action's outcome at ``now_s``, judged by what happened within ``window_s`` of it.

    A person's statement that it was a false alarm takes precedence. Then the first event that proved it right; then
    whether the job, or the node in it, continued anyway. That somebody took the node out proves nothing: it is what
    the action asked for, and may have been done because of it.
    """
    end_s = action.created_s + window_s
    if after.incident is not None and after.incident.state == "false":
        return ActionOutcome(
            "wrong", "marked_false", "a person marked its incident as a false alarm", after.incident.ended_s
        )
    proof = _first(_proofs(action, after, end_s))
    if proof is not None:
        return proof
    its = next((a for a in after.attempts if _covers(a, action)), None)
    if _is_stop(action):
        outcome = _of_a_stop(action, its, now_s, end_s)
        if outcome is not None:
            return outcome
    if now_s < end_s:
        return ActionOutcome("pending", "waiting", "nothing is proved yet; the time to look back is not over")
    done = _first(_carried_out(action, after, end_s))
    return done if done is not None else _of_a_node_that_stayed(action, after, its, end_s)


def _first(outcomes: Iterable[ActionOutcome]) -> ActionOutcome | None:
    """Return the earliest of those that have a time, None if there is none."""
    dated = [outcome for outcome in outcomes if outcome.time_s is not None]
    return min(dated, key=lambda outcome: outcome.time_s or 0.0, default=None)


def _proofs(action: Action, after: Afterwards, end_s: float) -> Iterable[ActionOutcome]:
    nodes, since_s = accused(action), action.created_s
    for incident in after.incidents:
        later = since_s < incident.detected_s <= end_s and incident.id != action.incident_id
        if later and incident.fact and incident.node in nodes and incident.state != "false":
            said = f"{incident.node} had {incident.fault}, a fact: {incident.id}"
            yield ActionOutcome("right", "node_failed", said, incident.detected_s)
    for check in after.checks:
        if (
            since_s < check.updated_s <= end_s
            and check.created_s >= since_s
            and check.state == "sick"
            and check.node in nodes
        ):
            said = f"a check found {check.node} sick: {check.id}"
            yield ActionOutcome("right", "checked_sick", said, check.updated_s)
    for ticket in after.tickets:
        if since_s < ticket.opened_s <= end_s and ticket.node in nodes:
            yield ActionOutcome("right", "ticket", f"ticket {ticket.id} on {ticket.node}", ticket.opened_s)


def _carried_out(action: Action, after: Afterwards, end_s: float) -> Iterable[ActionOutcome]:
    """Yield what others did of what the action asked for: the node left, and nobody sees how it would have gone on."""
    nodes, since_s = accused(action), action.created_s
    for entry in after.verbs:
        if since_s < entry.time_s <= end_s and entry.verb in TAKEN_OUT_VERBS and entry.subject in nodes:
            said = f"{entry.who} said {entry.verb} {entry.subject}, and nothing shows whether it was sick"
            yield ActionOutcome("cannot_tell", "taken_out", said, entry.time_s)
    for attempt in _later_attempts(action, after):
        members = after.members.get(attempt.id)
        if nodes and members is not None and attempt.started_s <= end_s and not nodes & set(members):
            said = f"attempt {attempt.attempt} of {attempt.job} went on without {', '.join(sorted(nodes))}"
            yield ActionOutcome("cannot_tell", "left_out", said, attempt.started_s)


def _later_attempts(action: Action, after: Afterwards) -> list[Attempt]:
    """Return the attempts of the same run that began after the action."""
    its = next((a for a in after.attempts if _covers(a, action)), None)
    if its is None:
        return []
    return [a for a in after.attempts if a.run == its.run and a.started_s > max(its.started_s, action.created_s)]


def _of_a_stop(action: Action, its: Attempt | None, now_s: float, end_s: float) -> ActionOutcome | None:
    """Return the outcome for a job reported as stopped; None while the job alone does not decide it."""
    if its is None:
        return None
    if its.last_step_s is not None and its.last_step_s > action.created_s + RESUMED_S:
        return ActionOutcome("wrong", "went_on", f"attempt {its.attempt} went on by itself", its.last_step_s)
    ended_s = its.ended_s
    if ended_s is None or ended_s > min(now_s, end_s):
        return None
    if its.end in ("failed", "superseded") and (not action.exclude or action.kind == "restart_job"):
        return ActionOutcome("right", "job_stopped", f"attempt {its.attempt} made no more step and ended", ended_s)
    return None


def _of_a_node_that_stayed(action: Action, after: Afterwards, its: Attempt | None, end_s: float) -> ActionOutcome:
    incident = after.incident
    if incident is not None and not _is_stop(action):
        seen_s = max(incident.seen_s, incident.updated_s if incident.ended_s is None else 0.0)
        if (incident.state in OPEN_INCIDENT_STATES and incident.ended_s is None) or seen_s >= end_s:
            return ActionOutcome("cannot_tell", "persisted", "the trouble lasted all the time, and nobody did anything")
    if its is None:
        return ActionOutcome("cannot_tell", "out_of_sight", "the job's attempts are not on record")
    nodes = accused(action)
    at_end = next((a for a in after.attempts if a.run == its.run and _spans(a, end_s)), None)
    if at_end is None:
        last = max((a for a in after.attempts if a.run == its.run), key=lambda a: a.started_s)
        if last.ended_s is not None and last.ended_s < end_s:
            return ActionOutcome(
                "cannot_tell", "job_ended", f"the job was {last.end or 'over'} before the time was up", last.ended_s
            )
        return ActionOutcome("cannot_tell", "out_of_sight", "the job was not watched until the time was up")
    if at_end.id != its.id and nodes and at_end.id not in after.members:
        return ActionOutcome(
            "cannot_tell", "out_of_sight", "who took part in the later attempts is no longer on record"
        )
    if at_end.last_step_s is None or at_end.last_step_s <= action.created_s:
        return ActionOutcome("cannot_tell", "out_of_sight", "the job showed no step since then")
    who = f"{', '.join(sorted(nodes))} in it" if nodes else "all its nodes"
    return ActionOutcome("wrong", "ran_on", f"the job ran on with {who}, and nothing happened", end_s)


def _covers(attempt: Attempt, action: Action) -> bool:
    ended_s = math.inf if attempt.ended_s is None else attempt.ended_s
    return (
        attempt.job == action.job
        and attempt.attempt == action.attempt
        and attempt.started_s <= action.created_s <= ended_s + RESUMED_S
    )


def _spans(attempt: Attempt, time_s: float) -> bool:
    last_s = attempt.seen_s if attempt.ended_s is None else attempt.ended_s
    return attempt.started_s <= time_s <= last_s


def _is_stop(action: Action) -> bool:
    fault = BY_NAME.get(action.fault)
    return fault is not None and fault.trouble == "stop"


class Precision(NamedTuple):
    """How often a fault's or detector's actions were right, with its 95% interval; None without decided outcomes."""

    right: int
    wrong: int
    pending: int
    cannot_tell: int

    @property
    def ratio(self) -> float | None:
        """The share of right ones among those decided."""
        judged = self.right + self.wrong
        return self.right / judged if judged else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Wilson's score interval: it holds for few cases and near 0 and 1, where the textbook one does not."""
        return wilson(self.right, self.right + self.wrong)


def precision(outcomes: Iterable[ActionOutcome]) -> Precision:
    """Return the counts over some outcomes."""
    return precision_of(outcome.standing for outcome in outcomes)


def precision_of(standings: Iterable[Standing]) -> Precision:
    """Return the counts of some standings."""
    counts = Counter(standings)
    return Precision(counts["right"], counts["wrong"], counts["pending"], counts["cannot_tell"])


def wilson(successes: int, trials: int, z: float = Z95) -> tuple[float, float] | None:
    """Return the interval of a proportion (Wilson, 1927); None without a trial."""
    if trials <= 0:
        return None
    p, z2 = successes / trials, z * z
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = z / (1 + z2 / trials) * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


# The steps from mode to mode.

ASKED_STATES = ("requested", "accepted", "running", "done", "failed", "refused")
NEXT: Mapping[Mode, Mode] = MappingProxyType({"observe": "approve", "approve": "act"})
KINDS: tuple[AskedKind, ...] = get_args(AskedKind)
MORE_MAX = 100_000  # right decisions in a row that are asked for
# Of the actions of one incident the first in this order counts.
_ORDER: tuple[Standing, ...] = ("wrong", "right", "pending", "cannot_tell")

# suffices: for the next mode. falls_short: it was wrong too often, or right too seldom to be sure. cannot_tell: too few
# outcomes are known. acts: there is no next mode.
Sufficiency = Literal["suffices", "falls_short", "cannot_tell", "acts"]


class JudgedDecision(NamedTuple):
    """What policy wanted because of one incident, and whether it was right; ``approved``: by a person, at the time."""

    action: Action
    standing: Standing
    approved: bool = False


class HoursAtStake(NamedTuple):
    """GPU-seconds over some decisions, None where none can be counted; ``cannot_tell`` of them could not."""

    gpu_seconds: float | None
    cannot_tell: int


class FaultEvidence(NamedTuple):
    """What is on record of one fault; ``approved`` of the right ones are so by a person's approval.

    ``saved`` is what the right ones that were not carried out would have saved, ``cost`` what the wrong ones would have
    cost.
    """

    precision: Precision
    approved: int
    saved: HoursAtStake
    cost: HoursAtStake


class ModeOfJobs(NamedTuple):
    """A rule that sets a mode for the fault in some jobs alone; ``where`` is its key."""

    where: str
    rule: ModeRule


class ModeStep(NamedTuple):
    """The mode of a fault now, and how to set the next one.

    ``mode`` is the most careful of its kinds of action, ``kinds`` are those that have it and ``where`` is the key that
    sets it. ``toml`` sets ``next`` for them and changes nothing else, "" where no such lines were found;
    ``in_place_of`` is the key of the table that it replaces, "" if it is added.
    """

    mode: Mode
    where: str
    kinds: tuple[AskedKind, ...]
    next: Mode | None
    toml: str
    in_place_of: str
    elsewhere: tuple[ModeOfJobs, ...]


class Assessment(NamedTuple):
    """Whether the evidence suffices for the next mode, and the sentence that says why."""

    verdict: Sufficiency
    detail: str


def asked_decision(action: Action, incident: Incident | None, now_s: float, window_s: float) -> JudgedDecision:
    """Return what is known of an action that subscribers were asked for."""
    approved = any(word.rule == "mode" and word.values.get("mode") == "approve" for word in action.policy)
    standing: Standing = "cannot_tell"
    if incident is not None and incident.state == "false":
        standing = "wrong"
    elif approved:
        standing = "pending" if now_s < action.created_s + window_s else "right"
    return JudgedDecision(action, standing, approved)


def of_incidents(decisions: Iterable[JudgedDecision]) -> list[JudgedDecision]:
    """Return one decision for each incident, in the order of the first: asking again is no further evidence."""
    found: dict[str, JudgedDecision] = {}
    for one in sorted(decisions, key=lambda one: (one.action.created_s, one.action.id)):
        first = found.setdefault(one.action.incident_id, one)
        if _ORDER.index(one.standing) < _ORDER.index(first.standing):
            found[one.action.incident_id] = one
    return list(found.values())


def by_fault(decisions: Iterable[JudgedDecision]) -> dict[str, list[JudgedDecision]]:
    """Return the decisions of each fault."""
    found: dict[str, list[JudgedDecision]] = defaultdict(list)
    for one in decisions:
        found[one.action.fault].append(one)
    return found


def faults_of(decisions: Iterable[JudgedDecision]) -> list[str]:
    """Return the faults that policy may do something about, in the catalogue's order, and others with decisions."""
    decided = {one.action.fault for one in decisions}
    known = [fault.name for fault in FAULTS if fault.action in JUDGED_KINDS or fault.name in decided]
    return known + sorted(decided - set(known))


def evidence(
    decisions: Sequence[JudgedDecision], spans: Mapping[str, Sequence[TimelineSpan]], policy: PolicySettings
) -> FaultEvidence:
    """Return what some decisions, one for each incident, say; ``spans`` are the jobs' timelines."""
    held = [one.action for one in decisions if one.action.state in JUDGED_STATES]
    right = {one.action.id for one in decisions if one.standing == "right"}
    wrong = {one.action.id for one in decisions if one.standing == "wrong"}
    return FaultEvidence(
        precision_of(one.standing for one in decisions),
        sum(one.approved for one in decisions if one.standing == "right"),
        _summed(_saved(action, spans.get(action.job, ()), policy) for action in held if action.id in right),
        _summed(_cost(action, spans.get(action.job, ()), policy) for action in held if action.id in wrong),
    )


def assess(counted: Precision, mode: Mode, settings: AccountSettings) -> Assessment:
    """Return whether the outcomes suffice for the mode after ``mode``: absence of evidence never does."""
    following = NEXT.get(mode, "act")
    limit = settings.act_precision_min if following == "act" else settings.approve_precision_min
    known = counted.right + counted.wrong
    interval = counted.interval
    verdict: Sufficiency
    if interval is None or known < settings.step_decisions_min:
        verdict = "cannot_tell"
        decisions = "decision" if known == 1 else "decisions"
        said = f"{known} {decisions} with a known outcome, {settings.step_decisions_min} needed"
    else:
        said = f"{counted.right} of {known} right: at least {interval[0]:.2f} with 95% confidence"
        verdict = "suffices" if interval[0] >= limit else "falls_short"
        if verdict == "suffices":
            said = f"{said}, and {following} needs {limit:.2f}"
        else:
            more = _more(counted, limit)
            said = f"{said}, and {following} needs {limit:.2f}; {more} more right and none wrong would do"
    return Assessment("acts" if mode == "act" else verdict, said)


def step(policy: PolicySettings, fault: str) -> ModeStep:
    """Return the fault's mode and the lines that set the next one, checked against all rules of the policy."""
    found = {kind: mode_of(policy.mode, policy.modes, "", fault, kind) for kind in KINDS}
    mode = max((one.mode for one in found.values()), key=lambda mode: CAREFULNESS[mode])
    kinds = tuple(kind for kind, one in found.items() if one.mode == mode)
    rules = [(f"policy.modes[{place}]", rule) for place, rule in enumerate(policy.modes)]
    elsewhere = tuple(
        ModeOfJobs(where, rule)
        for where, rule in rules
        if not matches(rule.jobs, "") and (not rule.faults or fault in rule.faults)
    )
    following = NEXT.get(mode)
    toml, in_place_of = "", ""
    if following is not None:
        for place, new in _changes(policy.modes, fault, mode, following, kinds, [one.rule for one in elsewhere]):
            after = list(policy.modes)
            if place is None:
                after += new
            else:
                after[place : place + 1] = new[:1]
                after += new[1:]
            if _takes_the_step(policy, after, fault, following, kinds):
                toml = "\n\n".join(map(_toml, new))
                in_place_of = "" if place is None else f"policy.modes[{place}]"
                break
    return ModeStep(mode, found[kinds[0]].where, kinds, following, toml, in_place_of, elsewhere)


def _changes(
    rules: Sequence[ModeRule],
    fault: str,
    mode: Mode,
    following: Mode,
    kinds: Sequence[AskedKind],
    of_jobs: Sequence[ModeRule],
) -> Iterator[tuple[int | None, list[ModeRule]]]:
    """Yield rules that may set the next mode, the plainest first, with the place of the rule that the first replaces.

    A rule that names some jobs is said again for this fault where the new one would come before it.
    """
    again = [replace(rule, faults=[fault]) for rule in of_jobs]
    for place, rule in enumerate(rules):
        if rule.faults == [fault] and rule.mode == mode and matches(rule.jobs, ""):
            yield place, [replace(rule, mode=following)]
    for names in ({}, {"kinds": list(kinds)}, {"kinds": list(kinds), "jobs": ["*"]}):
        if len(kinds) == len(KINDS) or names:
            rule = ModeRule(mode=following, faults=[fault], **names)
            yield None, [rule]
            if again:
                yield None, [rule, *again]


def _takes_the_step(
    policy: PolicySettings, rules: Sequence[ModeRule], fault: str, following: Mode, kinds: Sequence[AskedKind]
) -> bool:
    """Return whether the rules set the next mode for these kinds of action, and leave all that differs as it is."""
    rules_before, rules_after = (
        [rule for rule in some if not rule.faults or fault in rule.faults] for some in (policy.modes, rules)
    )
    patterns = {pattern for rule in rules_before if not matches(rule.jobs, "") for pattern in rule.jobs}
    for kind in KINDS:
        usual = mode_of(policy.mode, rules_before, "", fault, kind)
        for job in ("", *patterns):  # a glob pattern stands for the jobs that it matches
            before = mode_of(policy.mode, rules_before, job, fault, kind)
            wanted = following if before == usual and kind in kinds else before.mode
            if mode_of(policy.mode, rules_after, job, fault, kind).mode != wanted:
                return False
    return True


def _toml(rule: ModeRule) -> str:
    lists = {"jobs": rule.jobs, "faults": rule.faults, "kinds": rule.kinds}
    lines = [f"{key} = {json.dumps(names, ensure_ascii=False)}" for key, names in lists.items() if names]
    return "\n".join(["[[policy.modes]]", *lines, f'mode = "{rule.mode}"'])


def _more(counted: Precision, limit: float) -> str:
    """Return how many right decisions in a row bring the interval's lower end to the limit."""

    def reached(more: int) -> bool:
        interval = wilson(counted.right + more, counted.right + counted.wrong + more)
        return interval is not None and interval[0] >= limit

    more = bisect_left(range(MORE_MAX), True, key=reached)
    return str(more) if more < MORE_MAX else f"over {MORE_MAX}"


def _summed(amounts: Iterable[float | None]) -> HoursAtStake:
    all_of_them = list(amounts)
    counted = [amount for amount in all_of_them if amount is not None]
    return HoursAtStake(sum(counted) if counted else None, len(all_of_them) - len(counted))


def _saved(action: Action, spans: Sequence[TimelineSpan], policy: PolicySettings) -> float | None:
    """Return the GPU-seconds that the job lost to the incident after the action, less what the restart would have cost.

    A stopped job has to start again anyway, so that of a restart only the wait for nodes counts. None where it cannot
    be told: the job's GPUs are not known, no time of it is put down to the incident, or the action comes into effect
    only when the job restarts by itself.
    """
    fault = BY_NAME.get(action.fault)
    at = _at(spans, action.created_s)
    if fault is None or at is None or at.gpus is None or not action.restart:
        return None
    stops = fault.trouble == "stop"
    parts = ("stopped", "down") if stops else ("slow",)
    mine = [span for span in spans if span.cause is not None and span.cause.incident_id == action.incident_id]
    lost = [
        loss.amount
        for loss in goodput.losses(goodput.clipped(mine, action.created_s, float("inf")))
        if loss.part in parts
    ]
    if not mine or any(amount.uncounted_s for amount in lost):
        return None
    terms = policy.for_job(action.job)
    restart_s = terms.queue_s if stops else terms.queue_s + terms.restart_s + terms.lost_work_s
    return max(0.0, sum(amount.gpu_seconds for amount in lost) - restart_s * at.gpus)


def _cost(action: Action, spans: Sequence[TimelineSpan], policy: PolicySettings) -> float | None:
    """Return the GPU-seconds that a restart for nothing would have cost; None where that cannot be told."""
    at = _at(spans, action.created_s)
    if at is None or at.gpus is None or not action.restart:
        return None
    terms = policy.for_job(action.job)
    return at.gpus * (terms.queue_s + terms.restart_s + terms.lost_work_s)


def _at(spans: Sequence[TimelineSpan], time_s: float) -> TimelineSpan | None:
    return next((span for span in spans if span.start_s <= time_s < span.end_s), None)
