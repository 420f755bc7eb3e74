"""Compares the actions that would have been taken with what happened afterwards, to validate verdicts. Pure.

Actions that were kept in observe mode, rejected by a person or left to expire were not carried out, so what happened to
the node afterwards shows whether they would have been right. For actions that were carried out this cannot be known.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from eagle_eye.detectors.faults import BY_NAME
from eagle_eye.server.model.account_records import Attempt, Ticket
from eagle_eye.server.model.records import Action, AuditEntry, Incident, NodeCheck
from eagle_eye.server.store.store import OPEN_INCIDENT_STATES

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
