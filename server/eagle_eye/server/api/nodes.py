"""/api/v1/nodes: each node's standing, what its agent says, and people's verbs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from eagle_eye.server import ledger, outbound
from eagle_eye.server.api import views
from eagle_eye.server.api.requests import (
    Cursor,
    Limit,
    Operator,
    Parts,
    Reader,
    answer,
    audited,
    found,
    given,
    listing,
    missing,
)
from eagle_eye.server.auth import Principal
from eagle_eye.server.engine.probation import probation
from eagle_eye.server.errors import Refusal
from eagle_eye.server.records import NodeState
from eagle_eye.server.services import Services
from eagle_eye.server.store import ACTIONS, NODES, PAGE_LIMIT_MAX, Change, Store
from eagle_eye.server.timestamps import rfc3339

router = APIRouter(prefix="/api/v1/nodes", tags=["nodes"])
Force = Annotated[bool, Query(description="Also while the node is on probation.")]
Reason = Annotated[str, Query(max_length=1_000, description="Kept with the node and in the audit trail.")]


@router.get("")
def list_nodes(
    parts: Parts, _: Reader, state: str | None = None, cursor: Cursor = None, limit: Limit = 100
) -> Response:
    """Nodes, the newest to be heard of first."""
    offsets = parts.fleet.offsets()
    page = parts.store.page(NODES, given(state=state), cursor, limit)
    return listing(page, lambda record: views.node(record, parts.fleet, offsets))


@router.get("/{node}")
def get_node(parts: Parts, _: Reader, node: str) -> Response:
    """One node."""
    return _shown(parts, node)


@router.post("/{node}/exclude")
def exclude(parts: Parts, principal: Operator, node: str, reason: Reason = "") -> Response:
    """Count the node as out of service until it is readmitted."""
    return _stand(parts, principal, node, "excluded", "exclude", reason)


@router.post("/{node}/drain")
def drain(parts: Parts, principal: Operator, node: str, reason: Reason = "") -> Response:
    """Count the node as leaving once its job ends or restarts."""
    return _stand(parts, principal, node, "draining", "drain", reason)


@router.post("/{node}/readmit")
def readmit(parts: Parts, principal: Operator, node: str, reason: Reason = "", force: Force = False) -> Response:
    """Count the node as in service again, and tell the subscribers. 409 while it is on probation, unless forced."""
    if not force:
        _refuse_on_probation(parts, node)
    return _stand(parts, principal, node, "in_service", "readmit", reason)


def _refuse_on_probation(parts: Services, name: str) -> None:
    record = parts.store.get(NODES, name)
    if record is None or record.state == "in_service":
        return
    actions = parts.store.page(ACTIONS, {"node": name}, limit=PAGE_LIMIT_MAX).items
    found = probation(name, actions, parts.outlook.policy(), parts.clock.now_s())
    if found.until_s is not None:
        raise Refusal(
            409,
            "probation",
            f"{name} was excluded {found.exclusions} times lately and is on probation until {rfc3339(found.until_s)}"
            " (policy.probation_s); check it under load (eagle-eye check), or readmit it with force=true",
        )


def _stand(parts: Services, principal: Principal, name: str, state: NodeState, verb: str, reason: str) -> Response:
    def change(store: Store) -> Change:
        old = store.get(NODES, name)
        if old is None:
            raise missing("nodes", name)
        now_s = parts.clock.now_s()
        new = ledger.stand(old, state, reason or f"{verb} by {principal.who}", now_s)
        if new is old:
            return Change()
        events = (outbound.node_readmitted(new, now_s),) if state == "in_service" else ()
        return Change(nodes=(new,), events=events, audit=(audited(parts, principal, verb, name, reason),))

    parts.store.update(change)
    return _shown(parts, name)


def _shown(parts: Services, name: str) -> Response:
    return answer(views.node(found(parts, NODES, name), parts.fleet, parts.fleet.offsets()))
