"""/api/v1/nodes, /api/v1/node-checks and /api/v1/gpus: nodes, people's decisions on them, checks, history."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from msgspec.structs import replace

from eagle_eye.schema.labels import state_label
from eagle_eye.server.accounts.archive import Archive
from eagle_eye.server.accounts.node_records import NodeRecord, RecurrenceScore, Scores, sat_at
from eagle_eye.server.api import views
from eagle_eye.server.api.requests import (
    Body,
    Cell,
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
    given,
    listing,
    missing,
    read_body,
    services,
)
from eagle_eye.server.delivery import events as outbound
from eagle_eye.server.engine import ledger
from eagle_eye.server.engine.idle_faults import FAULT
from eagle_eye.server.engine.ledger import ReturnRequest, fault_of, returning
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.clock import Clock, rfc3339
from eagle_eye.server.model.errors import BadCursor, Refusal, StoreUnavailable
from eagle_eye.server.model.records import (
    CheckOutcome,
    Gpu,
    GpuChecks,
    Incident,
    Node,
    NodeCheck,
    NodeCheckPurpose,
    NodeState,
)
from eagle_eye.server.monitor.cells import Cells
from eagle_eye.server.monitor.recall import Forgetting, KnownNodes
from eagle_eye.server.monitor.watcher import Outlook
from eagle_eye.server.requests.node_checks import NodeChecks, asked, find, offer_of, under_way
from eagle_eye.server.security.auth import Principal, Tokens
from eagle_eye.server.store.settings import DEFAULT_CELL
from eagle_eye.server.store.store import (
    ACTIONS,
    DRIVER_ERRORS,
    GPU_CHECKS,
    GPUS,
    INCIDENTS,
    NODE_CHECKS,
    NODES,
    PAGE_LIMIT_MAX,
    TICKETS,
    Change,
    Store,
)

# The past of nodes and GPUs, and a node's summary.

history_router = APIRouter(prefix="/api/v1", tags=["nodes"])


class NodeHistoryNeeds(Protocol):
    """The server's components that the past of nodes and GPUs uses."""

    archive: Archive
    store: Store


NodeHistoryParts = Annotated[NodeHistoryNeeds, Depends(services)]


class Chapter(NamedTuple):
    """One event of a node; ``id`` names its record, "" if it has none of its own."""

    time_s: float
    kind: str
    id: str
    summary: str
    details: Mapping[str, Any]

    @property
    def cursor(self) -> str:
        """Its cursor for pagination."""
        return hashlib.sha256(f"{self.time_s!r}\n{self.kind}\n{self.id}\n{self.summary}".encode()).hexdigest()[:32]


@history_router.get("/nodes/{node:name}/history")
def node_history(parts: NodeHistoryParts, _: Reader, node: str, cursor: Cursor = None, limit: Limit = 100) -> Response:
    """What happened to the node, newest first: incidents, actions, standing, checks, GPUs, driver errors, tickets.

    ``gpu_checks`` is what checks for silent corruption found of the GPUs that sit in it now, wherever they sat then.
    Of each kind the newest 1,000 are looked at; ``cut`` names the kinds that have more.
    """
    record = found(parts, NODES, node)
    sitting = sorted(parts.store.page(GPUS, {"node": node}, limit=PAGE_LIMIT_MAX).items, key=lambda gpu: gpu.device)
    found_of = [known for one in sitting if (known := parts.store.get(GPU_CHECKS, one.uuid)) is not None]
    chapters, cut = _chapters(parts.store, node)
    chapters = sorted([*chapters, *_wrong_numbers(found_of)], key=_order, reverse=True)
    start = 0
    if cursor is not None:
        start = next((at + 1 for at, chapter in enumerate(chapters) if chapter.cursor == cursor), -1)
        if start < 0:
            raise BadCursor(f"cursor {cursor[:80]!r} is none of this list's; use the next of a page of it, unchanged")
    page = chapters[start : start + limit]
    return answer(
        {
            "node": node,
            "state": record.state,
            "memory": memory(parts.archive.scores(), node),
            "gpus": [gpu(one) for one in sitting],
            "gpu_checks": [gpu_checks(one) for one in found_of],
            "items": [
                {"time": rfc3339(c.time_s), "kind": c.kind, "id": c.id, "summary": c.summary, **c.details} for c in page
            ],
            "next": page[-1].cursor if page and len(chapters) > start + limit else None,
            "cut": cut,
        }
    )


@history_router.get("/gpus")
def list_gpus(
    parts: NodeHistoryParts, _: Reader, node: str | None = None, cursor: Cursor = None, limit: Limit = 100
) -> Response:
    """GPUs by UUID with where they sit and sat, the last found first."""
    return listing(parts.store.page(GPUS, given(node=node), cursor, limit), gpu)


@history_router.get("/gpus/{gpu_uuid}")
def get_gpu(parts: NodeHistoryParts, _: Reader, gpu_uuid: str) -> Response:
    """One GPU, wherever it sat: its seats, errors, checks for silent corruption, and the incidents that accused it."""
    record = found(parts, GPUS, gpu_uuid)
    errors = parts.store.page(DRIVER_ERRORS, {"uuid": gpu_uuid}, limit=PAGE_LIMIT_MAX).items
    accused = [views.incident(i) for i in _incidents_of(parts.store, record)]
    checks = parts.store.get(GPU_CHECKS, gpu_uuid)
    return answer(
        {
            **gpu(record),
            "driver_errors": [views.plain(error) for error in errors],
            "incidents": accused,
            "checks": None if checks is None else gpu_checks(checks),
        }
    )


def gpu(record: Gpu) -> dict[str, Any]:
    """Return a GPU with its seats."""
    view = views.plain(record)
    view["moves"] = [
        {"node": s.node, "device": s.device, "since": rfc3339(s.since_s), "until": rfc3339(s.until_s)}
        for s in record.moves
    ]
    return view


def gpu_checks(record: GpuChecks) -> dict[str, Any]:
    """Return the results of a GPU's checks for silent corruption."""
    return {**views.plain(record), "newest": [views.plain(one) for one in record.newest]}


def scores_of(parts: NodeHistoryNeeds) -> Scores | None:
    """Return the nodes' scores; None while their records cannot be read."""
    try:
        return parts.archive.scores()
    except StoreUnavailable:
        return None


def memory(scores: Scores | None, node: str) -> dict[str, Any] | None:
    """Return a summary of a node's history, None without scores; ``recurrence_score`` null: unknown.

    The ``lemon_...`` fields are former names of the ``recurren...`` ones.
    """
    if scores is None:
        return None
    past = scores.pasts.get(node, NodeRecord())
    score = scores.by_node.get(node, RecurrenceScore(None, reason="heard of after the scores were last worked out"))
    rounded = None if score.score is None else round(score.score, 4)
    signals = [
        {"signal": c.signal, "value": c.value, "usual": c.usual, "adds": round(c.adds, 4)} for c in score.contributions
    ]
    return {
        "incidents_30_days": past.incidents,
        "recurrence_score": rounded,
        "recurrent": score.is_recurrent,
        "recurrence_reason": score.reason,
        "recurrence_signals": signals,
        "lemon_score": rounded,
        "lemon": score.is_recurrent,
        "lemon_reason": score.reason,
        "lemon_signals": signals,
        "scored": rfc3339(scores.made_s),
    }


def _chapters(store: Store, node: str) -> tuple[list[Chapter], list[str]]:
    """Return all events considered, and the kinds that have more."""
    chapters: list[Chapter] = []
    incidents = store.page(INCIDENTS, {"node": node}, limit=PAGE_LIMIT_MAX)
    for incident in incidents.items:
        details = {"fault": incident.fault, "job": incident.job, "state": incident.state, "device": incident.device}
        accused = {"accused": incident.node == node}
        chapters.append(Chapter(incident.detected_s, "incident", incident.id, incident.summary, details | accused))
    actions = store.page(ACTIONS, {"node": node}, limit=PAGE_LIMIT_MAX)
    for action in actions.items:
        details = {"fault": action.fault, "job": action.job, "state": action.state}
        whose = f" and restart job {action.job}" if action.restart else f", job {action.job}" if action.job else ""
        said = f"{_words(action.kind)}{whose} because of {_words(action.fault)}: {state_label(action.state)}"
        chapters.append(Chapter(action.created_s, "action", action.id, said, details))
    trail = store.audit(None, PAGE_LIMIT_MAX, node)
    for entry in trail.items:
        said = f"{entry.verb} by {entry.who}" + (f": {entry.detail}" if entry.detail else "")
        chapters.append(Chapter(entry.time_s, "standing", "", said, {"verb": entry.verb, "who": entry.who}))
    checks = store.page(NODE_CHECKS, {"node": node}, limit=PAGE_LIMIT_MAX)
    for check in checks.items:
        said = f"check for {check.fault or 'anything'}: {check.state}" + (f", {check.detail}" if check.detail else "")
        chapters.append(Chapter(check.created_s, "check", check.id, said, {"state": check.state}))
    tickets = store.page(TICKETS, {"node": node}, limit=PAGE_LIMIT_MAX)
    for ticket in tickets.items:
        closed = None if ticket.closed_s is None else rfc3339(ticket.closed_s)
        chapters.append(Chapter(ticket.opened_s, "ticket", ticket.id, ticket.text, {"closed": closed}))
    errors = store.page(DRIVER_ERRORS, {"node": node}, limit=PAGE_LIMIT_MAX)
    for error in errors.items:
        where = f"GPU {error.device}" if error.device >= 0 else "the node"
        said = f"{error.kind.upper()} {error.code} of {where}, {error.count} since {rfc3339(error.first_s)}"
        details = {"uuid": error.uuid or None, "code": error.code, "count": error.count}
        chapters.append(Chapter(error.last_s, "driver_error", error.id, said, details))
    chapters += _moves(store, node)
    nexts = {
        "incident": incidents.next,
        "action": actions.next,
        "standing": trail.next,
        "check": checks.next,
        "ticket": tickets.next,
        "driver_error": errors.next,
    }
    return chapters, [kind for kind, more in nexts.items() if more is not None]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _wrong_numbers(checks: Iterable[GpuChecks]) -> Iterator[Chapter]:
    """Yield each check in which a GPU computed wrong numbers, on whichever node."""
    for record in checks:
        for one in record.newest:
            if one.wrong_numbers:
                said = f"GPU {record.uuid} computed {one.wrong_numbers:.0f} wrong numbers on {one.node}"
                yield Chapter(one.time_s, "gpu_check", one.check_id, said, {"uuid": record.uuid, "node": one.node})


def _order(chapter: Chapter) -> tuple[float, str, str, str]:
    return chapter.time_s, chapter.kind, chapter.id, chapter.summary


def _moves(store: Store, node: str) -> Iterator[Chapter]:
    """Yield each arrival and departure of a GPU."""
    here = store.page(GPUS, {"node": node}, limit=PAGE_LIMIT_MAX).items
    gone = store.page(GPUS, {"seat": node}, limit=PAGE_LIMIT_MAX).items
    for record in {one.uuid: one for one in (*here, *gone)}.values():
        seats = [(s.node, s.device, s.since_s) for s in record.moves] + [(record.node, record.device, record.since_s)]
        for at, (where, device, since_s) in enumerate(seats):
            details = {"device": device, "model": record.model}
            if where == node:
                said = f"GPU {record.uuid} sits at {device}" + (f", before at {seats[at - 1][0]}" if at else "")
                yield Chapter(since_s, "gpu", record.uuid, said, details)
            elif at and seats[at - 1][0] == node:
                yield Chapter(since_s, "gpu", record.uuid, f"GPU {record.uuid} went to {where}", details)


def _incidents_of(store: Store, record: Gpu) -> list[Incident]:
    """Return the incidents that accused the GPU in its seat at the time, newest first."""
    found_in: list[Incident] = []
    for node in {record.node, *(seat.node for seat in record.moves)}:
        page = store.page(INCIDENTS, {"node": node}, limit=PAGE_LIMIT_MAX)
        found_in += [
            i
            for i in page.items
            if i.node == node and i.device is not None and sat_at(record, i.onset_s) == (node, i.device)
        ]
    return sorted(found_in, key=lambda i: i.detected_s, reverse=True)


# Active checks that agents run.

REPORT_BYTES_MAX = 256 << 10
OUTCOMES_MAX = 32  # per report
FIGURES_MAX = 256  # per outcome: eight for each of 16 GPUs, twice
TEXT_CHARS_MAX = 300
SDC_S_MAX = 600.0  # as in eagle-eye check

checks_router = APIRouter(prefix="/api/v1", tags=["nodes"])


class NodeCheckNeeds(Protocol):
    """The server's components that the checks of nodes use."""

    clock: Clock
    fleet: Fleet
    node_checks: NodeChecks
    store: Store
    tokens: Tokens


NodeCheckParts = Annotated[NodeCheckNeeds, Depends(services)]


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


@checks_router.get("/nodes/{node:name}/checks")
def list_checks(parts: NodeCheckParts, _: Reader, node: str, cursor: Cursor = None, limit: Limit = 100) -> Response:
    """The node's active checks and what came of them, newest first."""
    found(parts, NODES, node)
    return listing(parts.store.page(NODE_CHECKS, {"node": node}, cursor, limit), views.node_check)


SdcSeconds = Annotated[
    float,
    Query(
        ge=0, le=SDC_S_MAX, description="Look for silent corruption alone, for so many seconds; 0: all other checks."
    ),
]


@checks_router.post("/nodes/{node:name}/check", status_code=202)
def check(
    parts: NodeCheckParts, principal: Operator, node: str, reason: Reason = "", sdc_seconds: SdcSeconds = 0.0
) -> Response:
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


@checks_router.get("/node-checks/{check}")
def get_check(parts: NodeCheckParts, _: Reader, check: str) -> Response:
    """One check with its report."""
    return answer(views.node_check(find(parts.store, check)))


@checks_router.put("/node-checks/{check}", openapi_extra=body_of(CheckUpdate))
async def tell(request: Request, parts: NodeCheckParts, principal: Somebody, check: str) -> Response:
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


# Nodes, and people's decisions on them.

router = APIRouter(prefix="/api/v1/nodes", tags=["nodes"])
Force = Annotated[bool, Query(description="At once, whatever stands against it.")]
Checked = Annotated[bool, Query(description="Only after a passed check, whatever policy.readmit_check says.")]


class NodeNeeds(Protocol):
    """The server's components that the endpoints of nodes use."""

    archive: Archive
    cells: Cells | None
    clock: Clock
    fleet: Fleet
    known_nodes: KnownNodes
    outlook: Outlook
    store: Store


NodeParts = Annotated[NodeNeeds, Depends(services)]


@router.get("")
def list_nodes(
    parts: NodeParts,
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
async def forget(parts: NodeParts, principal: Operator, body: Body) -> Response:
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
def get_node(parts: NodeParts, _: Reader, node: str) -> Response:
    """One node."""
    return _shown(parts, node)


@router.post("/{node:name}/exclude")
def exclude(parts: NodeParts, principal: Operator, node: str, reason: Reason = "") -> Response:
    """Count the node as out of service until it is readmitted."""
    return _stand(parts, principal, node, "excluded", "exclude", reason)


@router.post("/{node:name}/drain")
def drain(parts: NodeParts, principal: Operator, node: str, reason: Reason = "") -> Response:
    """Count the node as leaving once its job ends or restarts."""
    return _stand(parts, principal, node, "draining", "drain", reason)


@router.post("/{node:name}/readmit", responses={202: {"description": "It returns once its check has passed."}})
def readmit(
    parts: NodeParts, principal: Operator, node: str, reason: Reason = "", check: Checked = False, force: Force = False
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


def _several(parts: NodeNeeds) -> bool:
    """Return whether there are several cells, whose answers are joined, and then filtered."""
    return parts.cells is not None and parts.cells.several


def _checked_first(parts: NodeNeeds, principal: Principal, store: Store, node: Node, reason: str) -> Change:
    """Return the request for a check on which the node's return depends; a mere look in progress does not count."""
    looking = under_way(store, node.node)
    if looking is not None:
        raise Refusal(409, "busy", f"{node.node} is being checked ({looking.id}): ask again once that is over")
    check = new_check(parts.fleet, parts.clock.now_s(), principal, node.node, "readmit", fault_of(node), reason)
    entry = audited(parts, principal, "readmit after check", node.node, f"{check.id}: {reason}" if reason else check.id)
    return Change(nodes=(replace(node, check_id=check.id),), node_checks=(check,), audit=(entry,))


def _stand(parts: NodeNeeds, principal: Principal, name: str, state: NodeState, verb: str, reason: str) -> Response:
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


def _shown(parts: NodeNeeds, name: str) -> Response:
    record = found(parts, NODES, name)
    view = views.node(record, parts.fleet, parts.fleet.offsets(), parts.clock.now_s())
    return answer({**view, "memory": memory(scores_of(parts), name)})
