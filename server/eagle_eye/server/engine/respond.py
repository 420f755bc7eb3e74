"""One step from judgements to records: folds incidents, requests or ends actions. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from eagle_eye.server.engine import escalation, flapping
from eagle_eye.server.engine import incidents as folding
from eagle_eye.server.engine.derived_ids import OpenedIncident, WantedAction
from eagle_eye.server.engine.gathering import Gathering, reason_to_wait, wanted
from eagle_eye.server.engine.hold_rules import OBSERVED, maintenance_hold
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.engine.policy import Weighing, weigh
from eagle_eye.server.engine.recurrence import recurrences
from eagle_eye.server.engine.repeated_ends import with_repeated_ends
from eagle_eye.server.engine.ruling import PlannedAction
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.engine.situation import (
    ASKED_STATES,
    FRUITLESS_STATES,
    Situation,
    by_age,
    outcome_words,
    resume_from,
)
from eagle_eye.server.model.records import Action, ActionState, EvidenceRequest, Incident, Node

REPORTS_ARRIVE_S = 15.0  # subscribers report at once what they begin, and again soon if that did not arrive
_ASKED_AS: dict[str, ActionState] = {"observe": "would_act", "approve": "awaiting", "act": "requested"}


@dataclass(frozen=True, slots=True)
class Book:
    """The records: incidents that are open or were marked false, the policy window's actions (oldest first).

    ``history`` are all jobs' incidents of the past weeks, ``earlier`` the job's own in any state, if its ranks have
    ended with an exception; ``gathering`` is the state of evidence requests. ``standing``, ``neighbours``,
    ``elsewhere`` and ``switch_of`` are as in ``Situation``.
    """

    incidents: Sequence[Incident]
    actions: Sequence[Action]
    history: Sequence[Incident] = ()
    earlier: Sequence[Incident] = ()
    gathering: Gathering = field(default_factory=Gathering)
    standing: Mapping[str, Node] = field(default_factory=dict)
    neighbours: Mapping[str, Sequence[str]] = field(default_factory=dict)
    elsewhere: Sequence[Incident] = ()
    switch_of: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Response:
    """New or changed records after one judgement; every record is complete."""

    incidents: tuple[Incident, ...]
    actions: tuple[Action, ...]
    evidence: tuple[EvidenceRequest, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to write."""
        return bool(self.incidents or self.actions or self.evidence)


class _Followed(NamedTuple):
    """An incident after policy, and the requests to subscribers and agents that follow from it."""

    incident: Incident
    action: Action | None = None
    evidence: tuple[EvidenceRequest, ...] = ()


def respond(
    judgement: Judgement,
    book: Book,
    settings: PolicySettings,
    fleet_size: int,
    blind: str,
    evidence_id: Callable[[], str],
    incident_id: Callable[[OpenedIncident], str],
    action_id: Callable[[WantedAction], str],
) -> Response:
    """Return the response to a judgement of one job.

    ``evidence_id``, ``incident_id`` and ``action_id`` make the ids of new records. ``blind`` says why the server cannot
    judge at all, "" if it can.
    """
    now_s = judgement.now_s
    recurrent = recurrences(judgement, book.history, fleet_size)
    judgement = dataclasses.replace(judgement, verdicts=(*judgement.verdicts, *recurrent))
    judgement = with_repeated_ends(judgement, book.earlier, settings.repeat_window_s)
    actions = {action.id: action for action in book.actions if action.job == judgement.job}
    ended = {a.id: a for a in (_expired(action, now_s) for action in actions.values()) if a is not None}
    actions.update(ended)
    acting = _restarted_until_s(actions.values(), judgement)
    known = {i.id: i for i in book.incidents if i.job == judgement.job}
    changed = {i.id: i for i in folding.fold(known.values(), judgement, acting, settings, incident_id)}
    asked: list[Action] = []
    evidence: list[EvidenceRequest] = []
    incidents = {**known, **changed}
    opened = dataclasses.replace(book, incidents=[i for i in incidents.values() if i.state in folding.OPEN_STATES])
    for incident in incidents.values():
        current = {action.id: action for action in (*book.actions, *ended.values(), *asked)}
        by_now = dataclasses.replace(opened, actions=list(current.values()))
        situation = situation_of(judgement, by_now, settings, fleet_size, blind)
        latest, action, gathered = _follow(incident, judgement, situation, book.gathering, evidence_id, action_id)
        evidence += gathered
        if latest != known.get(incident.id):
            changed[incident.id] = latest
        if action is not None and action.id in actions:
            ended[action.id] = action
        elif action is not None:
            asked.append(action)
    return Response(tuple(changed.values()), (*ended.values(), *asked), tuple(evidence))


def _restarted_until_s(actions: Iterable[Action], judgement: Judgement) -> dict[tuple[str, int], float]:
    """Return by (job, attempt) until when a stop is due to our restart (Unix time), infinity while one is under way.

    A completed restart ends with a later step of the same attempt: where replicas are replaced one by one, the attempt
    does not change.
    """
    until_s: dict[tuple[str, int], float] = {}
    for action in actions:
        if action.restart and action.state in ("accepted", "running", "done"):
            went_on = (
                action.state == "done"
                and judgement.attempt == action.attempt
                and judgement.stepping
                and judgement.advanced_s > action.updated_s
            )
            key = (action.job, action.attempt)
            until_s[key] = max(until_s.get(key, 0.0), action.updated_s if went_on else math.inf)
    return until_s


def situation_of(judgement: Judgement, book: Book, settings: PolicySettings, fleet_size: int, blind: str) -> Situation:
    """Return policy's input besides the incident."""
    return Situation(
        settings=settings,
        actions=book.actions,
        fleet_size=fleet_size,
        members=judgement.members,
        job_state=judgement.state,
        restart_owner=judgement.restart_owner,
        blind=blind,
        now_s=judgement.now_s,
        ranks=judgement.ranks,
        standing=book.standing,
        neighbours=book.neighbours,
        crashed=judgement.crashed,
        hearing=judgement.hearing,
        ends_s=judgement.ends_s,
        incidents=[i for i in book.incidents if i.job == judgement.job and i.state in folding.OPEN_STATES],
        gpu_models=judgement.gpu_models,
        checkpoints=judgement.checkpoints,
        pace_left_ratio=judgement.pace_left_ratio,
        elsewhere=book.elsewhere,
        switch_of=book.switch_of,
    )


def _follow(
    incident: Incident,
    judgement: Judgement,
    situation: Situation,
    gathering: Gathering,
    evidence_id: Callable[[], str],
    action_id: Callable[[WantedAction], str],
) -> _Followed:
    """Return the incident after policy, with the actions requested or withdrawn because of it."""
    now_s = judgement.now_s
    asked = by_age(a for a in situation.actions if a.incident_id == incident.id and a.state != "withdrawn")
    own = next((a for a in reversed(asked) if not a.preliminary), None)
    if incident.state not in folding.OPEN_STATES:
        why = _why_void(incident, judgement, own)
        return _Followed(incident, _withdrawn(own, why, now_s) if own and why else None)
    stopped = _kept_back(incident, asked[-1], situation) if asked and incident.attempt == judgement.attempt else None
    if stopped is not None:
        return stopped
    if incident.state == "acting" or (own is not None and own.state in ASKED_STATES):
        return _Followed(_acted_on(incident, own, situation))
    if incident.attempt != judgement.attempt:
        return _Followed(incident)
    if own is not None and own.state not in FRUITLESS_STATES:
        return _Followed(incident)  # recorded in observe mode
    return _weighed(incident, judgement, situation, gathering, evidence_id, action_id)


def _why_void(incident: Incident, judgement: Judgement, own: Action | None) -> str:
    """Return why the request of an incident that is over is withdrawn, "" if it is not."""
    if own is None or own.state not in ("awaiting", "requested"):
        return ""
    if own.state == "requested" and incident.attempt != judgement.attempt:
        # The job may have moved on because of this very request, whose reports are still to arrive.
        if incident.ended_s is None or judgement.now_s - incident.ended_s < REPORTS_ARRIVE_S:
            return ""
        return f"nobody took it up, and the job is in attempt {judgement.attempt}"
    return f"it is incident {incident.merged_into}" if incident.merged_into else f"the incident is {incident.state}"


def _weighed(
    incident: Incident,
    judgement: Judgement,
    situation: Situation,
    gathering: Gathering,
    evidence_id: Callable[[], str],
    action_id: Callable[[WantedAction], str],
) -> _Followed:
    """Return the incident with the policy rules' results, and the request if no rule holds."""
    now_s = situation.now_s
    if flapping.is_lull(incident, situation.settings, now_s):
        why = f"it comes and goes ({incident.flaps} times) and is not seen at the moment: nothing is asked for"
        return _Followed(msgspec.structs.replace(incident, hold=why, hold_rule="flapping"))
    weighing = weigh(incident, situation)
    decision = weighing.decision
    kept = msgspec.structs.replace(
        incident, action=decision.kind, hold=decision.hold, hold_rule=decision.rule if decision.hold else ""
    )
    kept = escalation.escalated(kept, escalation.exhausted(incident, situation), now_s)
    if decision.kind in ("notify", "none") or decision.hold:
        return _Followed(kept)
    if decision.first is not None:
        action = _asked(incident, weighing, situation, action_id)
        why = next(word.reason for word in weighing.words if word.rule == "checkpoint_first")
        return _Followed(msgspec.structs.replace(kept, hold=why, hold_rule="checkpoint_first"), action)
    evidence = wanted(incident, decision, judgement, gathering, evidence_id)
    wait = reason_to_wait(incident, evidence, gathering, now_s) if decision.mode == "act" else ""
    if wait:
        return _Followed(msgspec.structs.replace(kept, hold=wait, hold_rule="evidence_first"), evidence=evidence)
    action = _asked(incident, weighing, situation, action_id)
    if action.state == "would_act":
        latest = msgspec.structs.replace(kept, hold=OBSERVED, hold_rule="mode", updated_s=now_s)
    else:
        latest = escalation.taken_up(msgspec.structs.replace(kept, state="acting", updated_s=now_s))
    return _Followed(latest, action, evidence)


def _kept_back(incident: Incident, asked: Action, situation: Situation) -> _Followed | None:
    """Return the result for a request not yet accepted when a maintenance window has opened, else None."""
    if asked.state not in ("awaiting", "requested"):
        return None
    plan = PlannedAction(asked.kind, exclude=tuple(asked.exclude), restart=asked.restart)
    why = maintenance_hold(incident, situation, plan)
    if not why:
        return None
    now_s = situation.now_s
    held = msgspec.structs.replace(incident, state="confirmed", hold=why, hold_rule="maintenance", updated_s=now_s)
    return _Followed(held, _withdrawn(asked, why, now_s))


def _acted_on(incident: Incident, own: Action | None, situation: Situation) -> Incident:
    """Return the incident while its action is under way or done; unchanged once it is escalated to people."""
    now_s = situation.now_s
    if own is None:
        rule, why = "action_lost", "its action is not on record: look at the subscriber, then resolve it"
        look = why
    elif own.state in FRUITLESS_STATES:
        rule, why = "tries", outcome_words(own)
        look = escalation.exhausted(incident, situation)
    elif why := escalation.unspoken(own, situation):
        rule, look = "report", why
    elif incident.state == "acting":
        return incident
    else:
        reported = msgspec.structs.replace(incident, state="acting", hold="", hold_rule="", updated_s=now_s)
        return escalation.taken_up(reported)
    if (incident.state, incident.hold_rule) != ("confirmed", rule):
        incident = msgspec.structs.replace(incident, state="confirmed", hold=why, hold_rule=rule, updated_s=now_s)
    return escalation.escalated(incident, look, now_s)


def _asked(
    incident: Incident, weighing: Weighing, situation: Situation, action_id: Callable[[WantedAction], str]
) -> Action:
    """Return the decision as an action, or the action to request first."""
    decision, now_s = weighing.decision, situation.now_s
    first = decision.first is not None
    lasts_s = situation.settings.expires_s
    if first:
        lasts_s = min(lasts_s, situation.settings.for_job(incident.job).checkpoint_wait_s)
    kind, exclude = decision.first or decision.kind, () if first else decision.exclude
    return Action(
        id=action_id(WantedAction(incident.job, incident.attempt, kind, exclude)),
        incident_id=incident.id,
        kind=kind,
        job=incident.job,
        attempt=incident.attempt,
        exclude=list(exclude),
        restart=decision.restart and not first,
        fault=incident.fault,
        confidence=incident.confidence,
        onset_s=incident.onset_s,
        detected_s=incident.detected_s,
        expires_s=now_s + lasts_s,
        repair=decision.repair,
        summary="; ".join((incident.summary, *decision.notes)),
        evidence=incident.evidence,
        ranks=list(situation.ranks),
        state=_ASKED_AS[decision.mode],
        node=incident.node,
        created_s=now_s,
        updated_s=now_s,
        preliminary=first,
        policy=[word for word in weighing.words if word.outcome != "not_applicable"],
        resume_from=resume_from(incident, situation, decision.exclude) if decision.restart and not first else None,
        restart_scope=None if first else decision.restart_scope,
    )


def _expired(action: Action, now_s: float) -> Action | None:
    """Return the action as expired if its time ran out before it was begun."""
    if action.state in ("awaiting", "requested") and now_s >= action.expires_s:
        return _moved(action, "expired", now_s)
    return None


def _withdrawn(action: Action, why: str, now_s: float) -> Action:
    return msgspec.structs.replace(_moved(action, "withdrawn", now_s), reason=why)


def _moved(action: Action, state: ActionState, now_s: float) -> Action:
    return msgspec.structs.replace(action, state=state, updated_s=now_s)
