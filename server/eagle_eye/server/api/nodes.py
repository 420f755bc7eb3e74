"""/api/v1/nodes: each node's standing, its agent's latest report, and people's actions."""

from __future__ import annotations

import asyncio
from typing import Annotated, Protocol

from fastapi import APIRouter, Depends, Query, Response
from msgspec.structs import replace

from eagle_eye.server.accounts.archive import Archive
from eagle_eye.server.api import views
from eagle_eye.server.api.node_checks import new_check
from eagle_eye.server.api.node_history import memory, scores_of
from eagle_eye.server.api.requests import (
    Body,
    Cell,
    Cursor,
    Limit,
    Operator,
    Reader,
    Reason,
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
from eagle_eye.server.delivery import events as outbound
from eagle_eye.server.engine import ledger
from eagle_eye.server.engine.ledger import ReturnRequest, fault_of, returning
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.model.records import Node, NodeState
from eagle_eye.server.monitor.cells import Cells
from eagle_eye.server.monitor.recall import Forgetting, KnownNodes
from eagle_eye.server.monitor.watcher import Outlook
from eagle_eye.server.requests.node_checks import offer_of, under_way
from eagle_eye.server.security.auth import Principal
from eagle_eye.server.store.settings import DEFAULT_CELL
from eagle_eye.server.store.store import ACTIONS, NODES, PAGE_LIMIT_MAX, Change, Store

router = APIRouter(prefix="/api/v1/nodes", tags=["nodes"])
Force = Annotated[bool, Query(description="At once, whatever stands against it.")]
Checked = Annotated[bool, Query(description="Only after a passed check, whatever policy.readmit_check says.")]


class Needs(Protocol):
    """The server's components that this module uses."""

    archive: Archive
    cells: Cells | None
    clock: Clock
    fleet: Fleet
    known_nodes: KnownNodes
    outlook: Outlook
    store: Store


Parts = Annotated[Needs, Depends(services)]


@router.get("")
def list_nodes(
    parts: Parts,
    _: Reader,
    state: NodeState | None = None,
    cell: Cell = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Response:
    """Nodes, the newest to be heard of first; with ``cell`` a page may hold fewer than ``limit``."""
    if cell not in (None, DEFAULT_CELL if parts.cells is None else parts.cells.own) and not _several(parts):
        return answer({"items": [], "next": None})
    offsets, now_s = parts.fleet.offsets(), parts.clock.now_s()
    page = parts.store.page(NODES, given(state=state), cursor, limit)
    scores = scores_of(parts)
    return listing(page, lambda n: {**views.node(n, parts.fleet, offsets, now_s), "memory": memory(scores, n.node)})


@router.post("/forget", openapi_extra=body_of(Forgetting, required=False))
async def forget(parts: Parts, principal: Operator, body: Body) -> Response:
    """Count nodes as never heard of; what the past knows of them (incidents, tickets, history) and tokens stay.

    ``nodes`` [] means all of which the rest is true, and nobody where nothing is said. ``kept`` are those that are not
    forgotten, each with a ``reason``: ``heard`` just now, ``out_of_service``, ``open_incident``, ``busy``,
    ``not_found``; with ``force`` only the last. A node that speaks again is a new one.
    """
    asked = decoded(body, Forgetting)
    if not asked.nodes and asked.unheard_for_s is None and not asked.introduced_by:
        return answer({"forgotten": [], "kept": []})
    done = await asyncio.to_thread(parts.known_nodes.forget, principal.who, asked)
    if not asked.dry_run:
        parts.fleet.forget(frozenset(done.forgotten))
    return answer({"forgotten": done.forgotten, "kept": [one._asdict() for one in done.kept]})


@router.get("/{node:name}")
def get_node(parts: Parts, _: Reader, node: str) -> Response:
    """One node."""
    return _shown(parts, node)


@router.post("/{node:name}/exclude")
def exclude(parts: Parts, principal: Operator, node: str, reason: Reason = "") -> Response:
    """Count the node as out of service until it is readmitted."""
    return _stand(parts, principal, node, "excluded", "exclude", reason)


@router.post("/{node:name}/drain")
def drain(parts: Parts, principal: Operator, node: str, reason: Reason = "") -> Response:
    """Count the node as leaving once its job ends or restarts."""
    return _stand(parts, principal, node, "draining", "drain", reason)


@router.post("/{node:name}/readmit", responses={202: {"description": "It returns once its check has passed."}})
def readmit(
    parts: Parts, principal: Operator, node: str, reason: Reason = "", check: Checked = False, force: Force = False
) -> Response:
    """Count the node as in service again, and tell the subscribers.

    200: it is in service, and ``reason`` says why no check went before that. 202: its agent checks it first, and the
    node returns once that has passed (``check_id``). 409: what stands against
    it (``probation``, ``by_hand``, ``not_ours``, ``cannot_check``); with force it returns at once.
    """
    asking = ReturnRequest(principal.who, reason, check, force)

    def change(store: Store) -> Change:
        old = _known(store, node)
        if old.state == "in_service" or (under_way(store, node) is not None and old.check_id and not force):
            return Change()
        now_s = parts.clock.now_s()
        settings = parts.outlook.policy()
        actions = store.page(ACTIONS, {"node": node}, limit=PAGE_LIMIT_MAX).items
        found = returning(old, asking, offer_of(parts.fleet, node, now_s), actions, settings, now_s)
        if found.way == "refuse":
            raise Refusal(409, found.word, found.detail)
        if found.way == "check":
            return _checked_first(parts, principal, store, old, reason)
        why = "; ".join(filter(None, (reason, f"readmitted without a check: {found.detail}")))
        new = ledger.readmit(old, why, principal.who, now_s, settings.watch_s)
        entry = audited(parts, principal, "readmit", node, why)
        return Change(nodes=(new,), events=(outbound.node_readmitted(new, now_s),), audit=(entry,))

    parts.store.update(change)
    record = found(parts, NODES, node)
    return answer(
        views.node(record, parts.fleet, parts.fleet.offsets(), parts.clock.now_s()), 202 if record.check_id else 200
    )


def _several(parts: Needs) -> bool:
    """Return whether there are several cells, whose answers are joined, and then filtered."""
    return parts.cells is not None and parts.cells.several


def _checked_first(parts: Needs, principal: Principal, store: Store, node: Node, reason: str) -> Change:
    """Return the request for a check on which the node's return depends; a mere look in progress does not count."""
    looking = under_way(store, node.node)
    if looking is not None:
        raise Refusal(409, "busy", f"{node.node} is being checked ({looking.id}): ask again once that is over")
    check = new_check(parts.fleet, parts.clock.now_s(), principal, node.node, "readmit", fault_of(node), reason)
    entry = audited(parts, principal, "readmit after check", node.node, f"{check.id}: {reason}" if reason else check.id)
    return Change(nodes=(replace(node, check_id=check.id),), node_checks=(check,), audit=(entry,))


def _stand(parts: Needs, principal: Principal, name: str, state: NodeState, verb: str, reason: str) -> Response:
    def change(store: Store) -> Change:
        old = _known(store, name)
        new = ledger.stand(old, state, reason, parts.clock.now_s(), principal.who)
        return Change() if new is old else Change(nodes=(new,), audit=(audited(parts, principal, verb, name, reason),))

    parts.store.update(change)
    return _shown(parts, name)


def _known(store: Store, name: str) -> Node:
    node = store.get(NODES, name)
    if node is None:
        raise missing("nodes", name)
    return node


def _shown(parts: Needs, name: str) -> Response:
    record = found(parts, NODES, name)
    view = views.node(record, parts.fleet, parts.fleet.offsets(), parts.clock.now_s())
    return answer({**view, "memory": memory(scores_of(parts), name)})
