"""The site as a whole: /api/v1/fleet, /api/v1/cells, who leads, and whether the server can judge."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from fastapi import APIRouter, Depends, Query, Response
from msgspec.structs import replace
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.server.accounts.archive import Archive
from eagle_eye.server.accounts.goodput import LATE_FLOOR_S, LATE_STEPS, stops_jobs
from eagle_eye.server.api.nodes import scores_of
from eagle_eye.server.api.requests import Cell, Operator, Reader, answer, audited, services
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.engine.ledger import Phase, phase
from eagle_eye.server.ingest.fleet import RECENT_S, Fleet, Presence
from eagle_eye.server.model.clock import Clock, rfc3339
from eagle_eye.server.model.errors import Refusal, StoreUnavailable
from eagle_eye.server.model.records import CellStatus, Incident, Node
from eagle_eye.server.monitor.cells import Cells, drained, moved, why_held
from eagle_eye.server.monitor.readiness import Doctor
from eagle_eye.server.monitor.watcher import JobProgress, Outlook
from eagle_eye.server.site_files import Places
from eagle_eye.server.store.leadership import Leadership
from eagle_eye.server.store.settings import DEFAULT_CELL
from eagle_eye.server.store.store import CELLS, JOB_CELLS, JOBS, NODES, Change, Store
from eagle_eye.server.telemetry.counters import Telemetry, metric_name

# What is observed of each job, what it loses at present, and how each node stands. Pure.

# Names for the groups of observed metrics, with their name prefixes.
FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "GPUs": ("gpu_",),
        "steps": ("train_step",),
        "NCCL": ("nccl_",),
        "hosts": ("node_cpu", "node_memory", "node_io", "node_blocked"),
        "network": ("link_", "node_rdma", "node_network"),
    }
)
# Of a node, the worst first. accused: a confirmed incident names it; suspected: an unconfirmed one does; silent: not
# heard recently; unheard: not since the server started.
Standing = Literal[
    "accused", "suspected", "excluded", "draining", "checking", "silent", "unheard", "watched", "in_service"
]
STANDINGS: tuple[Standing, ...] = (
    "accused",
    "suspected",
    "excluded",
    "draining",
    "checking",
    "silent",
    "unheard",
    "watched",
    "in_service",
)
LIVE_STATES = frozenset({"suspected", "confirmed", "acting"})  # of incidents whose trouble goes on


class Loss(NamedTuple):
    """What a job loses at present.

    ``gpus`` is the loss in GPUs' worth of work, None if their number is unknown; ``incident_id`` "": no incident
    explains it.
    """

    kind: Literal["stopped", "slow", "unexplained"]
    since_s: float
    gpus: float | None
    incident_id: str = ""
    fault: str = ""

    def gpu_hours(self, now_s: float) -> float | None:
        """Return the loss since it began."""
        return None if self.gpus is None else self.gpus * max(now_s - self.since_s, 0.0) / 3600.0


def not_seen(metrics: Iterable[str]) -> list[str]:
    """Return the groups of metrics of which a job has none."""
    names = tuple(metrics)
    return [part for part, begins in FAMILIES.items() if not any(name.startswith(begins) for name in names)]


def loss_of(course: JobProgress, incidents: Iterable[Incident], now_s: float) -> Loss | None:
    """Return the job's loss at ``now_s``, or None; ``incidents`` are its own, of any state and attempt.

    As in goodput: a stopped job loses all its GPUs, a slow one the share that its worst slowness costs. A pause of more
    than three steps (and at least a minute) is reported too, though it may be a checkpoint or an evaluation: goodput
    counts that time as unknown until an incident explains it. None for a job of which no node is heard.
    """
    if course.state != "running" or not course.heard:
        return None
    mine = [i for i in incidents if i.attempt == course.attempt and i.state in LIVE_STATES and not i.merged_into]
    gpus = None if course.gpus is None else float(course.gpus)
    stops = [i for i in mine if stops_jobs(i)]
    if stops:
        first = min(stops, key=lambda i: i.onset_s)
        return Loss("stopped", first.onset_s, gpus, first.id, first.fault)
    if course.progressed_s is not None and course.step_s is not None:
        late_s = max(LATE_STEPS * course.step_s, LATE_FLOOR_S)
        if now_s - course.progressed_s > late_s:
            return Loss("unexplained", course.progressed_s, gpus)
    slow = [i for i in mine if i.slowdown_ratio > 0.0]
    if slow:
        worst = max(slow, key=lambda i: i.slowdown_ratio)
        share = worst.slowdown_ratio / (1.0 + worst.slowdown_ratio)
        return Loss("slow", worst.onset_s, None if gpus is None else share * gpus, worst.id, worst.fault)
    return None


def accused_in(incidents: Iterable[Incident]) -> dict[str, Standing]:
    """Return the nodes that incidents name, each with the standing from the gravest."""
    found: dict[str, Standing] = {}
    for incident in incidents:
        if incident.state not in LIVE_STATES or incident.merged_into:
            continue
        standing: Standing = "suspected" if incident.state == "suspected" else "accused"
        for node in incident.nodes:
            if found.get(node) != "accused":
                found[node] = standing
    return found


def standing(phase: Phase, word: Standing | None, fresh: bool | None) -> Standing:
    """Return a node's standing from its incidents, its phase, and whether it is heard (None: never was)."""
    if word is not None:
        return word
    if phase in ("excluded", "draining", "checking"):
        return phase
    if fresh is None:
        return "unheard"
    if not fresh:
        return "silent"
    return phase


def places_of(nodes: Sequence[str], place_of: Mapping[str, str]) -> tuple[list[str], list[int]]:
    """Return the names of the nodes' places, and for each node the index of its own; -1: unknown."""
    index: dict[str, int] = {}
    found = []
    for node in nodes:
        name = place_of.get(node, "")
        found.append(index.setdefault(name, len(index)) if name else -1)
    return list(index), found


# The overview of all jobs and nodes, small enough to be polled every few seconds.

JOBS_SHOWN_MAX = 1_000
_NO_DETAILS = MappingProxyType({"heard": None, "recurrence_score": None, "lemon_score": None, "reasons": None})

router = APIRouter(prefix="/api/v1/fleet", tags=["fleet"])


class FleetNeeds(Protocol):
    """The server's components that the fleet's overview uses."""

    archive: Archive
    cells: Cells | None
    clock: Clock
    config: ServerConfig
    doctor: Doctor
    fleet: Fleet
    outlook: Outlook
    places: Places
    store: Store


FleetParts = Annotated[FleetNeeds, Depends(services)]


@router.get("")
def get_fleet(parts: FleetParts, _: Reader, cell: Cell = None) -> Response:
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
    parts: FleetParts,
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
    accused = accused_in(parts.store.open_incidents())
    number = {standing: at for at, standing in enumerate(STANDINGS)}
    records = parts.store.all(NODES)
    nodes = [record.node for record in records]
    jobs: dict[str, str] = {}
    for course in sorted(parts.outlook.courses(), key=lambda course: course.job, reverse=True):
        if course.state in ("running", "completing"):
            jobs.update(dict.fromkeys(course.nodes, course.job))
    job_names, job = places_of(nodes, jobs)
    rack_names, rack = places_of(nodes, parts.places.rack_of_node)
    switch_names, switch = places_of(nodes, parts.places.switch_of_node)
    return answer(
        {
            "time": rfc3339(now_s),
            "standings": STANDINGS,
            "jobs": job_names,
            "racks": rack_names,
            "switches": switch_names,
            "nodes": nodes,
            "standing": [
                number[standing(phase(one, now_s), accused.get(one.node), heard.get(one.node))] for one in records
            ],
            "job": job,
            "rack": rack,
            "switch": switch,
            **(_details(parts, records, presences) if details else _NO_DETAILS),
        }
    )


def _details(parts: FleetNeeds, records: list[Node], presences: Mapping[str, Presence]) -> dict[str, Any]:
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
    loss = loss_of(course, incidents, now_s)
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
        "not_seen": not_seen(course.metrics),
        "step": course.step,
        "progressed": None if course.progressed_s is None else rfc3339(course.progressed_s),
        "step_seconds": course.step_s,
        "incidents": sum(i.state in LIVE_STATES and not i.merged_into for i in incidents),
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


class PlaceCollector(Collector):
    """Nodes by rack and by switch as the site's file has them; those in no known place are left out."""

    def __init__(self, store: Store, fleet: Fleet, places: Places, clock: Clock, fresh_s: float) -> None:
        self._store = store
        self._fleet = fleet
        self._places = {"rack": places.rack_of_node, "switch": places.switch_of_node}
        self._clock = clock
        self._fresh_s = fresh_s

    def collect(self) -> Iterator[Metric]:
        """Yield the families, empty where the site names no racks or switches."""
        try:
            standings = self._standings() if any(self._places.values()) else {}
        except StoreUnavailable:
            return
        for kind, place_of in self._places.items():
            family = GaugeMetricFamily(
                metric_name(f"{kind}_nodes"), f"Nodes of a {kind}, by how they stand.", labels=[kind, "standing"]
            )
            counts = Counter((place_of[node], standing) for node, standing in standings.items() if node in place_of)
            for (place, standing), count in sorted(counts.items()):
                family.add_metric([place, standing], count)
            yield family

    def _standings(self) -> dict[str, Standing]:
        now_s = self._clock.now_s()
        accused = accused_in(self._store.open_incidents())
        heard = {one.node: one.is_fresh(now_s, self._fresh_s) for one in self._fleet.presences()}
        return {
            one.node: standing(phase(one, now_s), accused.get(one.node), heard.get(one.node))
            for one in self._store.all(NODES)
        }


# The cells of the site, and which of them judges which job.

cells_router = APIRouter(prefix="/api/v1/cells", tags=["cells"])
Force = Annotated[bool, Query(description="Whatever is open of the job.")]


class CellNeeds(Protocol):
    """The server's components that the endpoints of cells use."""

    cells: Cells | None
    clock: Clock
    config: ServerConfig
    fleet: Fleet
    store: Store


CellParts = Annotated[CellNeeds, Depends(services)]


@cells_router.get("")
def list_cells(parts: CellParts, _: Reader) -> Response:
    """The cells, by name, as their leaders last said they are; a site without others has the one called "default".

    ``leads``: the cell has a leader, which said something within half a minute; else its jobs are not judged.
    ``nodes`` are those heard that somebody vouches for, ``jobs`` those given to the cell that are not over. A cell that
    is ``drained`` gets no new jobs.
    """
    cells = parts.cells
    if cells is None:
        alone = CellStatus(
            cell=DEFAULT_CELL,
            url=parts.config.public_url,
            epoch=0,
            nodes=parts.fleet.vouched_count,
            jobs=len(parts.fleet.jobs()),
            problem="",
            updated_s=parts.clock.now_s(),
        )
        return answer({"items": [_cell_view(alone, leads=True)]})
    known = sorted(parts.store.all(CELLS), key=lambda one: one.cell)
    living = cells.living()
    return answer({"items": [_cell_view(one, leads=one.cell in living) for one in known]})


@cells_router.post("/{cell}/jobs/{job:name}")
def move(parts: CellParts, principal: Operator, cell: str, job: str, force: Force = False) -> Response:
    """Have the cell judge the job from now on; the job's agents go there by themselves.

    409 while an incident or an action of the job is open (``force``: then, too), or where the cell has no leader.
    """
    cells = _known_cell(parts, cell)
    if cell not in cells.living():
        raise Refusal(409, "no_leader", f"cell {cell} has no leader: start a server of it first")
    agents = job in parts.fleet.jobs()

    def change(store: Store) -> Change:
        if not (agents or store.get(JOBS, job) or store.get(JOB_CELLS, job)):
            raise Refusal(404, "not_found", f"none of the jobs is called {job[:200]!r}; GET /api/v1/jobs lists them")
        held = "" if force else why_held(store, job)
        if held:
            raise Refusal(409, "busy", f"{held}: move {job} once that is over, or with force=true")
        return moved(store, job, cell, principal.who, parts.clock.now_s())

    parts.store.update(change)
    return answer({"job": job, "cell": cell})


@cells_router.post("/{cell}/drain")
def drain(parts: CellParts, principal: Operator, cell: str) -> Response:
    """Give the cell no new jobs, and have others judge those that it has.

    ``stays`` are the jobs of which something is open: drain again once that is over.
    """
    cells = _known_cell(parts, cell)
    stays: list[str] = []

    def change(store: Store) -> Change:
        found, stays[:] = drained(store, cell, cells.living(), principal.who, parts.clock.now_s())
        entry = audited(parts, principal, "drain", f"cell {cell}")
        return Change(cells=found.cells, job_cells=found.job_cells, audit=(*found.audit, entry))

    done = parts.store.update(change)
    return answer({"cell": cell, "moved": [one.job for one in done.job_cells], "stays": stays})


@cells_router.post("/{cell}/fill")
def fill(parts: CellParts, principal: Operator, cell: str) -> Response:
    """Give the cell new jobs again, after it was drained."""
    _known_cell(parts, cell)

    def change(store: Store) -> Change:
        status = store.get(CELLS, cell)
        if status is None or not status.drained:
            return Change()
        entry = audited(parts, principal, "fill", f"cell {cell}")
        return Change(cells=(replace(status, drained=False),), audit=(entry,))

    parts.store.update(change)
    return answer({"cell": cell, "moved": [], "stays": []})


def _known_cell(parts: CellNeeds, cell: str) -> Cells:
    cells = parts.cells
    if cells is None or parts.store.get(CELLS, cell) is None:
        raise Refusal(404, "not_found", f"none of the cells is called {cell[:200]!r}; GET /api/v1/cells lists them")
    return cells


def _cell_view(status: CellStatus, *, leads: bool) -> dict[str, Any]:
    return {
        "cell": status.cell,
        "url": status.url,
        "epoch": status.epoch,
        "leads": leads,
        "nodes": status.nodes,
        "jobs": status.jobs,
        "drained": status.drained,
        "problem": status.problem,
        "updated": rfc3339(status.updated_s),
    }


# Whether the server is up, can judge, and leads; and its metrics.

health_router = APIRouter(tags=["health"])


class HealthNeeds(Protocol):
    """The server's components that the endpoints of health use."""

    clock: Clock
    config: ServerConfig
    doctor: Doctor
    leadership: Leadership | None
    stands_by: bool
    telemetry: Telemetry


HealthParts = Annotated[HealthNeeds, Depends(services)]


@health_router.get("/healthz")
def healthz() -> Response:
    """The process is up."""
    return answer({"status": "up"})


@health_router.get("/readyz")
def readyz(parts: HealthParts) -> Response:
    """Whether the server can judge: 503 names what is missing. Detectors that see nothing are named either way.

    This is for alarms. A load balancer that obeys it would keep the agents away whose frames end the blindness.
    """
    readiness = parts.doctor.check()
    return answer(readiness._asdict(), 200 if readiness.ready else 503)


@health_router.get("/leadz")
def leadz(parts: HealthParts) -> Response:
    """Whether this server leads, of those that share a database: 200, else 503. For load balancers."""
    leadership = parts.leadership
    if leadership is None:
        return answer({"leads": True, "leader": parts.config.public_url, "epoch": 0})
    leads = leadership.leads and not parts.stands_by
    said = {"leads": leads, "leader": leadership.leader_url, "epoch": leadership.epoch}
    return answer(said, 200 if leads else 503)


@health_router.get("/api/v1/leader")
def get_leader(parts: HealthParts, _: Reader) -> Response:
    """Which server leads, of those that share a database, as this one knows it: each answers for itself.

    ``seen_since`` is when this server first knew of this leader with this epoch, null where the records are this
    server's alone; ``problem`` says why it cannot tell who leads, or why the leader must not decide at present.
    ``nodes_in_vain`` are the nodes that ask this server and do not reach the leader, while it stands by.
    """
    leadership = parts.leadership
    if leadership is None:
        alone = {"leads": True, "leader": parts.config.public_url, "epoch": 0, "seen_since": None, "problem": ""}
        return answer({**alone, "nodes_in_vain": 0})
    leads = leadership.leads and not parts.stands_by
    return answer(
        {
            "leads": leads,
            "leader": leadership.leader_url,
            "epoch": leadership.epoch,
            "seen_since": rfc3339(parts.clock.now_s() - leadership.seen_for_s()),
            "problem": leadership.problem() if leads else leadership.lease_problem,
            "nodes_in_vain": leadership.nodes_in_vain(),
        }
    )


@health_router.get("/metrics")
def metrics(parts: HealthParts, _: Reader) -> Response:
    """Prometheus' text format: the server's own metrics and the newest value of each series."""
    parts.doctor.is_ready()  # so that eagle_eye_ready is current
    return Response(parts.telemetry.text(), media_type=CONTENT_TYPE_LATEST)
