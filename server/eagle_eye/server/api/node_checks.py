"""/api/v1/nodes/{node}/checks and /api/v1/node-checks: active checks that agents run."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal, Protocol

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from msgspec.structs import replace

from eagle_eye.server.api import views
from eagle_eye.server.api.requests import (
    Cursor,
    Limit,
    Operator,
    Reader,
    Reason,
    Somebody,
    answer,
    audited,
    body_of,
    decoded,
    found,
    listing,
    missing,
    read_body,
    services,
)
from eagle_eye.server.engine.idle_faults import FAULT
from eagle_eye.server.engine.ledger import fault_of
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.model.records import CheckOutcome, NodeCheck, NodeCheckPurpose
from eagle_eye.server.requests.node_checks import NodeChecks, asked, find, offer_of, under_way
from eagle_eye.server.security.auth import Principal, Tokens
from eagle_eye.server.store.store import NODE_CHECKS, NODES, Change, Store

REPORT_BYTES_MAX = 256 << 10
OUTCOMES_MAX = 32  # per report
FIGURES_MAX = 256  # per outcome: eight for each of 16 GPUs, twice
TEXT_CHARS_MAX = 300
SDC_S_MAX = 600.0  # as in eagle-eye check

router = APIRouter(prefix="/api/v1", tags=["nodes"])


class Needs(Protocol):
    """The server's components that this module uses."""

    clock: Clock
    fleet: Fleet
    node_checks: NodeChecks
    store: Store
    tokens: Tokens


Parts = Annotated[Needs, Depends(services)]


class CheckReport(msgspec.Struct, frozen=True):
    """What ``eagle-eye check --json`` writes; what else it has is not kept."""

    verdict: Literal["healthy", "sick", "cannot_tell"]
    reason: str = ""
    checks: list[CheckOutcome] = []


class CheckBegun(msgspec.Struct, frozen=True, tag_field="state", tag="begun"):
    """An agent's word: it begins; ``run`` is its own mark for it."""

    run: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9]{8,64}$")]


class CheckRefused(msgspec.Struct, frozen=True, tag_field="state", tag="refused"):
    """An agent's word: it could not, and why."""

    detail: str = ""


class CheckDone(msgspec.Struct, frozen=True, tag_field="state", tag="done"):
    """An agent's word: here is the report."""

    report: CheckReport


CheckUpdate = CheckBegun | CheckRefused | CheckDone


@router.get("/nodes/{node:name}/checks")
def list_checks(parts: Parts, _: Reader, node: str, cursor: Cursor = None, limit: Limit = 100) -> Response:
    """The node's active checks and what came of them, newest first."""
    found(parts, NODES, node)
    return listing(parts.store.page(NODE_CHECKS, {"node": node}, cursor, limit), views.node_check)


SdcSeconds = Annotated[
    float,
    Query(
        ge=0, le=SDC_S_MAX, description="Look for silent corruption alone, for so many seconds; 0: all other checks."
    ),
]


@router.post("/nodes/{node:name}/check", status_code=202)
def check(parts: Parts, principal: Operator, node: str, reason: Reason = "", sdc_seconds: SdcSeconds = 0.0) -> Response:
    """Have the node's agent check it now, without touching its standing; one that is under way is answered as it is.

    Of those that are under way only a search answers a request for one.
    """
    made: list[NodeCheck] = []

    def change(store: Store) -> Change:
        record = store.get(NODES, node)
        if record is None:
            raise missing("nodes", node)
        made.clear()
        open_check = under_way(store, node)
        if open_check is not None:
            if sdc_seconds and not open_check.sdc_seconds:
                raise Refusal(409, "busy", f"{node} is at another check ({open_check.id}); ask again when it is over")
            made.append(open_check)
            return Change()
        offer = offer_of(parts.fleet, node, parts.clock.now_s())
        if offer.state != "ready":
            raise Refusal(409, "cannot_check", f"{node} cannot be checked: {offer.why}")
        fault = FAULT if sdc_seconds else fault_of(record)
        made.append(new_check(parts.fleet, parts.clock.now_s(), principal, node, "look", fault, reason, sdc_seconds))
        entry = audited(parts, principal, "check", node, f"{made[0].id}: {reason}" if reason else made[0].id)
        return Change(node_checks=(made[0],), audit=(entry,))

    parts.store.update(change)
    return answer(views.node_check(made[0]), 202)


@router.get("/node-checks/{check}")
def get_check(parts: Parts, _: Reader, check: str) -> Response:
    """One check with its report."""
    return answer(views.node_check(find(parts.store, check)))


@router.put("/node-checks/{check}", openapi_extra=body_of(CheckUpdate))
async def tell(request: Request, parts: Parts, principal: Somebody, check: str) -> Response:
    """An agent's word on a check of its own node. What was answered before stays as it is."""
    record = await asyncio.to_thread(find, parts.store, check)
    parts.tokens.authorise_frames(principal, record.node)
    body = await read_body(request)
    if len(body) > REPORT_BYTES_MAX:
        raise Refusal(413, "oversized", f"a report may have {REPORT_BYTES_MAX} bytes")
    reported: CheckUpdate = decoded(body, CheckUpdate)  # type: ignore[arg-type]
    if isinstance(reported, CheckBegun):
        record = await asyncio.to_thread(parts.node_checks.begun, record.id, reported.run)
        return answer(views.node_check(record))
    if isinstance(reported, CheckRefused):
        detail = f"its agent did not make it: {_line(reported.detail)}"
        record = await asyncio.to_thread(parts.node_checks.ended, record.id, "cannot_tell", detail)
    else:
        report, outcomes = reported.report, _outcomes(reported.report)
        record = await asyncio.to_thread(
            parts.node_checks.ended, record.id, report.verdict, _line(report.reason), outcomes
        )
    return answer(views.node_check(record))


def new_check(
    fleet: Fleet,
    now_s: float,
    principal: Principal,
    node: str,
    purpose: NodeCheckPurpose,
    fault: str,
    reason: str,
    sdc_s: float = 0.0,
) -> NodeCheck:
    """Return a request to the agent of a node that was heard; ``sdc_s`` as in ``asked``."""
    heard = fleet.last(node)
    interval_s = heard.interval_s if heard is not None else 0.0
    return asked(node, purpose, fault, principal.who, reason, interval_s, now_s, sdc_s)


def _outcomes(report: CheckReport) -> list[CheckOutcome]:
    """Return the report's outcomes within limits; nothing in it is trusted."""
    return [
        CheckOutcome(
            name=_line(outcome.name)[:40],
            state=outcome.state,
            reason=_line(outcome.reason),
            duration_s=outcome.duration_s,
            expected=outcome.expected,
            values=[
                replace(
                    figure,
                    name=_line(figure.name)[:80],
                    unit=_line(figure.unit)[:20],
                    device=_line(figure.device)[:40],
                    source=_line(figure.source),
                )
                for figure in outcome.values[:FIGURES_MAX]
            ],
        )
        for outcome in report.checks[:OUTCOMES_MAX]
    ]


def _line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text[:TEXT_CHARS_MAX]).strip()
