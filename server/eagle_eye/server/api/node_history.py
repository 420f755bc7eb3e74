"""History of nodes and GPUs: /api/v1/nodes/{node}/history, /api/v1/gpus, and a node's summary."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, Protocol

from fastapi import APIRouter, Depends, Response

from eagle_eye.schema.labels import state_label
from eagle_eye.server.accounts.archive import Archive
from eagle_eye.server.accounts.gpu_inventory import sat_at
from eagle_eye.server.accounts.recurrence_score import NodeRecord, RecurrenceScore, Scores
from eagle_eye.server.api import views
from eagle_eye.server.api.requests import Cursor, Limit, Reader, answer, found, given, listing, services
from eagle_eye.server.model.account_records import Gpu, GpuChecks
from eagle_eye.server.model.errors import BadCursor, StoreUnavailable
from eagle_eye.server.model.records import Incident
from eagle_eye.server.model.timestamps import rfc3339
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
    Store,
)

router = APIRouter(prefix="/api/v1", tags=["nodes"])


class Needs(Protocol):
    """The server's components that this module uses."""

    archive: Archive
    store: Store


Parts = Annotated[Needs, Depends(services)]


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


@router.get("/nodes/{node:name}/history")
def node_history(parts: Parts, _: Reader, node: str, cursor: Cursor = None, limit: Limit = 100) -> Response:
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


@router.get("/gpus")
def list_gpus(parts: Parts, _: Reader, node: str | None = None, cursor: Cursor = None, limit: Limit = 100) -> Response:
    """GPUs by UUID with where they sit and sat, the last found first."""
    return listing(parts.store.page(GPUS, given(node=node), cursor, limit), gpu)


@router.get("/gpus/{gpu_uuid}")
def get_gpu(parts: Parts, _: Reader, gpu_uuid: str) -> Response:
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


def scores_of(parts: Needs) -> Scores | None:
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
