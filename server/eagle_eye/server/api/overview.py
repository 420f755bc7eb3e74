"""/api/v1/fleet: an overview of all jobs and nodes, small enough to be polled every few seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Query, Response

from eagle_eye.server.accounts.archive import Archive
from eagle_eye.server.api import fleet_overview as overview
from eagle_eye.server.api.node_history import scores_of
from eagle_eye.server.api.requests import Cell, Reader, answer, services
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.engine.ledger import phase
from eagle_eye.server.ingest.fleet import RECENT_S, Fleet, Presence
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.records import Incident, Node
from eagle_eye.server.model.timestamps import rfc3339
from eagle_eye.server.monitor.cells import Cells
from eagle_eye.server.monitor.readiness import Doctor
from eagle_eye.server.monitor.watcher import JobProgress, Outlook
from eagle_eye.server.site_files.topology import Places
from eagle_eye.server.store.store import NODES, Store

JOBS_SHOWN_MAX = 1_000
_NO_DETAILS = MappingProxyType({"heard": None, "recurrence_score": None, "lemon_score": None, "reasons": None})

router = APIRouter(prefix="/api/v1/fleet", tags=["fleet"])


class Needs(Protocol):
    """The server's components that this module uses."""

    archive: Archive
    cells: Cells | None
    clock: Clock
    config: ServerConfig
    doctor: Doctor
    fleet: Fleet
    outlook: Outlook
    places: Places
    store: Store


Parts = Annotated[Needs, Depends(services)]


@router.get("")
def get_fleet(parts: Parts, _: Reader, cell: Cell = None) -> Response:
    """The running jobs, the longest without a step first, each with what is seen of it and what it loses right now.

    ``nodes`` were ever heard of, ``nodes_recent`` of them within six hours, ``nodes_heard`` just now. ``readiness`` is
    what /readyz says, which answers 503 where this does not. With ``cell`` the jobs are those that it judges.
    """
    shown = cell is None or parts.cells is None or parts.cells.several or cell == parts.cells.own
    now_s = parts.clock.now_s()
    incidents: dict[str, list[Incident]] = defaultdict(list)
    for incident in parts.store.open_incidents():
        incidents[incident.job].append(incident)
    running = sorted(
        (course for course in parts.outlook.courses() if course.state in ("running", "completing")),
        key=lambda course: course.started_s if course.progressed_s is None else course.progressed_s,
    )
    known, heard = parts.fleet.counts(now_s, parts.config.ingest.fresh_s)
    return answer(
        {
            "time": rfc3339(now_s),
            "jobs": [_job(course, incidents[course.job], now_s) for course in running[:JOBS_SHOWN_MAX] if shown],
            "jobs_left_out": max(len(running) - JOBS_SHOWN_MAX, 0),
            "nodes": known,
            "nodes_heard": heard,
            "nodes_recent": parts.fleet.recent(now_s - RECENT_S),
            "policy_mode": parts.outlook.policy().mode,
            "grafana_url": parts.config.grafana_url,
            "readiness": parts.doctor.check()._asdict(),
        }
    )


@router.get("/nodes")
def get_map(
    parts: Parts,
    _: Reader,
    details: Annotated[
        bool, Query(description="With the columns that a list of nodes has and a map does not.")
    ] = False,
) -> Response:
    """Every node in a few columns: ``nodes[i]`` stands as ``standings[standing[i]]`` says, and so on; -1: none known.

    A node of several jobs is counted with the one that comes first by name. ``heard``, ``recurrence_score`` (null:
    unknown; ``lemon_score`` is its former name) and ``reasons``, of nodes that are not in service, are null unless
    ``details`` are asked for. With them, where there are several cells, ``cells[cell[i]]`` hears the node.
    """
    now_s, fresh_s = parts.clock.now_s(), parts.config.ingest.fresh_s
    presences = {one.node: one for one in parts.fleet.presences()}
    heard = {name: one.is_fresh(now_s, fresh_s) for name, one in presences.items()}
    accused = overview.accused(parts.store.open_incidents())
    number = {standing: at for at, standing in enumerate(overview.STANDINGS)}
    records = parts.store.all(NODES)
    nodes = [record.node for record in records]
    jobs: dict[str, str] = {}
    for course in sorted(parts.outlook.courses(), key=lambda course: course.job, reverse=True):
        if course.state in ("running", "completing"):
            jobs.update(dict.fromkeys(course.nodes, course.job))
    job_names, job = overview.places_of(nodes, jobs)
    rack_names, rack = overview.places_of(nodes, parts.places.rack_of_node)
    switch_names, switch = overview.places_of(nodes, parts.places.switch_of_node)
    return answer(
        {
            "time": rfc3339(now_s),
            "standings": overview.STANDINGS,
            "jobs": job_names,
            "racks": rack_names,
            "switches": switch_names,
            "nodes": nodes,
            "standing": [
                number[overview.standing(phase(one, now_s), accused.get(one.node), heard.get(one.node))]
                for one in records
            ],
            "job": job,
            "rack": rack,
            "switch": switch,
            **(_details(parts, records, presences) if details else _NO_DETAILS),
        }
    )


def _details(parts: Needs, records: list[Node], presences: Mapping[str, Presence]) -> dict[str, Any]:
    by_node = {} if (found := scores_of(parts)) is None else found.by_node
    scores = [None if one.node not in by_node else by_node[one.node].score for one in records]
    rounded = [None if score is None else round(score, 4) for score in scores]
    received = [presences.get(one.node) for one in records]
    return {
        "heard": [None if one is None else rfc3339(one.received_s) for one in received],
        "recurrence_score": rounded,
        "lemon_score": rounded,
        "reasons": {one.node: one.reason for one in records if one.state != "in_service" and one.reason},
    }


def _job(course: JobProgress, incidents: list[Incident], now_s: float) -> dict[str, Any]:
    loss = overview.loss(course, incidents, now_s)
    return {
        "job": course.job,
        "attempt": course.attempt,
        "state": course.state,
        "owner": course.owner,
        "restart_owner": course.restart_owner,
        "started": rfc3339(course.started_s),
        "ends": None if course.ends_s is None else rfc3339(course.ends_s),
        "nodes": len(course.nodes),
        "nodes_heard": course.heard,
        "gpus": course.gpus,
        "not_seen": overview.not_seen(course.metrics),
        "step": course.step,
        "progressed": None if course.progressed_s is None else rfc3339(course.progressed_s),
        "step_seconds": course.step_s,
        "incidents": sum(i.state in overview.LIVE_STATES and not i.merged_into for i in incidents),
        "loss": None
        if loss is None
        else {
            "kind": loss.kind,
            "since": rfc3339(loss.since_s),
            "gpus": loss.gpus,
            "gpu_hours": loss.gpu_hours(now_s),
            "incident_id": loss.incident_id,
            "fault": loss.fault,
        },
    }
