"""/api/v1/actions: requests to subscribers, their reports, and people's approval."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Protocol

from fastapi import APIRouter, Depends, Query, Response

from eagle_eye.schema.action import ActionClaim, ActionKind
from eagle_eye.server.api import views
from eagle_eye.server.api.requests import (
    Body,
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
from eagle_eye.server.delivery.claims import claimed
from eagle_eye.server.engine import ledger
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import IllegalTransition, Refusal
from eagle_eye.server.model.records import Action, ActionState, Node, NodeState, OutboundEvent
from eagle_eye.server.security.auth import Principal
from eagle_eye.server.store.store import ACTIONS, NODES, Change, Store

router = APIRouter(prefix="/api/v1/actions", tags=["actions"])


class Needs(Protocol):
    """The server's components that this module uses."""

    clock: Clock
    config: ServerConfig
    store: Store


Parts = Annotated[Needs, Depends(services)]


@router.get("")
def list_actions(
    parts: Parts,
    _: Reader,
    job: str | None = None,
    node: str | None = None,
    state: ActionState | None = None,
    kind: ActionKind | None = None,
    incident: Annotated[str | None, Query(description="An incident's id.")] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Response:
    """Actions, newest first; ``node`` finds those that exclude it."""
    filters = given(job=job, node=node, state=state, kind=kind, incident_id=incident)
    page = parts.store.page(ACTIONS, filters, cursor, limit)
    return listing(page, lambda record: views.action(record, parts.config.public_url))


@router.get("/{action}")
def get_action(parts: Parts, _: Reader, action: str) -> Response:
    """One action with every report on it."""
    return _shown(parts, found(parts, ACTIONS, action))


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
            return claimed(record, given, principal.who, parts.clock.now_s())
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

    def announce(record: Action) -> tuple[OutboundEvent, ...]:
        return (outbound.action_requested(record, parts.config.public_url, parts.clock.now_s()),)

    return _changed(
        parts,
        principal,
        action,
        "approve",
        lambda record: ledger.approve(record, parts.clock.now_s()),
        announce=announce,
    )


@router.post("/{action}/reject")
def reject(parts: Parts, principal: Operator, action: str) -> Response:
    """Decide against an action that awaits a person's word."""
    return _changed(parts, principal, action, "reject", lambda record: ledger.reject(record, parts.clock.now_s()))


def _changed(
    parts: Needs,
    principal: Principal,
    action_id: str,
    verb: str,
    transition: Callable[[Action], Action],
    detail: str = "",
    announce: Callable[[Action], tuple[OutboundEvent, ...]] = lambda _: (),
) -> Response:
    """Write the action after ``transition``, with its audit entry and events, unless nothing changes."""

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
            audited(parts, principal, "drain" if node.state == "draining" else "exclude", node.node, node.reason)
            for node in out
        )
        return Change(actions=(new,), nodes=out, events=announce(new), audit=(entry, *moved))

    parts.store.update(change)
    return _shown(parts, found(parts, ACTIONS, action_id))


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


def _shown(parts: Needs, record: Action) -> Response:
    return answer(views.action(record, parts.config.public_url))
