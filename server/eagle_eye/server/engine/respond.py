"""One step from judgements to what is to be written down: incidents folded, actions asked for or ended. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from eagle_eye.server.engine import incidents as folding
from eagle_eye.server.engine.engine import Judgement
from eagle_eye.server.engine.gathering import Gathering, reason_to_wait, wanted
from eagle_eye.server.engine.policy import Decision, Situation, decide
from eagle_eye.server.engine.recurrence import recurrences
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.records import Action, ActionState, Evidence, Incident

_ASKED_AS: dict[str, ActionState] = {"observe": "would_act", "approve": "awaiting", "act": "requested"}
_FRUITLESS_STATES = ("failed", "refused", "rejected", "expired")


@dataclass(frozen=True, slots=True)
class Book:
    """What is on record: incidents that are open or were marked false, the policy window's actions (oldest first).

    ``history`` are all jobs' incidents of the past weeks, ``gathering`` what is known of evidence.
    """

    incidents: Sequence[Incident]
    actions: Sequence[Action]
    history: Sequence[Incident] = ()
    gathering: Gathering = field(default_factory=Gathering)


@dataclass(frozen=True, slots=True)
class Response:
    """What is new or has changed because of one judgement; every record is whole."""

    incidents: tuple[Incident, ...]
    actions: tuple[Action, ...]
    evidence: tuple[Evidence, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything is to be written."""
        return bool(self.incidents or self.actions or self.evidence)


class _Followed(NamedTuple):
    """An incident as policy leaves it, and what is asked of subscribers and agents because of it."""

    incident: Incident
    action: Action | None = None
    evidence: tuple[Evidence, ...] = ()


def respond(
    judgement: Judgement,
    book: Book,
    settings: PolicySettings,
    fleet_size: int,
    blind: str,
    new_id: Callable[[str], str],
) -> Response:
    """Return what follows from a judgement of one job.

    ``new_id`` makes an identifier from a prefix. ``blind`` says why the server cannot judge at all, "" when it can.
    """
    now_s = judgement.now_s
    recurrent = recurrences(judgement, book.history, fleet_size)
    judgement = dataclasses.replace(judgement, verdicts=(*judgement.verdicts, *recurrent))
    actions = {action.id: action for action in book.actions if action.job == judgement.job}
    ended = {a.id: a for a in (_expired(action, now_s) for action in actions.values()) if a is not None}
    actions.update(ended)
    acting = {(a.job, a.attempt) for a in actions.values() if a.restart and a.state in ("accepted", "running", "done")}
    known = {i.id: i for i in book.incidents if i.job == judgement.job}
    changed = {
        i.id: i for i in folding.fold(known.values(), judgement, acting, settings.verdict_gone_s, lambda: new_id("inc"))
    }
    asked: list[Action] = []
    evidence: list[Evidence] = []
    for incident in {**known, **changed}.values():
        latest, action, gathered = _follow(
            incident,
            judgement,
            [*book.actions, *ended.values(), *asked],
            settings,
            fleet_size,
            blind,
            new_id,
            book.gathering,
        )
        evidence += gathered
        if latest != known.get(incident.id):
            changed[incident.id] = latest
        if action is not None and action.id in actions:
            ended[action.id] = action
        elif action is not None:
            asked.append(action)
    return Response(tuple(changed.values()), (*ended.values(), *asked), tuple(evidence))


def _follow(
    incident: Incident,
    judgement: Judgement,
    actions: Sequence[Action],
    settings: PolicySettings,
    fleet_size: int,
    blind: str,
    new_id: Callable[[str], str],
    gathering: Gathering,
) -> _Followed:
    """Return the incident as policy leaves it, with what is asked for or withdrawn because of it."""
    own = next((a for a in reversed(actions) if a.incident_id == incident.id), None)
    if incident.state not in folding.OPEN_STATES:
        # A job that has moved on may have done so because of our request, whose reports are still on their way.
        untouched = ("awaiting", "requested") if incident.attempt == judgement.attempt else ("awaiting",)
        withdrawn = own is not None and own.state in untouched
        return _Followed(incident, _moved(own, "withdrawn", judgement.now_s) if own and withdrawn else None)
    if incident.state == "acting":
        if own is None or own.state in _FRUITLESS_STATES:
            why = f"action {own.id} ended as {own.state}" if own else "its action is not on record"
            return _Followed(msgspec.structs.replace(incident, state="open", hold=why, updated_s=judgement.now_s))
        return _Followed(incident)
    if incident.attempt != judgement.attempt:
        return _Followed(incident)
    situation = Situation(
        settings=settings,
        actions=actions,
        fleet_size=fleet_size,
        members=judgement.members,
        job_state=judgement.state,
        restart_owner=judgement.restart_owner,
        blind=blind,
        now_s=judgement.now_s,
    )
    decision = decide(incident, situation)
    if own is not None or decision.kind in ("notify", "none") or decision.hold:
        kept = msgspec.structs.replace(incident, action=decision.kind, hold=decision.hold)
        return _Followed(incident if own is not None else kept)
    evidence = wanted(incident, decision, judgement, gathering, new_id)
    wait = reason_to_wait(incident, evidence, gathering, judgement.now_s) if settings.mode == "act" else ""
    if wait:
        kept = msgspec.structs.replace(incident, action=decision.kind, hold=wait)
        return _Followed(kept, evidence=evidence)
    action = _asked(incident, decision, judgement, settings, new_id("act"))
    state = "open" if action.state == "would_act" else "acting"
    hold = "observe mode: nothing is asked of anyone" if action.state == "would_act" else ""
    latest = msgspec.structs.replace(incident, action=decision.kind, hold=hold, state=state, updated_s=judgement.now_s)
    return _Followed(latest, action, evidence)


def _asked(
    incident: Incident, decision: Decision, judgement: Judgement, settings: PolicySettings, action_id: str
) -> Action:
    return Action(
        id=action_id,
        incident_id=incident.id,
        kind=decision.kind,
        job=incident.job,
        attempt=incident.attempt,
        exclude=list(decision.exclude),
        restart=decision.restart,
        fault=incident.fault,
        confidence=incident.confidence,
        onset_s=incident.onset_s,
        detected_s=incident.detected_s,
        expires_s=judgement.now_s + settings.expires_s,
        repair=decision.repair,
        summary=incident.summary,
        evidence=incident.evidence,
        ranks=list(judgement.ranks),
        state=_ASKED_AS[settings.mode],
        node=incident.node,
        created_s=judgement.now_s,
        updated_s=judgement.now_s,
    )


def _expired(action: Action, now_s: float) -> Action | None:
    """Return the action as expired when its time ran out before anybody began it."""
    if action.state in ("awaiting", "requested") and now_s >= action.expires_s:
        return _moved(action, "expired", now_s)
    return None


def _moved(action: Action, state: ActionState, now_s: float) -> Action:
    return msgspec.structs.replace(action, state=state, updated_s=now_s)
