"""/api/v1/actions: requests to subscribers, their reports, people's approval, and what approving one would do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
from fastapi import APIRouter, Depends, Query, Response
from msgspec.structs import replace

from eagle_eye.schema.action import ActionClaim, ActionKind
from eagle_eye.server.api import views
from eagle_eye.server.api.requests import (
    Body,
    Cell,
    Cursor,
    Limit,
    Operator,
    Reader,
    answer,
    audited,
    body_of,
    decoded,
    found,
    given,
    listing,
    missing,
    services,
)
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.delivery import events as outbound
from eagle_eye.server.delivery.events import claimed_action
from eagle_eye.server.engine import ledger
from eagle_eye.server.engine.policy import Decision, Weighing
from eagle_eye.server.engine.settings import mode_of
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.clock import Clock, rfc3339
from eagle_eye.server.model.errors import IllegalTransition, Refusal
from eagle_eye.server.model.records import Action, ActionState, Incident, Node, NodeState, RuleWord, WantedAction
from eagle_eye.server.monitor.announcements import together
from eagle_eye.server.monitor.watcher import JobProgress, Outlook
from eagle_eye.server.security.auth import Principal
from eagle_eye.server.store.store import (
    ACTIONS,
    INCIDENTS,
    NODES,
    Change,
    Store,
)

# Policy's decision on an incident, and what approving an action would do and cost. Pure.

NOT_JUDGED = "its attempt of the job is not judged any more: what the rules would say of it now is not known"


def policy_view(incident: Incident, weighing: Weighing | None, actions: Iterable[Action]) -> dict[str, Any]:
    """Return the decision and every rule's result in order, and the results when actions were requested.

    ``decision`` is null, with the reason in ``detail``, if the incident is no longer evaluated; ``hold`` and
    ``hold_rule`` are those of the incident's record. Names of values include their units.
    """
    return {
        "incident_id": incident.id,
        "job": incident.job,
        "fault": incident.fault,
        "state": incident.state,
        "hold": incident.hold,
        "hold_rule": incident.hold_rule,
        "detail": "" if weighing else NOT_JUDGED,
        "decision": _decision(weighing.decision) if weighing else None,
        "rules": msgspec.to_builtins(weighing.words) if weighing else [],
        "asked": [
            {
                "action_id": action.id,
                "created": rfc3339(action.created_s),
                "kind": action.kind,
                "state": action.state,
                "rules": msgspec.to_builtins(action.policy),
            }
            for action in actions
        ],
    }


def _decision(decision: Decision) -> dict[str, Any]:
    return {
        "kind": decision.kind,
        "exclude": list(decision.exclude),
        "restart": decision.restart,
        "mode": decision.mode,
        "first": decision.first,
        "hold": decision.hold,
        "rule": decision.rule,
        "notes": list(decision.notes),
    }


OPEN_STATES = ("suspected", "confirmed", "acting")
NO_HOLD = ("tries", "mode")  # rules whose hold a person's wish to be asked again answers
HEARD_MAX = 32  # nodes whose latest report is named


class _Budget(NamedTuple):
    """Whose budget of what a policy rule keeps, and under which names it gives what is used and the limit."""

    what: str
    of: str
    used: str
    limit: str


_BUDGETS: Mapping[str, _Budget] = MappingProxyType(
    {
        "job_exclusions": _Budget("exclusions", "job", "excluded", "exclusions_per_job"),
        "fleet_exclusions": _Budget("exclusions", "fleet", "excluded", "limit"),
        "job_restarts": _Budget("restarts", "job", "restarts", "restarts_per_job"),
        "fleet_restarts": _Budget("restarts", "fleet", "restarts", "restarts_fleet"),
    }
)


def preview(
    action: Action,
    weighing: Weighing | None,
    course: JobProgress | None,
    heard_s: Mapping[str, float],
    carriers: Sequence[Mapping[str, Any]],
    now_s: float,
) -> dict[str, Any]:
    """Return whom the action affects, what its budgets have left after it, how fresh the data is, and who hears of it.

    ``course`` is the job's progress, None if nobody reports it; ``heard_s`` is when each node was last heard;
    ``carriers`` are as ``views.carriers`` returns them. GPUs are null where no rank of theirs is known.
    """
    gpus = {(rank.node, rank.device) for rank in action.ranks}
    of_nodes = sum(node in action.exclude for node, _ in gpus)
    return {
        "action_id": action.id,
        "time": rfc3339(now_s),
        "nodes": action.exclude,
        "gpus": of_nodes or None,
        "job": action.job,
        "restart": action.restart,
        "job_nodes": len({node for node, _ in gpus}) or None,
        "job_gpus": len(gpus) or None,
        "confidence": action.confidence,
        "budgets": _budgets(action, weighing),
        "heard": [
            {"node": node, "heard": None if (time_s := heard_s.get(node)) is None else rfc3339(time_s)}
            for node in action.exclude[:HEARD_MAX]
        ],
        "job_nodes_heard": None if course is None else course.heard,
        "job_nodes_known": None if course is None else len(course.nodes),
        "progressed": None if course is None or course.progressed_s is None else rfc3339(course.progressed_s),
        "carriers": carriers,
        "hold_now": other_hold(weighing, action),
    }


def other_hold(weighing: Weighing | None, action: Action) -> str:
    """Return why policy would hold the action now, apart from its mode and from having asked for it itself.

    "": it would not, or no longer judges.
    """
    if weighing is None:
        return ""
    held = (word for word in weighing.words if word.outcome == "hold" and word.rule not in NO_HOLD)
    return next((word.reason for word in held if word.values.get("action") != action.id), "")


def asked_again(old: Action, incident: Incident, weighing: Weighing | None, now_s: float, lasts_s: float) -> Action:
    """Return an action, without an id, that asks a person for the same as ``old``, which expired.

    Raises IllegalTransition unless policy would ask for the same now, were it not for the try that expired.
    """
    if old.state != "expired":
        raise IllegalTransition(f"action {old.id} is {old.state}; only one that has expired can be asked for again")
    if incident.state not in OPEN_STATES:
        raise IllegalTransition(f"incident {incident.id} is {incident.state}: there is nothing to ask for any more")
    if weighing is None or incident.attempt != old.attempt:
        raise IllegalTransition(f"action {old.id} cannot be asked for again: {NOT_JUDGED}")
    holding = next((w for w in weighing.words if w.outcome == "hold" and w.rule not in NO_HOLD), None)
    if holding is not None:
        raise IllegalTransition(f"policy holds it now ({holding.rule}): {holding.reason}")
    decision = weighing.decision
    if decision.mode == "observe":
        raise IllegalTransition("policy only observes here now (policy.mode, policy.modes): nothing can be asked for")
    wanted = (decision.kind, decision.exclude, decision.restart)
    if wanted != (old.kind, tuple(old.exclude), old.restart):
        raise IllegalTransition(
            f"policy would ask for something else now: {decision.kind} {', '.join(decision.exclude)}".rstrip()
        )
    return replace(
        old,
        id="",
        state="awaiting",
        confidence=incident.confidence,
        summary="; ".join((incident.summary, *decision.notes)),
        evidence=incident.evidence,
        created_s=now_s,
        updated_s=now_s,
        expires_s=now_s + lasts_s,
        reports=[],
        reason="",
        policy=[word for word in weighing.words if word.outcome != "not_applicable"],
        resume_from=None,  # the steps in memory have moved on
    )


def _budgets(action: Action, weighing: Weighing | None) -> list[dict[str, Any]]:
    """Return each budget that the action draws on, with what is left of it once the action is done."""
    now = _weighed(weighing.words) if weighing is not None else {}
    then = _weighed(action.policy)
    found = []
    for rule, budget in _BUDGETS.items():
        values = now.get(rule) or then.get(rule)
        if not values:
            continue
        # What awaits approval is counted already, but was not yet when it was weighed itself.
        own = 0 if rule in now else 1 if budget.what == "restarts" else len(action.exclude)
        used, limit = values.get(budget.used), values.get(budget.limit)
        if isinstance(used, int | float) and isinstance(limit, int | float):
            window_s = values.get("window_s")
            found.append(
                {
                    "what": budget.what,
                    "of": budget.of,
                    "left": max(0, int(limit) - int(used) - own),
                    "limit": int(limit),
                    "window_seconds": window_s if isinstance(window_s, int | float) else None,
                }
            )
    return found


def _weighed(words: Iterable[RuleWord]) -> dict[str, Mapping[str, float | str | None]]:
    return {word.rule: word.values for word in words if word.outcome != "not_applicable"}


# Actions, and what subscribers and people say to them.

router = APIRouter(prefix="/api/v1/actions", tags=["actions"])


class ActionNeeds(Protocol):
    """The server's components that this module uses."""

    clock: Clock
    config: ServerConfig
    fleet: Fleet
    outlook: Outlook
    store: Store


Parts = Annotated[ActionNeeds, Depends(services)]


@router.get("")
def list_actions(
    parts: Parts,
    _: Reader,
    job: str | None = None,
    node: str | None = None,
    state: ActionState | None = None,
    kind: ActionKind | None = None,
    incident: Annotated[str | None, Query(description="An incident's id.")] = None,
    cell: Cell = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Response:
    """Actions, newest first; ``node`` finds those that exclude it."""
    filters = given(job=job, node=node, state=state, kind=kind, incident_id=incident, cell=cell)
    page = parts.store.page(ACTIONS, filters, cursor, limit)
    return listing(page, lambda record: views.action(record, parts.config.public_url))


@router.get("/{action}")
def get_action(parts: Parts, _: Reader, action: str) -> Response:
    """One action with every report on it."""
    return _shown(parts, found(parts, ACTIONS, action))


@router.get("/{action}/preview")
def preview_action(parts: Parts, _: Reader, action: str) -> Response:
    """Whom the action affects, what its budgets have left after it, how fresh the data is, and who would carry it out.

    ``carriers`` are the subscriptions that a request goes to; without any, nobody carries it out. Numbers of GPUs and
    nodes are null where the job's ranks are not known, ``heard`` and ``progressed`` where nothing was heard.
    """
    record, now_s = found(parts, ACTIONS, action), parts.clock.now_s()
    incident = parts.store.get(INCIDENTS, record.incident_id)
    heard = {node: one.received_s for node in record.exclude if (one := parts.fleet.last(node)) is not None}
    return answer(
        preview(
            record,
            None if incident is None else parts.outlook.explain(incident),
            next((course for course in parts.outlook.courses() if course.job == record.job), None),
            heard,
            views.carriers(parts.store, record, parts.config.public_url, now_s),
            now_s,
        )
    )


@router.post("/{action}/reports", openapi_extra=body_of(ActionClaim))
def report(parts: Parts, principal: Operator, action: str, body: Body) -> Response:
    """Take a subscriber's word: accepted, running, done, failed or refused. 409 where the state does not allow it.

    ``accepted`` with a ``claim``, the subscriber's name for itself, asks whether it may begin: 409 means no.
    """
    given = decoded(body, ActionClaim)
    if given.claim and given.state != "accepted":
        raise Refusal(400, "claim", f"claim: only accepted claims an action; got {given.state}")

    def reported(record: Action) -> Action:
        if given.claim:
            return claimed_action(record, given, principal.who, parts.clock.now_s())
        if given.state == "accepted" and record.state == "withdrawn":
            # Nothing has begun: it would stay accepted for ever. What has is recorded by later reports.
            raise IllegalTransition(f"action {record.id} is withdrawn; it cannot be accepted any more")
        return ledger.report_action(record, given, principal.who, parts.clock.now_s())

    if not given.claim:
        return _changed(parts, principal, action, f"report {given.state}", reported, given.detail)
    detail = f"{given.claim} (epoch {given.epoch})" if given.epoch else given.claim
    return _changed(parts, principal, action, "claim", reported, detail)


@router.post("/{action}/approve")
def approve(parts: Parts, principal: Operator, action: str) -> Response:
    """Have an action that awaits a person's word requested of the subscribers."""

    def announce(_: Store, record: Action) -> Change:
        return Change(events=(outbound.action_requested(record, parts.config.public_url, parts.clock.now_s()),))

    return _changed(
        parts,
        principal,
        action,
        "approve",
        lambda record: ledger.approve(record, parts.clock.now_s()),
        also=announce,
    )


@router.post("/{action}/reject")
def reject(parts: Parts, principal: Operator, action: str) -> Response:
    """Decide against an action that awaits a person's word."""
    return _changed(parts, principal, action, "reject", lambda record: ledger.reject(record, parts.clock.now_s()))


@router.post("/{action}/withdraw")
def withdraw(parts: Parts, principal: Operator, action: str) -> Response:
    """Take back what was approved and nobody has taken up; subscribers are told.

    While the trouble lasts, approval is asked for anew. 409 once a subscriber has accepted it, for what still awaits
    approval (reject it), and where policy acts by itself, for it would ask again at once.
    """
    settings = parts.outlook.policy()
    reason = f"withdrawn by {principal.who}"

    def taken_back(record: Action) -> Action:
        if record.state == "awaiting":
            raise IllegalTransition(f"action {record.id} awaits approval: reject it")
        if mode_of(settings.mode, settings.modes, record.job, record.fault, record.kind).mode == "act":
            raise IllegalTransition(
                f"action {record.id}: policy acts by itself here and would ask for it again at once;"
                f" resolve incident {record.incident_id} or mark it false, and it is withdrawn"
            )
        return ledger.withdraw(record, reason, parts.clock.now_s())

    def announce(store: Store, record: Action) -> Change:
        now_s = parts.clock.now_s()
        event = outbound.action_withdrawn(record, parts.config.public_url, now_s)
        incident = store.get(INCIDENTS, record.incident_id)
        if incident is None or incident.state != "acting":
            return Change(events=(event,))
        hold = f"action {record.id} was {reason}"
        waiting = replace(incident, state="confirmed", hold=hold, hold_rule="tries", updated_s=now_s)
        return Change(events=(event,), incidents=(waiting,))

    return _changed(parts, principal, action, "withdraw", taken_back, reason, announce)


@router.post("/{action}/renew")
def renew(parts: Parts, principal: Operator, action: str) -> Response:
    """Ask again for an action that expired: a new one, which awaits approval; the answer is that one.

    409 unless policy would ask for the same now, were it not for the try that expired.
    """
    old = found(parts, ACTIONS, action)
    incident = found(parts, INCIDENTS, old.incident_id)
    weighing = parts.outlook.explain(incident)
    lasts_s = parts.outlook.policy().expires_s
    renewed = asked_again(old, incident, weighing, parts.clock.now_s(), lasts_s)

    def change(store: Store) -> Change:
        later = [one for one in store.actions_of(incident.id) if one.created_s > old.created_s and not one.preliminary]
        if later:
            raise IllegalTransition(f"action {later[-1].id} was asked for since; it is {later[-1].state}")
        new = replace(renewed, id=store.new_id(WantedAction(old.job, old.attempt, old.kind, old.exclude)))
        return Change(actions=(new,), audit=(audited(parts, principal, "renew", new.id, f"after {old.id}"),))

    (new,) = parts.store.update(change).actions
    return _shown(parts, new)


def _changed(
    parts: ActionNeeds,
    principal: Principal,
    action_id: str,
    verb: str,
    transition: Callable[[Action], Action],
    detail: str = "",
    also: Callable[[Store, Action], Change] = lambda _store, _action: Change(),
) -> Response:
    """Write the action after ``transition``, with its audit entry and what follows from it, unless nothing changes."""

    def change(store: Store) -> Change:
        old = store.get(ACTIONS, action_id)
        if old is None:
            raise missing("actions", action_id)
        new = transition(old)
        if new is old:
            return Change()
        entry = audited(parts, principal, verb, action_id, detail)
        out = _taken_out(store, new, parts.clock.now_s())
        moved = (
            audited(parts, principal, "drain" if node.state == "draining" else "exclude", node.node, _cause(node, new))
            for node in out
        )
        return together([Change(actions=(new,), nodes=out, audit=(entry, *moved)), also(store, new)])

    parts.store.update(change)
    return _shown(parts, found(parts, ACTIONS, action_id))


def _cause(node: Node, action: Action) -> str:
    """Return why the node's standing changed: the report is a subscriber's, the exclusion is ours."""
    return f"{node.reason}, by Eagle Eye's action {action.id}, which was reported as done"


def _taken_out(store: Store, action: Action, now_s: float) -> tuple[Node, ...]:
    """Return the nodes that a subscriber has just excluded, in their new standing."""
    if action.state != "done":
        return ()
    reason = f"{action.fault}: {action.incident_id}"
    known = (
        store.get(NODES, name) or Node(node=name, state="in_service", reason="", updated_s=now_s)
        for name in action.exclude
    )
    state: NodeState = "draining" if action.kind == "drain_node" else "excluded"
    taken = ((node, ledger.take_out(node, action.fault, reason, state, now_s)) for node in known)
    return tuple(new for old, new in taken if new is not old or store.get(NODES, new.node) is None)


def _shown(parts: ActionNeeds, record: Action) -> Response:
    return answer(views.action(record, parts.config.public_url))
