"""/api/v1/incidents: detected incidents, people's decisions on them, and charts and dossiers to decide by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Query, Response

from eagle_eye.detectors.faults import BY_NAME as FAULTS
from eagle_eye.schema.metrics import BY_NAME as METRICS
from eagle_eye.server.accounts.node_records import sat_at
from eagle_eye.server.accounts.trust import would_stop
from eagle_eye.server.api import views
from eagle_eye.server.api.actions import other_hold, policy_view
from eagle_eye.server.api.filter_values import ListedIncidentState
from eagle_eye.server.api.metric_history import moments
from eagle_eye.server.api.nodes import gpu
from eagle_eye.server.api.overview import LIVE_STATES
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
from eagle_eye.server.charts import plots
from eagle_eye.server.charts.dossier import commands, story
from eagle_eye.server.charts.plots import (
    ACCUSED_MAX,
    LENGTH_S_MAX,
    POINTS,
    POINTS_MAX,
    Cast,
    Drawing,
    Panel,
    Stretch,
    around,
    cast,
    drawing_of,
    panels,
    stretch,
)
from eagle_eye.server.charts.reading import Turns, members_of, ranks_seen, read
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.delivery import events as outbound
from eagle_eye.server.engine import ledger
from eagle_eye.server.engine.incidents import OPEN_STATES
from eagle_eye.server.engine.ledger import phase
from eagle_eye.server.engine.settings import mode_of
from eagle_eye.server.history.history import History, QueryPart
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.clock import Clock, rfc3339
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.model.records import Action, Incident, Node, NodeCheck, Ticket
from eagle_eye.server.monitor.watcher import Outlook
from eagle_eye.server.security.auth import Principal
from eagle_eye.server.site_files import Places
from eagle_eye.server.store.store import (
    DELIVERIES,
    EVIDENCE,
    GPUS,
    INCIDENTS,
    JOBS,
    NODE_CHECKS,
    NODES,
    OVER_JOB_STATES,
    PAGE_LIMIT_MAX,
    TICKETS,
    Change,
    Store,
)

router = APIRouter(prefix="/api/v1/incidents", tags=["incidents"])

OPEN = "open"  # suspected and confirmed incidents
LIVE = "live"
UNTREATED_STATES = ("suspected", "confirmed")
HISTORY_MAX = 200  # entries shown with an incident; GET /api/v1/audit has all
ACTIONS_REPORTED_MAX = 100


class IncidentNeeds(Protocol):
    """The server's components that the endpoints of incidents use."""

    clock: Clock
    config: ServerConfig
    outlook: Outlook
    store: Store


IncidentParts = Annotated[IncidentNeeds, Depends(services)]


@router.get("")
def list_incidents(
    parts: IncidentParts,
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
def get_incident(parts: IncidentParts, _: Reader, incident: str) -> Response:
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
def explain(parts: IncidentParts, _: Reader, incident: str) -> Response:
    """What policy says of the incident now, rule by rule, and what it said when something was asked for."""
    record = found(parts, INCIDENTS, incident)
    return answer(policy_view(record, parts.outlook.explain(record), parts.store.actions_of(incident)))


@router.post("/{incident}/acknowledge")
def acknowledge(parts: IncidentParts, principal: Operator, incident: str) -> Response:
    """Note that a person has seen the incident."""
    return _changed(
        parts,
        principal,
        incident,
        "acknowledge",
        lambda record: ledger.acknowledge(record, principal.who, parts.clock.now_s()),
    )


@router.post("/{incident}/resolve")
def resolve(parts: IncidentParts, principal: Operator, incident: str) -> Response:
    """Close the incident; what it asked for and nobody took up is withdrawn."""
    return _changed(parts, principal, incident, "resolve", lambda record: ledger.resolve(record, parts.clock.now_s()))


@router.post("/{incident}/false")
def mark_false(parts: IncidentParts, principal: Operator, incident: str) -> Response:
    """Mark the incident as a false alarm; what it asked for and nobody took up is withdrawn."""
    return _changed(parts, principal, incident, "false", lambda record: ledger.mark_false(record, parts.clock.now_s()))


def _changed(
    parts: IncidentNeeds,
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


def _ended(
    parts: IncidentNeeds, principal: Principal, store: Store, old: Incident, new: Incident, change: Change
) -> Change:
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


# Was it right? What is on record since a node was taken out, for and against, in sentences. Nobody sees what would have
# happened without the action, so nothing here is a verdict; a node check comes closest.

CHECKED = {"healthy": "found it healthy", "sick": "found it sick", "cannot_tell": "could not tell"}


def aftermath(
    incident: Incident, actions: Sequence[Action], checks: Sequence[NodeCheck], tickets: Sequence[Ticket]
) -> list[str]:
    """Return the sentences, the weightiest first; [] while no action on the incident has been carried out.

    ``checks`` and ``tickets`` are those of the nodes that the last such action took out.
    """
    action = next((one for one in reversed(actions) if one.state == "done" and would_stop(one)), None)
    if action is None:
        return []
    said = ["A person called it a false alarm."] if incident.state == "false" else []
    said += [_checked(node, checks, action) for node in action.exclude]
    said += [f"A ticket was opened for {one.node}: {one.text}" for one in tickets if one.opened_s >= incident.onset_s]
    if incident.ended_s is not None and incident.state != "false":
        said.append(f"The trouble was over {max(0.0, incident.ended_s - action.updated_s):.0f} s after the action.")
    elif incident.state in OPEN_STATES:
        said.append("The trouble goes on although it was done: if that lasts, its cause is elsewhere.")
    kinds = [kind.replace("_", " ") for kind in incident.kinds]
    if kinds:
        agreed = f"{len(kinds)} kinds of evidence agreed" if len(kinds) > 1 else "It rests on one kind of evidence"
        said.append(f"{agreed}: {', '.join(kinds)}.")
    return said


def _checked(node: str, checks: Sequence[NodeCheck], action: Action) -> str:
    since = [one for one in checks if one.node == node and one.created_s >= action.created_s and one.state in CHECKED]
    if not since:
        return f"Not known yet: whether {node} itself is sick. It has not been checked since."
    last = max(since, key=lambda one: one.updated_s)
    detail = f": {last.detail}" if last.detail else "."
    return f"A check of {node} {CHECKED[last.state]}{detail}"


# Charts of an incident's evidence, and its dossier: all that is needed to act.

WHERE_MAX = 16  # nodes of an incident whose location is shown
AUDIT_MAX = 400
CHECKS_MAX = 20  # of a node, and of its tickets: the newest
EMPTY_STEPS = 5  # shown before the first observation
OptionalMoment = Annotated[Since, Query(description="RFC 3339, or Unix seconds; around the onset by default.")]


class IncidentChartNeeds(Protocol):
    """The server's components that the charts and dossiers of incidents use."""

    clock: Clock
    config: ServerConfig
    fleet: Fleet
    history: History
    outlook: Outlook
    places: Places
    store: Store
    turns: Turns


IncidentChartParts = Annotated[IncidentChartNeeds, Depends(services)]


@router.get("/{incident}/picture")
def chart(
    parts: IncidentChartParts,
    _: Reader,
    incident: str,
    metric: Annotated[str | None, Query(max_length=200, description="The first of the dossier's panels.")] = None,
    node: Annotated[str | None, Query(max_length=200, description="Who is accused, unless the evidence says.")] = None,
    device: Annotated[int | None, Query(ge=-1, lt=1 << 15)] = None,
    start: OptionalMoment = None,
    end: OptionalMoment = None,
    points: Annotated[int, Query(ge=10, le=POINTS_MAX, description="About so many steps.")] = POINTS,
) -> Response:
    """One metric of an incident's evidence: the accused's course, its peers' band, the threshold, onset and verdict.

    All ``columns`` have one value for each step; null is "nothing was observed", never zero. ``said`` is the same in
    sentences, with what was not seen; ``silences`` are the times in which peers were seen and the accused was not.
    """
    record = found(parts, INCIDENTS, incident)
    panel = _panel(record, metric, node, device)
    start_s, end_s = moments(start, end, around(record, parts.clock.now_s()))
    if end_s - start_s > LENGTH_S_MAX:
        raise Refusal(400, "too_much", f"{end_s - start_s:.0f} s; a chart shows {LENGTH_S_MAX:.0f} s at most")
    with parts.turns.one():
        who = _cast(parts, record, panel)
        drawing = panel.drawing
        wanted = stretch(start_s, end_s, points)
        job = record.job if drawing.metric.name.startswith(("train_", "nccl_")) else None
        got = read(parts.history, drawing.metric, plots.statistic_of(drawing), (who.accused, who.peers), wanted, job)
    who = who._replace(peers=got.nodes)
    drawn = plots.band(got.series, got.stretch.steps, drawing, who)
    empty = max(0, plots.begun(drawn) - EMPTY_STEPS) if start is None else 0
    shown = got.stretch._replace(
        start_s=got.stretch.start_s + empty * got.stretch.step_s, steps=got.stretch.steps - empty
    )
    return answer(_drawn(record, panel, who, shown, plots.without(drawn, empty), got.spans))


@router.get("/{incident}/dossier")
def dossier(parts: IncidentChartParts, _: Reader, incident: str) -> Response:
    """What a person needs in order to act: where the accused are, what to type, what happened, what can be drawn.

    ``aftermath`` is what has come to light since an action was carried out, for and against it, in sentences. While one
    waits to be approved or taken up, ``carriers`` are the subscriptions that it goes to ([]: nobody will carry it out)
    and ``hold_now`` is why policy would not ask for it now; otherwise they are null and "".
    """
    record = found(parts, INCIDENTS, incident)
    store = parts.store
    actions = store.actions_of(incident)[-ACTIONS_REPORTED_MAX:]
    gathered = store.page(EVIDENCE, {"incident_id": incident}, limit=PAGE_LIMIT_MAX).items
    deliveries = store.page(DELIVERIES, {"group": incident}, limit=PAGE_LIMIT_MAX)
    audit = store.audit(limit=AUDIT_MAX, subject=[incident, *(action.id for action in actions)])
    reported = story(record, actions, deliveries.items, gathered, audit.items[::-1])
    blamed = dict.fromkeys([*([record.node] if record.node else []), *record.nodes])
    blamed.update(dict.fromkeys(name for action in actions for name in action.exclude))
    nodes = {name: node for name in list(blamed)[:WHERE_MAX] if (node := store.get(NODES, name)) is not None}
    fault = FAULTS.get(record.fault)
    job = store.get(JOBS, record.job)
    last = next((action for action in reversed(actions) if not action.preliminary), None)
    waiting = last if last is not None and last.state in ("awaiting", "requested") else None
    weighing = None if waiting is None else parts.outlook.explain(record)
    policy = parts.outlook.policy()
    mode = mode_of(policy.mode, policy.modes, record.job, record.fault, record.action).mode
    return answer(
        {
            "incident": views.incident(record),
            "owner": "" if job is None else job.owner,
            "aftermath": _aftermath(store, record, actions),
            "meaning": "" if fault is None else fault.meaning,
            "repair": "" if fault is None else fault.repair,
            "mode": mode,
            "carriers": None
            if waiting is None
            else views.carriers(store, waiting, parts.config.public_url, parts.clock.now_s()),
            "hold_now": "" if waiting is None else other_hold(weighing, waiting),
            "silence": views.silence_of(store, record, parts.clock.now_s()),
            "where": [_where(parts, record, name, nodes.get(name)) for name in list(blamed)[:WHERE_MAX]],
            "where_left_out": max(0, len(blamed) - WHERE_MAX),
            "commands": [command._asdict() for command in commands(record, actions, nodes, job, mode)],
            "actions": [views.action(action, parts.config.public_url) for action in actions],
            "gathered": [views.evidence(item) for item in gathered],
            "deliveries": [views.delivery(delivery) for delivery in deliveries.items],
            "story": [
                {"time": rfc3339(e.time_s), "kind": e.kind, "text": e.text, "id": e.id, "who": e.who}
                for e in reported.entries
            ],
            "story_left_out": reported.left_out,
            "cut": deliveries.next is not None or audit.next is not None,
            "panels": [_reported(panel) for panel in panels(record.evidence, "" if fault is None else fault.trouble)],
        }
    )


def _aftermath(store: Store, record: Incident, actions: list[Action]) -> list[str]:
    taken_out = dict.fromkeys(name for action in actions for name in action.exclude)
    checks = [one for name in taken_out for one in store.page(NODE_CHECKS, {"node": name}, limit=CHECKS_MAX).items]
    tickets = [one for name in taken_out for one in store.page(TICKETS, {"node": name}, limit=CHECKS_MAX).items]
    return aftermath(record, actions, checks, tickets)


def _panel(record: Incident, metric: str | None, node: str | None, device: int | None) -> Panel:
    """Return what is to be drawn. Raises Refusal 400 for a metric without series, 404 if there is nothing to draw."""
    fault = FAULTS.get(record.fault)
    known = panels(record.evidence, "" if fault is None else fault.trouble)
    if metric is None:
        if not known:
            raise Refusal(404, "not_found", f"nothing of incident {record.id} can be drawn; name a metric")
        panel = known[0]
    else:
        alike = [p for p in known if metric in (p.evidence, p.drawing.metric.name)]
        exact = [p for p in alike if (node is None or p.node == node) and (device is None or p.device == device)]
        drawing = drawing_of(metric)
        if not alike and drawing is None:
            raise Refusal(404, "metric", f"no series of the history shows {metric[:80]!r}; see the dossier's panels")
        panel = next(iter(exact or alike), None) or Panel(
            drawing or Drawing(METRICS["train_step"], "value"), "", None, None
        )
    return panel._replace(
        node=node if node is not None else panel.node,
        device=device if device is not None and device >= 0 else panel.device,
    )


def _cast(parts: IncidentChartNeeds, record: Incident, panel: Panel) -> Cast:
    """Return the nodes to draw; for a panel that names no node the accused are the incident's."""
    accused = [panel.node] if panel.node is not None else [record.node] if record.node is not None else record.nodes
    accused = accused[:ACCUSED_MAX]
    device = panel.device
    if device is None and panel.node is None and record.node is not None and not panel.evidence:
        device = record.device
    members = members_of(parts.store, parts.fleet, record.job, record.attempt, record.onset_s)
    nodes = members.nodes or tuple(record.nodes)
    ranks = members.ranks
    if not any(rank.role for rank in ranks):
        seen = ranks_seen(parts.history, record.job, record.attempt, accused, nodes, record.onset_s)
        ranks = seen or ranks
    if not accused or len(accused) * 2 > max(len(nodes), 2):
        return cast((), None, (), nodes)  # a problem of most of the job has no peers in it
    return cast(accused, device, ranks, nodes)


def _drawn(
    record: Incident, panel: Panel, who: Cast, shown: Stretch, got: plots.Band, spans: list[QueryPart]
) -> dict[str, Any]:
    drawing = panel.drawing
    name = _name(who)
    reported_s = max(record.detected_s, record.onset_s)
    return {
        "incident_id": record.id,
        **_reported(panel),
        "shows": plots.axis_label(drawing.metric, drawing),
        "start": rfc3339(shown.start_s),
        "end": rfc3339(shown.end_s),
        "step_seconds": shown.step_s,
        "onset": rfc3339(record.onset_s),
        "detected": rfc3339(record.detected_s),
        "ended": None if record.ended_s is None else rfc3339(record.ended_s),
        "name": name,
        "accused": list(who.accused),
        "accused_series": got.accused_series,
        "peers": {"nodes": len(who.peers), "nodes_total": who.peers_total, "series": got.peer_series, "said": who.said},
        "columns": {
            "time": [round(time_s, 3) for time_s in shown.times_s],
            "accused": numbers(got.accused),
            "low": numbers(got.low),
            "median": numbers(got.median),
            "high": numbers(got.high),
            "peers_seen": [int(count) for count in got.seen],
        },
        "silences": [
            {
                "start": rfc3339(shown.start_s + first * shown.step_s),
                "end": rfc3339(shown.start_s + (last + 1) * shown.step_s),
            }
            for first, last in plots.silences(got)
        ],
        "said": plots.described(got, shown, drawing, who, name, reported_s),
        "resolutions": resolutions(spans),
    }


def resolutions(spans: list[QueryPart]) -> list[dict[str, Any]]:
    """Return the bucket length used for each time range."""
    return [
        {"start": rfc3339(span.start_s), "end": rfc3339(span.end_s), "resolution_seconds": span.bucket_s}
        for span in spans
    ]


def numbers(values: plots.Floats) -> list[float | str | None]:
    """Return a column as JSON: null for what was not observed, ``+Inf`` and ``-Inf`` for infinities."""
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return float(f"{value:.7g}") if abs(value) < 1e7 else value


def _reported(panel: Panel) -> dict[str, Any]:
    drawing = panel.drawing
    return {
        "metric": drawing.metric.name,
        "unit": "collectives"
        if drawing.form == "behind"
        else "bool"
        if drawing.form == "bits"
        else drawing.metric.unit,
        "form": drawing.form,
        "evidence": panel.evidence,
        "node": panel.node,
        "device": panel.device,
        "threshold": drawing.threshold,
    }


def _name(who: Cast) -> str:
    if not who.accused:
        return "the job"
    if len(who.accused) > 1:
        return f"{len(who.accused)} nodes"
    return who.accused[0] if who.device is None else f"{who.accused[0]} device {who.device}"


def _where(parts: IncidentChartNeeds, record: Incident, name: str, node: Node | None) -> dict[str, Any]:
    """Return a node's location and what is on it, as far as known; null and empty: unknown.

    Fields that require a search of all jobs and GPUs (who was reported there at the time) are set for the accused only.
    """
    store, now_s = parts.store, parts.clock.now_s()
    mine = name == record.node
    cards = {card.uuid: card for card in store.page(GPUS, {"node": name}, limit=PAGE_LIMIT_MAX).items}
    if mine:
        cards.update({card.uuid: card for card in store.page(GPUS, {"seat": name}, limit=PAGE_LIMIT_MAX).items})
    sat = {uuid: sat_at(card, record.onset_s) or sat_at(card, now_s) for uuid, card in cards.items()}
    accused = record.device if mine else None
    there = sorted(
        (seat[1], uuid)
        for uuid, seat in sat.items()
        if seat is not None and seat[0] == name and accused in (None, seat[1])
    )
    heard = parts.fleet.last(name)
    jobs = {rank.job for rank in heard.ranks} if heard is not None else set()
    jobs |= {heard.job} if heard is not None and heard.job else set()
    if mine:
        known = store.page(JOBS, {"node": name}, limit=PAGE_LIMIT_MAX).items
        jobs |= {job.job for job in known if job.state not in OVER_JOB_STATES}
    place = parts.places
    return {
        "node": name,
        "accused": mine,
        "state": None if node is None else node.state,
        "phase": None if node is None else phase(node, now_s),
        "reason": "" if node is None else node.reason,
        "heard": None if heard is None else rfc3339(heard.received_s),
        "rack": place.rack_of_node.get(name),
        "switch": place.switch_of_node.get(name),
        "device": accused,
        "gpus": [gpu(cards[uuid]) for _, uuid in there],
        "other_jobs": sorted(jobs - {record.job}),
    }
