"""/api/v1/goodput, /api/v1/ledger, /api/v1/tickets and /api/v1/audit: losses, decisions, repairs and changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, Protocol

from fastapi import APIRouter, Depends, Query, Response
from msgspec import Struct

from eagle_eye.schema.times import unix_seconds
from eagle_eye.server.accounts import goodput, trust
from eagle_eye.server.accounts.archive import Archive, HeldBackAction
from eagle_eye.server.accounts.goodput import Account, Amount, By, TimelineSpan
from eagle_eye.server.accounts.node_records import TicketFileWrong, TicketFormat, parse_tickets
from eagle_eye.server.accounts.trust import AccountSettings, FaultEvidence, HoursAtStake, ModeStep, Precision, precision
from eagle_eye.server.api import views
from eagle_eye.server.api.requests import (
    Admin,
    Body,
    Cell,
    Cursor,
    FaultName,
    Limit,
    Operator,
    Reader,
    Seen,
    Since,
    answer,
    audited,
    body_of,
    decoded,
    given,
    listing,
    moment_s,
    services,
)
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.model.clock import Clock, rfc3339
from eagle_eye.server.model.errors import BadCursor, Refusal
from eagle_eye.server.monitor.watcher import Outlook
from eagle_eye.server.store.store import NODES, TICKETS, Change, Store

router = APIRouter(prefix="/api/v1", tags=["accounts"])

GOODPUT_S = 7 * 86_400.0  # the range unless since is given
LEDGER_S = 90 * 86_400.0
TICKETS_KEPT_MAX = 200_000
UNKNOWN_NODES_NAMED_MAX = 20
CAUSES_MAX = 100  # per job; the costliest


class AccountNeeds(Protocol):
    """The server's components that the accounts use."""

    archive: Archive
    clock: Clock
    store: Store


AccountParts = Annotated[AccountNeeds, Depends(services)]


class TicketImport(Struct, frozen=True, forbid_unknown_fields=True):
    """A file of tickets as text: CSV with a header, or one JSON object a line."""

    format: TicketFormat
    text: str


@router.get("/goodput")
def get_goodput(
    parts: AccountParts,
    _: Reader,
    job: str | None = None,
    since: Since = None,
    until: Since = None,
    by: Annotated[By, Query(description="What the sums are of.")] = "job",
    cell: Cell = None,
    limit: Limit = 100,
) -> Response:
    """Where the time of jobs went, and because of what; ``total`` is of all of it. Seven days unless since is given."""
    until_s = _time(until, parts.clock.now_s())
    since_s = _time(since, until_s - GOODPUT_S)
    if since_s >= until_s:
        raise Refusal(400, "time", f"since is {rfc3339(since_s)}, which is not before until, {rfc3339(until_s)}")
    found = parts.archive.jobs(job, cell)
    jobs = {name: goodput.clipped(spans, since_s, until_s) for name, spans in found.jobs.items()}
    spans = [span for mine in jobs.values() for span in mine]
    items = _by_job(jobs) if by == "job" else _by_cause(spans, by)
    return answer(
        {
            "since": rfc3339(since_s),
            "until": rfc3339(until_s),
            "by": by,
            "items": items[:limit],
            "left_out": max(0, len(items) - limit),
            "cut": found.cut,
            "total": _account(goodput.account(spans)),
            "next": None,
        }
    )


@router.get("/ledger")
def get_ledger(
    parts: AccountParts,
    sight: Seen,
    job: str | None = None,
    fault: FaultName = None,
    standing: Literal["right", "wrong", "pending", "cannot_tell"] | None = None,
    cell: Cell = None,
    since: Since = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Response:
    """What would have been done and was not, set against what happened afterwards; totals are of all of it."""
    since_s = _time(since, parts.clock.now_s() - LEDGER_S)
    claims, cut = parts.archive.claims(since_s, job, fault, cell)
    claims = [claim for claim in claims if sight is None or sight.sees(claim.action.job)]
    shown = [claim for claim in claims if standing in (None, claim.outcome.standing)]
    start = 0
    if cursor is not None:
        start = next((i + 1 for i, claim in enumerate(shown) if claim.action.id == cursor), -1)
        if start < 0:
            raise BadCursor(f"cursor {cursor[:80]!r} is none of this list's; use the next of a page of it, unchanged")
    page = shown[start : start + limit]
    more = len(shown) > start + limit
    return answer(
        {
            "since": rfc3339(since_s),
            "window_seconds": parts.archive.hindsight_s,
            "items": [_claim(claim) for claim in page],
            "next": page[-1].action.id if more and page else None,
            "cut": cut,
            "total": _precision(precision(claim.outcome for claim in claims)),
            "by_fault": _totals(claims, lambda claim: [claim.action.fault]),
            "by_detector": _totals(claims, lambda claim: claim.incident.detectors if claim.incident else []),
        }
    )


@router.get("/tickets")
def list_tickets(
    parts: AccountParts, _: Reader, node: str | None = None, cursor: Cursor = None, limit: Limit = 100
) -> Response:
    """Imported repair tickets, the last imported first."""
    return listing(parts.store.page(TICKETS, given(node=node), cursor, limit), views.plain)


@router.post("/tickets", openapi_extra=body_of(TicketImport))
def import_tickets(parts: AccountParts, principal: Operator, body: Body) -> Response:
    """Take repair tickets; one whose id is known replaces it. All of the file or, where a line is wrong, nothing."""
    asked = decoded(body, TicketImport)
    try:
        parsed = parse_tickets(asked.text, asked.format, parts.clock.now_s())
    except TicketFileWrong as error:
        raise Refusal(400, "ticket", str(error)) from None
    counts = {"new": 0, "changed": 0, "unchanged": 0}

    def put(store: Store) -> Change:
        counts.update(new=0, changed=0, unchanged=0)
        write = []
        for ticket in parsed.tickets:
            known = store.get(TICKETS, ticket.id)
            reported = (ticket.node, ticket.opened_s, ticket.closed_s, ticket.text)
            if known is not None and reported == (known.node, known.opened_s, known.closed_s, known.text):
                counts["unchanged"] += 1
                continue
            counts["new" if known is None else "changed"] += 1
            write.append(ticket)
        if counts["new"] and store.count(TICKETS) + counts["new"] > TICKETS_KEPT_MAX:
            raise Refusal(
                409,
                "too_many_tickets",
                f"{TICKETS_KEPT_MAX} tickets are the most kept; old ones end after accounts.retention_s",
            )
        if not write:
            return Change()
        detail = f"{counts['new']} new, {counts['changed']} changed"
        return Change(tickets=tuple(write), audit=(audited(parts, principal, "tickets", "tickets", detail),))

    parts.store.update(put)
    unknown = sorted({t.node for t in parsed.tickets if parts.store.get(NODES, t.node) is None})
    return answer(
        {
            **counts,
            "left_out_columns": parsed.left_out,
            "unknown_nodes": unknown[:UNKNOWN_NODES_NAMED_MAX],
            "unknown_nodes_count": len(unknown),
        }
    )


def _time(text: str | None, otherwise_s: float) -> float:
    if text is None:
        return otherwise_s
    try:
        return unix_seconds(text)
    except ValueError as error:
        raise Refusal(400, "time", f"since and until are RFC 3339 times or Unix seconds: {error}") from None


def _by_job(jobs: dict[str, list[TimelineSpan]]) -> list[dict[str, Any]]:
    found = []
    for job, spans in jobs.items():
        if not spans:
            continue
        causes = [
            {
                "part": loss.part,
                "fault": loss.cause.fault,
                "node": loss.cause.node or None,
                "incident_id": loss.cause.incident_id or None,
                **_amount(loss.amount),
            }
            for loss in goodput.losses(spans)[:CAUSES_MAX]
        ]
        attempts = len({span.attempt_id for span in spans})
        found.append({"job": job, "attempts": attempts, **_account(goodput.account(spans)), "causes": causes})
    return sorted(found, key=lambda item: (-item["lost_gpu_seconds"], item["job"]))


def _by_cause(spans: list[TimelineSpan], by: By) -> list[dict[str, Any]]:
    """Return the losses by node or fault; node null: no single node was to blame."""
    found = []
    for key, parts in goodput.grouped(goodput.losses(spans), by).items():
        whole = Amount()
        for amount in parts.values():
            whole.merge(amount)
        lost = {part: _amount(amount) for part, amount in sorted(parts.items())}
        found.append({by: key or None, **_amount(whole), "lost": lost})
    return sorted(found, key=lambda item: (-item["gpu_seconds"], -item["seconds"], item[by] or ""))


def _account(sums: Account) -> dict[str, Any]:
    lost = {part: _amount(sums.lost[part]) for part in goodput.LOST_PARTS if part in sums.lost}
    return {
        "wall": _amount(sums.wall),
        "training": _amount(sums.training),
        "lost": lost,
        "unknown": [{"reason": reason, **_amount(amount)} for reason, amount in sorted(sums.unknown.items())],
        "lost_gpu_seconds": sum(amount["gpu_seconds"] for amount in lost.values()),
        "ettr_ratio": sums.ettr_ratio,
        "goodput_ratio": sums.goodput_ratio,
    }


def _amount(amount: Amount) -> dict[str, float]:
    return {
        "seconds": round(amount.seconds, 3),
        "gpu_seconds": round(amount.gpu_seconds, 3),
        "seconds_without_gpu_count": round(amount.uncounted_s, 3),
    }


def _claim(claim: HeldBackAction) -> dict[str, Any]:
    action, outcome = claim.action, claim.outcome
    return {
        "action_id": action.id,
        "incident_id": action.incident_id,
        "created": rfc3339(action.created_s),
        "state": action.state,
        "kind": action.kind,
        "job": action.job,
        "attempt": action.attempt,
        "fault": action.fault,
        "node": action.node,
        "exclude": action.exclude,
        "confidence": action.confidence,
        "detectors": claim.incident.detectors if claim.incident else [],
        "standing": outcome.standing,
        "why": outcome.why,
        "detail": outcome.detail,
        "time": None if outcome.time_s is None else rfc3339(outcome.time_s),
    }


def _totals(
    claims: list[HeldBackAction], names: Callable[[HeldBackAction], Iterable[str]]
) -> dict[str, dict[str, Any]]:
    sorted_in: dict[str, list[HeldBackAction]] = defaultdict(list)
    for claim in claims:
        for name in names(claim):
            sorted_in[name].append(claim)
    return {name: _precision(precision(c.outcome for c in mine)) for name, mine in sorted(sorted_in.items())}


def _precision(counted: Precision) -> dict[str, Any]:
    return {**counted._asdict(), "precision": counted.ratio, "interval_95": counted.interval}


# Fault by fault: whether what is on record suffices to let policy do more, and how to set it.


class TrustNeeds(Protocol):
    """The server's components that weighing steps uses."""

    archive: Archive
    clock: Clock
    config: ServerConfig
    outlook: Outlook


@router.get("/ledger/steps")
def get_steps(
    parts: Annotated[TrustNeeds, Depends(services)], _: Reader, fault: FaultName = None, since: Since = None
) -> Response:
    """Each fault's mode, its decisions with their outcomes, whether they suffice for the next mode, and its lines.

    Of the last 90 days unless since is given. Each incident counts once.
    """
    since_s = parts.clock.now_s() - LEDGER_S if since is None else moment_s("since", since)
    settings, policy = parts.config.accounts, parts.outlook.policy()
    found, cut = parts.archive.decisions(since_s, fault)
    decisions = trust.of_incidents(found)
    spans = parts.archive.jobs() if decisions else None
    mine = trust.by_fault(decisions)
    items = []
    for name in trust.faults_of(decisions):
        if fault in (None, name):
            shown = trust.evidence(mine.get(name, []), spans.jobs if spans else {}, policy)
            items.append(_item(name, shown, trust.step(policy, name), settings))
    return answer(
        {
            "since": rfc3339(since_s),
            "window_seconds": parts.archive.hindsight_s,
            "decisions_min": settings.step_decisions_min,
            "approve_precision_min": settings.approve_precision_min,
            "act_precision_min": settings.act_precision_min,
            "cut": cut or (spans is not None and spans.cut),
            "items": items,
        }
    )


def _item(fault: str, shown: FaultEvidence, step: ModeStep, settings: AccountSettings) -> dict[str, Any]:
    counted = shown.precision
    verdict, detail = trust.assess(counted, step.mode, settings)
    return {
        "fault": fault,
        "mode": step.mode,
        "where": step.where,
        "kinds": step.kinds,
        "elsewhere": [
            {"where": where, "jobs": rule.jobs, "kinds": rule.kinds, "mode": rule.mode}
            for where, rule in step.elsewhere
        ],
        **counted._asdict(),
        "approved": shown.approved,
        "precision": counted.ratio,
        "interval_95": counted.interval,
        "saved": _hours(shown.saved),
        "cost": _hours(shown.cost),
        "next": step.next,
        "verdict": verdict,
        "detail": detail,
        "toml": step.toml,
        "in_place_of": step.in_place_of,
    }


def _hours(hours: HoursAtStake) -> dict[str, Any]:
    known_s = None if hours.gpu_seconds is None else round(hours.gpu_seconds, 3)
    return {"gpu_seconds": known_s, "cannot_tell": hours.cannot_tell}


# The audit trail of changes by people, subscribers and the server itself.

audit_router = APIRouter(prefix="/api/v1/audit", tags=["audit"])

FILTER_CHARS_MAX = 1_000


class AuditNeeds(Protocol):
    """The server's components that the audit trail uses."""

    store: Store


AuditParts = Annotated[AuditNeeds, Depends(services)]


@audit_router.get("")
def list_entries(
    parts: AuditParts,
    _: Admin,
    subject: Annotated[str | None, Query(max_length=FILTER_CHARS_MAX, description="What was changed: an id.")] = None,
    who: Annotated[
        str | None,
        Query(max_length=FILTER_CHARS_MAX, description="A token's id, user:NAME, local, server or configuration."),
    ] = None,
    verb: Annotated[str | None, Query(max_length=FILTER_CHARS_MAX, description="What was done.")] = None,
    since: Since = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Response:
    """Who changed what, newest first. Nothing is ever taken out of it."""
    page = parts.store.audit(cursor, limit, subject, who, verb, None if since is None else moment_s("since", since))
    return listing(page, views.audit)
