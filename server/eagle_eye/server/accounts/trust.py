"""Whether what is on record of a fault suffices to let policy do more about it: observe, then approve, then act. Pure.

A decision is one incident for which policy wanted an action, however often it asked. Its outcome is the ledger's where
the action was not carried out. Where it was, only people can say: one whose incident was marked as a false alarm was
wrong; one that a person approved, and that nobody called false within the ledger's window, was right.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from msgspec.structs import replace

from eagle_eye.detectors.faults import BY_NAME, FAULTS
from eagle_eye.server.accounts import goodput
from eagle_eye.server.accounts.hindsight import JUDGED_KINDS, JUDGED_STATES, Precision, Standing, precision_of, wilson
from eagle_eye.server.accounts.settings import AccountSettings
from eagle_eye.server.accounts.timeline import TimelineSpan
from eagle_eye.server.engine.settings import CAREFULNESS, AskedKind, Mode, ModeRule, PolicySettings, matches, mode_of
from eagle_eye.server.model.records import Action, Incident

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
