"""One step from judgements to records: folds incidents, gathers evidence, requests or ends actions. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from eagle_eye.detectors.faults import BY_NAME
from eagle_eye.detectors.types import Evidence, Verdict
from eagle_eye.schema.action import EvidenceItem
from eagle_eye.server.engine import incidents
from eagle_eye.server.engine import incidents as folding
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.engine.policy import OBSERVED, Decision, Weighing, maintenance_hold, weigh
from eagle_eye.server.engine.rules import (
    ASKED_STATES,
    FRUITLESS_STATES,
    PlannedAction,
    Situation,
    by_age,
    outcome_words,
    own_actions,
    resume_from,
)
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import (
    Action,
    ActionState,
    EvidenceRequest,
    Incident,
    Node,
    OpenedIncident,
    WantedAction,
)

# Requests evidence before an action destroys it: which nodes to ask, and how long to wait.
#
# Agents gather within seconds. An action that stops a job is held back until they have, or for ``wait_s`` at most.

DESTRUCTIVE = frozenset({"exclude_node", "restart_job"})  # a drain waits for the job's end, other actions touch nothing
ASKED_BY = "server"  # the requester if no person is
LATE_S = 600.0  # how long a request may be handed out and answered after its deadline


@dataclass(frozen=True, slots=True)
class Gathering:
    """The evidence state that ``respond`` uses; the default asks no agent.

    ``gatherers`` are the nodes whose agents can gather, each with when it was last heard. ``asked`` are the requests on
    record for the job's open incidents. ``within_s`` is the time given to agents, ``wait_s`` 0: act at once.
    """

    gatherers: Mapping[str, float] = field(default_factory=dict)
    asked: Sequence[EvidenceRequest] = ()
    wait_s: float = 0.0
    within_s: float = 3.0
    nodes_max: int = 32


def wanted(
    incident: Incident, decision: Decision, judgement: Judgement, gathering: Gathering, new_id: Callable[[], str]
) -> tuple[EvidenceRequest, ...]:
    """Return the requests made by the incident's first decision to act; none if they were made before.

    The suspects are asked, and the nodes that leave with them.
    """
    if decision.kind not in DESTRUCTIVE or any(e.incident_id == incident.id for e in _ours(gathering.asked)):
        return ()
    leaving = dict.fromkeys((*suspects(incident, judgement), *decision.exclude))
    nodes = [node for node in leaving if node in gathering.gatherers]
    return tuple(
        EvidenceRequest(
            id=new_id(),
            incident_id=incident.id,
            node=node,
            job=incident.job,
            attempt=incident.attempt,
            kind="evidence",
            state="asked",
            within_seconds=gathering.within_s,
            asked_by=ASKED_BY,
            created_s=judgement.now_s,
            updated_s=judgement.now_s,
            expires_s=judgement.now_s + gathering.within_s + LATE_S,
        )
        for node in nodes[: gathering.nodes_max]
    )


def suspects(incident: Incident, judgement: Judgement) -> list[str]:
    """Return the nodes that an incident concerns, the accused first; if it names none, all of the job's by rank."""
    if incident.nodes:
        return sorted(incident.nodes, key=lambda node: node != incident.node)
    return list(dict.fromkeys(member.node for member in sorted(judgement.ranks, key=attrgetter("rank"))))


def reason_to_wait(incident: Incident, asked: Sequence[EvidenceRequest], gathering: Gathering, now_s: float) -> str:
    """Return why an action has to wait, or "".

    No wait for a fact (its proof is in the kernel log, which no restart erases, or the process is dead), for an agent
    not heard for as long as the wait, or beyond ``wait_s``; nor for a node that is silent by the incident's own claim.
    """
    if incident.fact:
        return ""
    mute = incident.nodes if incident.fault == "node_unreachable" else []
    awaited = [
        evidence.node
        for evidence in _ours((*gathering.asked, *asked))
        if evidence.incident_id == incident.id
        and evidence.state == "asked"
        and evidence.node not in mute
        and 0 <= now_s - evidence.created_s < gathering.wait_s  # a clock that was set back must not hold anything
        and now_s - gathering.gatherers.get(evidence.node, float("-inf")) <= gathering.wait_s
    ]
    if not awaited:
        return ""
    more = f" and {len(awaited) - 1} more" if len(awaited) > 1 else ""
    return f"evidence is gathered on {awaited[0]}{more}, for at most {gathering.wait_s:g} s (evidence.wait_s)"


def _ours(asked: Sequence[EvidenceRequest]) -> list[EvidenceRequest]:
    return [evidence for evidence in asked if evidence.asked_by == ASKED_BY and evidence.kind == "evidence"]


# Finds nodes that fail repeatedly across restarts and jobs (Meta's "lemon nodes").
#
# A few nodes account for most of a fleet's failures (3 of 63 nodes for more than half of all exclusions; 40 lemons of
# thousands, whose removal cut failures of large jobs from 14% to 4%; Kokolis et al., HPCA 2025). A node counts as
# recurrent if it was the culprit more often than chance explains for any node of the fleet.

HISTORY_S = 28 * 86_400.0  # the period over which Meta counts its lemons' signals
CULPRIT_MIN = 3  # incidents with the node as culprit; two may be one badly repaired fault
CHANCE_MAX = 0.01  # that any healthy node of the fleet would have as many
DISRUPTIVE = ("exclude_node", "restart_job")


def recurrences(judgement: Judgement, history: Iterable[Incident], fleet_size: int) -> list[Verdict]:
    """Return a verdict for each of the job's nodes that was the culprit too often.

    ``history`` are all jobs' incidents. Only those count that stopped or slowed a job so that an action was requested,
    in which the node was accused rather than the program, and which were not marked a false alarm; one per attempt.
    Nodes' time in use is not known here, so all nodes of the fleet are assumed to be used equally.
    """
    counted = [i for i in history if _counts(i, judgement.now_s)]
    if not counted:
        return []
    times = Counter(node for node, _, _ in {(i.node, i.job, i.attempt) for i in counted})
    members = {rank.node for rank in judgement.ranks}
    found = []
    for node in sorted(members & times.keys()):
        if times[node] >= CULPRIT_MIN:
            chance = _chance(times[node], sum(times.values()) - times[node], fleet_size)
            if chance <= CHANCE_MAX:
                mine = [i for i in counted if i.node == node]
                found.append(_verdict(judgement, node, times[node], mine, chance))
    return found


def often_accused(history: Iterable[Incident]) -> frozenset[str]:
    """Return the nodes that ``recurrences`` can report at all: the culprits of at least ``CULPRIT_MIN``."""
    times = Counter(node for node, _, _ in {(i.node, i.job, i.attempt) for i in history} if node is not None)
    return frozenset(node for node, count in times.items() if count >= CULPRIT_MIN)


def _counts(incident: Incident, now_s: float) -> bool:
    return (
        incident.node is not None
        and incident.state != "false"
        and not incident.application
        and incident.action in DISRUPTIVE
        and BY_NAME[incident.fault].trouble != "early"
        and now_s - incident.detected_s <= HISTORY_S
    )


def _chance(count: int, elsewhere: int, fleet_size: int) -> float:
    """Return the probability that some node of the fleet has ``count`` by chance, at the other nodes' rate (Poisson).

    Half an incident is added to the others' count, so that one failure is not significant in an otherwise healthy
    fleet.
    """
    nodes = max(fleet_size, 2)
    rate = (elsewhere + 0.5) / (nodes - 1)
    below = sum(math.exp(-rate + k * math.log(rate) - math.lgamma(k + 1)) for k in range(count))
    return min(nodes * max(1 - below, 0.0), 1.0)


def _verdict(judgement: Judgement, node: str, count: int, incidents: Sequence[Incident], chance: float) -> Verdict:
    faults = ", ".join(f"{fault} x{times}" for fault, times in Counter(i.fault for i in incidents).most_common(3))
    return Verdict(
        detector="recurrence",
        fault="recurrent_node",
        job=judgement.job,
        nodes=(node,),
        node=node,
        device=None,
        confidence=min(1 - chance, 0.99),
        onset_s=min(i.onset_s for i in incidents),
        summary=(
            f"{node} was the culprit in {count} attempts within {HISTORY_S / 86_400:.0f} days ({faults});"
            f" by chance that happens to a node of this fleet with probability {chance:.2g}"
        ),
        evidence=(Evidence("culprit_incidents", node, None, float(count), None, float(CULPRIT_MIN), "incidents"),),
        kinds=frozenset({"history"}),
    )


FAULT = "application_error"
OF_AN_END = frozenset({"process_crash", FAULT})  # an incident that became another fault's was that fault's effect
EXCEPTION, STEP = "exception", "train_step"


def tells_of_an_exception(judgement: Judgement) -> bool:
    """Return whether most ranks of the job ended with one exception that only the program can have raised."""
    return any(_value(verdict.evidence, EXCEPTION) for verdict in judgement.verdicts if verdict.fault in OF_AN_END)


def with_repeated_ends(judgement: Judgement, earlier: Iterable[Incident], within_s: float) -> Judgement:
    """Return the judgement with a crash that repeats an earlier attempt's replaced by ``application_error``.

    ``earlier`` are the job's incidents, in any state; those of ``within_s`` count. The exception must be the same, and
    the step no later than then: if a job gets further between two such crashes, restarts help. No claim is made about
    an exception that a person has marked as not the program's.
    """
    known = [
        incident
        for incident in earlier
        if (incident.job, incident.fault in OF_AN_END) == (judgement.job, True)
        and judgement.now_s - incident.detected_s <= within_s
    ]
    verdicts = tuple(
        _application_error(verdict, judgement, known) if verdict.fault in OF_AN_END else verdict
        for verdict in judgement.verdicts
    )
    return dataclasses.replace(judgement, verdicts=verdicts)


def _application_error(verdict: Verdict, judgement: Judgement, known: Iterable[Incident]) -> Verdict:
    exception = _value(verdict.evidence, EXCEPTION)
    alike = [incident for incident in known if exception and _value(incident.evidence, EXCEPTION) == exception]
    if any(incident.fault == FAULT and incident.state == "false" for incident in alike):
        return verdict
    before = [i for i in alike if i.attempt != judgement.attempt and _step(verdict.evidence) <= _step(i.evidence)]
    if not before:
        return verdict
    step = _step(verdict.evidence)
    where = f"at step {step:.0f}" if step >= 0 else "before the first step"
    attempts = ", ".join(str(attempt) for attempt in sorted({i.attempt for i in before}))
    return dataclasses.replace(
        verdict,
        fault=FAULT,
        nodes=(),
        node=None,
        device=None,
        asks=None,
        application=True,
        kinds=verdict.kinds | {"repetition"},
        summary=f"{exception}, {where}, ended most ranks, as in attempt {attempts}: the program, and no restart helps",
    )


def _step(evidence: Iterable[Evidence | EvidenceItem]) -> float:
    """Return the last step finished before the end, -1 if there was none."""
    step = _value(evidence, STEP)
    return step if isinstance(step, float) and step == step else -1.0


def _value(evidence: Iterable[Evidence | EvidenceItem], metric: str) -> float | str | None:
    return next((item.value for item in evidence if item.metric == metric), None)


FAILED_STATES = frozenset({"failed", "refused", "expired"})  # without a person having decided so


def exhausted(incident: Incident, situation: Situation) -> str:
    """Return a message if the last try allowed by policy failed, "" otherwise."""
    tried = [action for action in own_actions(incident, situation) if action.state in FAILED_STATES]
    last = tried[-1] if tried else None
    if last is None or len(tried) < situation.settings.tries_max or own_actions(incident, situation)[-1] != last:
        return ""
    return f"{outcome_words(last)} (attempt {len(tried)} of {situation.settings.tries_max})"


def unspoken(own: Action, situation: Situation) -> str:
    """Return a message if an action was begun and not reported on in time, "" otherwise."""
    report_s = situation.settings.report_s
    if own.state not in ("accepted", "running") or situation.now_s - own.updated_s <= report_s:
        return ""
    return (
        f"action {own.id} is {own.state} and nobody reported on it for {report_s:.0f} s (policy.report_s):"
        " look at the subscriber, and report on the action by hand"
    )


def escalated(incident: Incident, why: str, now_s: float) -> Incident:
    """Return the incident as escalated to people; the same object if it already is."""
    if not why or incident.escalation:
        return incident
    return replace(incident, escalation=why, escalated_s=now_s, updated_s=now_s)


def taken_up(incident: Incident) -> Incident:
    """Return the incident as being handled again."""
    return replace(incident, escalation="", escalated_s=None) if incident.escalation else incident


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
    if incidents.is_lull(incident, situation.settings, now_s):
        why = f"it comes and goes ({incident.flaps} times) and is not seen at the moment: nothing is asked for"
        return _Followed(msgspec.structs.replace(incident, hold=why, hold_rule="flapping"))
    weighing = weigh(incident, situation)
    decision = weighing.decision
    kept = msgspec.structs.replace(
        incident, action=decision.kind, hold=decision.hold, hold_rule=decision.rule if decision.hold else ""
    )
    kept = escalated(kept, exhausted(incident, situation), now_s)
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
        latest = taken_up(msgspec.structs.replace(kept, state="acting", updated_s=now_s))
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
        look = exhausted(incident, situation)
    elif why := unspoken(own, situation):
        rule, look = "report", why
    elif incident.state == "acting":
        return incident
    else:
        reported = msgspec.structs.replace(incident, state="acting", hold="", hold_rule="", updated_s=now_s)
        return taken_up(reported)
    if (incident.state, incident.hold_rule) != ("confirmed", rule):
        incident = msgspec.structs.replace(incident, state="confirmed", hold=why, hold_rule=rule, updated_s=now_s)
    return escalated(incident, look, now_s)


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
