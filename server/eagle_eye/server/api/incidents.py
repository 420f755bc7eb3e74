"""/api/v1/incidents: detected incidents, and people's decisions on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Protocol

from fastapi import APIRouter, Depends, Response

from eagle_eye.server.api import views
from eagle_eye.server.api.filter_values import ListedIncidentState
from eagle_eye.server.api.fleet_overview import LIVE_STATES
from eagle_eye.server.api.policy_view import policy_view
from eagle_eye.server.api.requests import (
    Cell,
    Cursor,
    FaultName,
    Limit,
    Operator,
    Reader,
    Since,
    answer,
    audited,
    found,
    given,
    listing,
    missing,
    moment_s,
    services,
)
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.delivery import events as outbound
from eagle_eye.server.engine import ledger
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.records import Incident
from eagle_eye.server.monitor.watcher import Outlook
from eagle_eye.server.security.auth import Principal
from eagle_eye.server.store.store import EVIDENCE, INCIDENTS, PAGE_LIMIT_MAX, Change, Store

router = APIRouter(prefix="/api/v1/incidents", tags=["incidents"])

OPEN = "open"  # suspected and confirmed incidents
LIVE = "live"
UNTREATED_STATES = ("suspected", "confirmed")
HISTORY_MAX = 200  # entries shown with an incident; GET /api/v1/audit has all
ACTIONS_REPORTED_MAX = 100


class Needs(Protocol):
    """The server's components that this module uses."""

    clock: Clock
    config: ServerConfig
    outlook: Outlook
    store: Store


Parts = Annotated[Needs, Depends(services)]


@router.get("")
def list_incidents(
    parts: Parts,
    _: Reader,
    job: str | None = None,
    node: str | None = None,
    state: ListedIncidentState | None = None,
    fault: FaultName = None,
    cell: Cell = None,
    since: Since = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Response:
    """Incidents, newest first; ``node`` finds those that concern it.

    State ``open`` finds those suspected or confirmed, ``live`` also those that are acted on: their trouble goes on.
    """
    since_s = None if since is None else moment_s("since", since)
    filters: dict[str, str | Sequence[str]] = {**given(job=job, node=node, state=state, fault=fault, cell=cell)}
    if state == OPEN:
        filters["state"] = UNTREATED_STATES
    elif state == LIVE:
        filters["state"] = sorted(LIVE_STATES)
    return listing(parts.store.page(INCIDENTS, filters, cursor, limit, since_s=since_s), views.incident)


@router.get("/{incident}")
def get_incident(parts: Parts, _: Reader, incident: str) -> Response:
    """One incident with its evidence; ``gathered`` is what agents were asked for because of it, newest first.

    ``history`` is what became of it and of its actions, oldest first: the newest entries of the audit trail.
    """
    record = found(parts, INCIDENTS, incident)
    gathered = parts.store.page(EVIDENCE, {"incident_id": incident}, limit=PAGE_LIMIT_MAX).items
    about = [incident, *(action.id for action in parts.store.actions_of(incident)[-ACTIONS_REPORTED_MAX:])]
    history = parts.store.audit(limit=HISTORY_MAX, subject=about).items[::-1]
    return answer(
        {
            **views.incident(record),
            "gathered": [views.evidence(item) for item in gathered],
            "history": [views.audit(entry) for entry in history],
            "silence": views.silence_of(parts.store, record, parts.clock.now_s()),
        }
    )


@router.get("/{incident}/policy")
def explain(parts: Parts, _: Reader, incident: str) -> Response:
    """What policy says of the incident now, rule by rule, and what it said when something was asked for."""
    record = found(parts, INCIDENTS, incident)
    return answer(policy_view(record, parts.outlook.explain(record), parts.store.actions_of(incident)))


@router.post("/{incident}/acknowledge")
def acknowledge(parts: Parts, principal: Operator, incident: str) -> Response:
    """Note that a person has seen the incident."""
    return _changed(
        parts,
        principal,
        incident,
        "acknowledge",
        lambda record: ledger.acknowledge(record, principal.who, parts.clock.now_s()),
    )


@router.post("/{incident}/resolve")
def resolve(parts: Parts, principal: Operator, incident: str) -> Response:
    """Close the incident; what it asked for and nobody took up is withdrawn."""
    return _changed(parts, principal, incident, "resolve", lambda record: ledger.resolve(record, parts.clock.now_s()))


@router.post("/{incident}/false")
def mark_false(parts: Parts, principal: Operator, incident: str) -> Response:
    """Mark the incident as a false alarm; what it asked for and nobody took up is withdrawn."""
    return _changed(parts, principal, incident, "false", lambda record: ledger.mark_false(record, parts.clock.now_s()))


def _changed(
    parts: Needs,
    principal: Principal,
    incident_id: str,
    verb: str,
    transition: Callable[[Incident], Incident],
) -> Response:
    def change(store: Store) -> Change:
        old = store.get(INCIDENTS, incident_id)
        if old is None:
            raise missing("incidents", incident_id)
        new = transition(old)
        if new is old:
            return Change()
        entry = audited(parts, principal, verb, incident_id)
        if not ledger.is_over(new):
            return Change(incidents=(new,), audit=(entry,))
        return _ended(parts, principal, store, old, new, Change(incidents=(new,), audit=(entry,)))

    parts.store.update(change)
    return answer(views.incident(found(parts, INCIDENTS, incident_id)))


def _ended(parts: Needs, principal: Principal, store: Store, old: Incident, new: Incident, change: Change) -> Change:
    """Return the change with the incident's open requests withdrawn and both announced."""
    now_s = parts.clock.now_s()
    open_requests = [a for a in store.actions_of(new.id) if a.state in ("awaiting", "requested")]
    withdrawn = [ledger.withdraw(action, f"the incident is {new.state}", now_s) for action in open_requests]
    events = [
        outbound.action_withdrawn(action, parts.config.public_url, now_s)
        for action, before in zip(withdrawn, open_requests, strict=True)
        # What waited for approval was never announced.
        if before.state == "requested"
    ]
    if old.ended_s is None:
        events.append(outbound.incident_resolved(new, now_s))
    entries = (audited(parts, principal, "withdraw", action.id, action.reason) for action in withdrawn)
    return replace(change, audit=(*change.audit, *entries), actions=tuple(withdrawn), events=tuple(events))
