"""The parts of a server, put together group by group. Wiring only."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx
from prometheus_client import ProcessCollector
from prometheus_client.registry import Collector

from eagle_eye.schema.record_types import prepare_record_types
from eagle_eye.server.accounts.archive import AccountsCollector, Archive, ResponseCollector
from eagle_eye.server.accounts.bookkeeper import Bookkeeper
from eagle_eye.server.api import (
    credentials,
)
from eagle_eye.server.api.overview import PlaceCollector
from eagle_eye.server.api.requests import OpenStreams
from eagle_eye.server.api.visibility import JobOwners
from eagle_eye.server.charts.reading import Turns
from eagle_eye.server.config import ServerConfig, is_loopback, plain_text
from eagle_eye.server.delivery.message_formats import formats
from eagle_eye.server.delivery.outbox import AlertRefresh, DeliveryCollector, LeaderPing, Outbox, Senders
from eagle_eye.server.delivery.webhook import Guard, Resolve, Targets, Webhook
from eagle_eye.server.engine.idle_faults import NO_JOB
from eagle_eye.server.history.embedded_history import EmbeddedHistory, HistoryCollector, LevelsCollector
from eagle_eye.server.history.history import History
from eagle_eye.server.history.remote_store import RemoteStore
from eagle_eye.server.history.settings import fed_from
from eagle_eye.server.ingest.fleet import Fleet, FleetCollector, Resends, Vouchers
from eagle_eye.server.ingest.remote_write.endpoint import OTHER_CELLS_ANSWER_S as CELL_ANSWER_S
from eagle_eye.server.jobs.keeper import JobSourceCollector, JobSources, Schedulers, sources_of
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.identity import Clusters
from eagle_eye.server.monitor.cells import Cells
from eagle_eye.server.monitor.metrics import (
    BlindCollector,
    DropsCollector,
    FleetBudgetCollector,
    IncidentCollector,
    IncidentListCollector,
    JobCollector,
    LatestCollector,
    LeaseCollector,
)
from eagle_eye.server.monitor.readiness import (
    Doctor,
    Heartbeat,
    Surroundings,
    VitalParts,
    coverage_note,
    identity_note,
    remote_write_note,
    replication_note,
)
from eagle_eye.server.monitor.recall import KnownNodes
from eagle_eye.server.monitor.watcher import ALL_JOBS, JobShare, Outlook, Watcher
from eagle_eye.server.requests.evidence import EVIDENCE_FOLDER, Bundles, EvidenceRequests
from eagle_eye.server.requests.idle_incidents import MissingGpus
from eagle_eye.server.requests.node_checks import IdleChecks, NodeChecks
from eagle_eye.server.security.auth import Limits, Tokens
from eagle_eye.server.security.people import People, Proxy
from eagle_eye.server.security.tls import CertificateCollector, Certificates
from eagle_eye.server.site_files import Places, read_places, read_topology
from eagle_eye.server.store.leadership import HEARD_LEASES, Leadership
from eagle_eye.server.store.sql_store import SqlStore, open_records
from eagle_eye.server.store.store import ChangeSignal, Store
from eagle_eye.server.telemetry.counters import ServerHostCollector, Telemetry
from eagle_eye.server.transport import raw_http
from eagle_eye.server.web.forwarding import Forwarding, JointAnswers, UnreachedNodes

if TYPE_CHECKING:
    from eagle_eye.server.security.provider import Provider  # its cryptography takes time and memory

WatcherFactory = Callable[[ServerConfig, Store, Clock], Watcher]


@dataclass
class Services:
    """The parts of one running server. Each endpoint, and whatever else is handed them, says which it needs."""

    config: ServerConfig
    clock: Clock
    store: Store
    history: History
    fleet: Fleet
    known_nodes: KnownNodes
    tokens: Tokens
    people: People
    job_owners: JobOwners
    provider: Provider | None  # None: nobody signs in here
    limits: Limits
    resends: Resends
    certificates: Certificates | None  # None: plain HTTP
    telemetry: Telemetry
    watcher: Watcher
    outlook: Outlook
    doctor: Doctor
    guard: Guard
    signal: ChangeSignal
    evidence_requests: EvidenceRequests
    remote_store: RemoteStore
    node_checks: NodeChecks
    idle_checks: IdleChecks
    missing_gpus: MissingGpus
    bookkeeper: Bookkeeper
    archive: Archive
    job_sources: JobSources
    leadership: Leadership | None  # None: the records are this server's alone
    cells: Cells | None  # likewise
    stands_by: bool  # even once it has the lease: then it ends, and the leader's services begin
    places: Places = field(default_factory=Places)  # as the site's file had them at the start
    turns: Turns = field(default_factory=Turns)  # of those who have charts drawn
    open_streams: OpenStreams = field(default_factory=OpenStreams)
    open_recordings: OpenStreams = field(default_factory=OpenStreams)
    open_uploads: OpenStreams = field(default_factory=OpenStreams)
    # Set when the server is asked to stop: readers of /api/v1/events are let go then, or it would wait for them.
    stopping: threading.Event = field(default_factory=threading.Event)


class ServerParts(NamedTuple):
    """A server's parts, and what only its life needs of them."""

    services: Services
    store: SqlStore
    history: EmbeddedHistory
    webhook: Webhook
    outbox: Outbox
    leader_ping: LeaderPing
    heartbeat: Heartbeat
    forwarding: Forwarding | None  # None unless this server stands by
    joint: JointAnswers | None  # None where the records are this server's alone, or it stands by
    to_cells: httpx.AsyncClient | None  # brings remote writes to other cells; None as above


def build_watcher(config: ServerConfig, store: Store, clock: Clock) -> Watcher:
    """Return the detection loop."""
    from eagle_eye.server.engine.engine import Engine
    from eagle_eye.server.monitor.detection_loop import DetectionLoop

    engine = Engine(config.detection, watching_since_s=clock.now_s())
    if config.topology_file:
        engine.observe_topology(read_topology(Path(config.topology_file)))
    return DetectionLoop(engine, store, clock, config.policy, config.public_url, config.evidence)


def build(
    config: ServerConfig,
    clock: Clock,
    watcher: WatcherFactory,
    resolve: Resolve,
    jitter: Callable[[], float],
    leadership: Leadership | None,
) -> ServerParts:
    """Put the parts together, group by group: each needs only those above it."""
    forwarding = None
    if leadership is not None and not leadership.leads:
        unreached = UnreachedNodes(HEARD_LEASES * config.records.lease_s, clock.monotonic_s)
        forwarding = Forwarding(lambda: leadership.leader_url, config.tls, unreached)
    basis = _Basis(config, clock, Telemetry(), leadership, forwarding)
    records = _records(basis)
    judging = _judging(basis, records.store, watcher)
    delivery = _delivery(basis, records, resolve, jitter)
    access = _access(basis, records.store, judging.fleet)
    services = _services(basis, records, judging, delivery, access)
    _register_collectors(services, records, judging)
    heartbeat = Heartbeat(records.store, services.doctor, clock, config.webhooks.heartbeat_s, config.public_url)
    cells = judging.cells
    joint = JointAnswers(cells, records.store, config.tls) if cells is not None and forwarding is None else None
    to_cells = raw_http.server_client(CELL_ANSWER_S) if joint is not None else None
    sending = (delivery.webhook, delivery.outbox, delivery.ping, heartbeat)
    return ServerParts(services, records.store, records.history, *sending, forwarding, joint, to_cells)


class _Basis(NamedTuple):
    """What every group of parts is made with."""

    config: ServerConfig
    clock: Clock
    telemetry: Telemetry
    leadership: Leadership | None
    forwarding: Forwarding | None


class _Records(NamedTuple):
    """What is kept in the data folder or the database."""

    folder: Path
    store: SqlStore
    signal: ChangeSignal
    history: EmbeddedHistory
    archive: Archive


def _records(basis: _Basis) -> _Records:
    config, clock = basis.config, basis.clock
    folder = Path(config.data_dir)
    store = open_records(config.records, folder, basis.leadership)
    settings = fed_from(config.history, config.remote_store)
    kept = EmbeddedHistory(folder, settings, config.ingest.pending_bytes_max, clock, config.detection.window_s)
    signal = ChangeSignal()
    store.listen(signal.notify)
    return _Records(folder, store, signal, kept, Archive(store, clock, config.accounts.hindsight_s))


class _Judging(NamedTuple):
    """The nodes that are heard, the jobs that are judged here, and what judges them."""

    places: Places
    fleet: Fleet
    watcher: Watcher
    outlook: Outlook
    cells: Cells | None
    share: JobShare
    fleet_size: Callable[[], int]
    job_sources: JobSources
    resends: Resends


def _judging(basis: _Basis, store: SqlStore, watcher: WatcherFactory) -> _Judging:
    config, clock, telemetry, leadership, forwarding = basis
    places = read_places(Path(config.topology_file)) if config.topology_file else Places()
    vouchers = Vouchers(places.rack_of_node.keys() | places.switch_of_node.keys())
    fleet = Fleet(config.ingest.nodes_max, vouchers, Clusters(config.identity.cluster))
    if leadership is not None:
        heard_s = HEARD_LEASES * config.records.lease_s
        heard = (lambda: fleet.counts(clock.now_s(), heard_s)[1]) if forwarding is None else forwarding.unreached.count
        leadership.count_nodes(heard)
    watching = watcher(config, store, clock)
    cells = Cells(config.records.cell, store, leadership, clock, fleet, watching) if leadership is not None else None
    share: JobShare = cells or ALL_JOBS
    fleet_size = _fleet_size(fleet, cells)
    watching.judge_share(share)
    watching.count_fleet(fleet_size)
    asked = sources_of(config.job_sources, clock, os.environ)
    schedulers = Schedulers(asked, config.job_sources.patience_s, share.mine)
    sources = JobSources(schedulers, store, clock, fleet, watching, telemetry)
    resends = Resends(
        clock.now_s(),
        config.detection.window_s,
        config.history.replay_frames_max,
        lambda: fleet.known_count,
        clock.monotonic_s,
    )
    return _Judging(places, fleet, watching, Outlook(watching), cells, share, fleet_size, sources, resends)


def _fleet_size(fleet: Fleet, cells: Cells | None) -> Callable[[], int]:
    """Return what counts the vouched nodes that were heard, by all cells."""
    return (lambda: fleet.vouched_count) if cells is None else (lambda: fleet.vouched_count + cells.nodes_of_others())


class _Delivery(NamedTuple):
    """What tells subscribers."""

    guard: Guard
    webhook: Webhook
    outbox: Outbox
    ping: LeaderPing


def _delivery(basis: _Basis, records: _Records, resolve: Resolve, jitter: Callable[[], float]) -> _Delivery:
    config, clock, telemetry, leadership, _ = basis
    store, signal, settings, lease_s = records.store, records.signal, config.webhooks, config.records.lease_s
    guard = Guard(settings.allow_private, resolve)
    epoch = (lambda: 0) if leadership is None else (lambda: leadership.epoch)
    shapes = formats(config.public_url, settings, epoch, lease_s)
    webhook = Webhook(guard, shapes.by_name())
    targets = Targets(settings, clock)
    refresh = AlertRefresh(store, webhook, shapes.alertmanager_api, targets, settings, clock, telemetry)
    rise_above: Callable[[int], int | None] = (lambda _: None) if leadership is None else leadership.rise_above
    senders = Senders(webhook, targets, refresh, rise_above)
    outbox = Outbox(store, senders, settings, clock, telemetry, signal, config.history.records_retention_s, jitter)
    return _Delivery(guard, webhook, outbox, LeaderPing(store, signal, clock, telemetry, lease_s))


class _Access(NamedTuple):
    """Who may ask, what of, and how often."""

    certificates: Certificates | None
    tokens: Tokens
    people: People
    provider: Provider | None
    limits: Limits
    job_owners: JobOwners


def _access(basis: _Basis, store: Store, fleet: Fleet) -> _Access:
    config, clock, telemetry = basis.config, basis.clock, basis.telemetry
    certificates = Certificates(config.tls, clock) if config.tls.certificate_file else None
    # What comes from loopback comes from everybody where a proxy on this machine passes it on.
    is_open = is_loopback(config.listen) and not config.sign_in.on
    tokens = Tokens(store, clock, is_open, certified=bool(config.tls.client_ca_file))
    people, provider = _sign_in(config, clock, store, tokens, telemetry)
    limits = Limits(config.limits, clock, lambda by: telemetry.rate_limited.labels(by).inc())
    return _Access(certificates, tokens, people, provider, limits, JobOwners(store, fleet))


def _sign_in(
    config: ServerConfig, clock: Clock, store: Store, tokens: Tokens, counters: Telemetry
) -> tuple[People, Provider | None]:
    settings, provider = config.sign_in, None

    def refused(reason: str) -> None:
        counters.sign_in_refused.labels(reason).inc()

    if settings.provider.issuer:
        from eagle_eye.server.security.provider import Provider

        prepare_record_types()
        provider = Provider(settings.provider, config.public_url + credentials.CALLBACK, clock, refused)
    proxy = Proxy(settings.proxy, refused) if settings.proxy.user_header else None
    return People(settings, store, tokens, proxy, None if provider is None else provider.session), provider


def _notes(basis: _Basis, judging: _Judging, certificates: Certificates | None) -> dict[str, Callable[[], str]]:
    """Return what says, by subject, what people should fix before it does harm."""
    config, clock, fleet, outlook = basis.config, basis.clock, judging.fleet, judging.outlook
    without, fresh_s, async_ok = plain_text(config), config.ingest.fresh_s, config.records.async_ok
    return {
        "tls": (lambda: without) if certificates is None else certificates.ending,
        "windows": judging.resends.problem,
        "coverage": lambda: coverage_note(fleet, outlook, clock.now_s(), fresh_s),
        "identity": lambda: identity_note(fleet, clock.now_s()),
        "remote_write": lambda: remote_write_note(fleet, clock.now_s()),
        "replication": lambda: replication_note(basis.leadership, outlook.policy(), async_ok=async_ok),
    }


def _doctor(basis: _Basis, records: _Records, judging: _Judging, certificates: Certificates | None) -> Doctor:
    config, cells = basis.config, judging.cells
    return Doctor(
        VitalParts(records.store, records.history, judging.watcher, judging.outlook, judging.fleet),
        basis.telemetry,
        basis.clock,
        config.detection.tick_s,
        config.ingest.fresh_s,
        Surroundings(
            judging.job_sources.problem,
            basis.leadership,
            *(() if cells is None else (cells.problem, cells.agents_due)),
        ),
        _notes(basis, judging, certificates),
    )


class _Requests(NamedTuple):
    """What is asked of agents and of people."""

    evidence: EvidenceRequests
    node_checks: NodeChecks
    idle_checks: IdleChecks
    missing_gpus: MissingGpus


def _requests(basis: _Basis, records: _Records, judging: _Judging) -> _Requests:
    config, clock, store, fleet = basis.config, basis.clock, records.store, judging.fleet
    policy, url, counted = judging.outlook.policy, config.public_url, basis.telemetry.node_checks
    return _Requests(
        EvidenceRequests(store, Bundles(records.folder / EVIDENCE_FOLDER), config.evidence, clock),
        NodeChecks(store, clock, policy, lambda state: counted.labels(state).inc(), url),
        IdleChecks(store, clock, fleet, config.idle_checks, policy, judging.watcher.courses),
        MissingGpus(store, clock, fleet, policy, url),
    )


def _services(basis: _Basis, records: _Records, judging: _Judging, delivery: _Delivery, access: _Access) -> Services:
    config, clock, telemetry, leadership, forwarding = basis
    store, fleet = records.store, judging.fleet
    dropped = telemetry.accounts_dropped
    remote_store = RemoteStore(records.folder, config.remote_store, clock, telemetry.registry)
    asking = _requests(basis, records, judging)
    return Services(
        config=config,
        clock=clock,
        store=store,
        history=records.history,
        fleet=fleet,
        known_nodes=KnownNodes(store, fleet, clock, config.ingest.fresh_s, telemetry.failures.labels("node").inc),
        tokens=access.tokens,
        people=access.people,
        job_owners=access.job_owners,
        provider=access.provider,
        limits=access.limits,
        resends=judging.resends,
        certificates=access.certificates,
        telemetry=telemetry,
        watcher=judging.watcher,
        outlook=judging.outlook,
        doctor=_doctor(basis, records, judging, access.certificates),
        guard=delivery.guard,
        signal=records.signal,
        remote_store=remote_store,
        evidence_requests=asking.evidence,
        node_checks=asking.node_checks,
        idle_checks=asking.idle_checks,
        missing_gpus=asking.missing_gpus,
        bookkeeper=Bookkeeper(
            store,
            judging.watcher,
            fleet,
            clock,
            config.accounts,
            lambda why: dropped.labels(why).inc(),
            judging.share.mine,
        ),
        archive=records.archive,
        job_sources=judging.job_sources,
        leadership=leadership,
        cells=judging.cells,
        stands_by=forwarding is not None,
        places=judging.places,
    )


def _register_collectors(services: Services, records: _Records, judging: _Judging) -> None:
    """Have the server's metrics read from its parts whenever they are asked for."""
    config, clock, fleet, outlook = services.config, services.clock, services.fleet, services.outlook
    kept, register = records.history, services.telemetry.registry.register
    for collector in (
        FleetCollector(fleet, clock.now_s, config.ingest.fresh_s),
        HistoryCollector(
            lambda: kept.journal.waiting_bytes,
            lambda: kept.dropped_by_retention,
            lambda: kept.problem() is None,
            kept.segment_store.size,
            lambda: kept.segment_store.set_aside_total,
            lambda: kept.compaction.failures,
        ),
        LevelsCollector(kept.segment_store),
        BlindCollector(outlook.blind),
        services.watcher.tick_seconds,
        ProcessCollector(registry=None),
        ServerHostCollector(records.folder),
        JobCollector(outlook.courses, clock),
        DropsCollector(outlook.drops),
        LatestCollector(lambda: outlook.latest(config.series_max)),
    ):
        register(collector)
    if not services.stands_by and judging.share.mine(NO_JOB):  # of one site each alert is raised by one server
        for of_records in _collectors_of_records(services, judging.fleet_size):
            register(of_records)
    if services.leadership is not None:
        register(LeaseCollector(services.leadership))
    if services.job_sources.counts():
        register(JobSourceCollector(services.job_sources.ages_s, services.job_sources.counts))
    if services.certificates is not None:
        register(CertificateCollector(services.certificates))


def _collectors_of_records(services: Services, fleet_size: Callable[[], int]) -> tuple[Collector, ...]:
    store, clock, archive, outlook = services.store, services.clock, services.archive, services.outlook
    return (
        IncidentCollector(store.open_incidents, outlook.incident_counts),
        IncidentListCollector(store, clock),
        DeliveryCollector(store, clock),
        AccountsCollector(archive),
        ResponseCollector(archive, clock),
        FleetBudgetCollector(store, outlook.policy, fleet_size, clock),
        PlaceCollector(store, services.fleet, services.places, clock, services.config.ingest.fresh_s),
    )
