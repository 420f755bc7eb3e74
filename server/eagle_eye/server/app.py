"""The server put together: parts, endpoints, and what runs beside them. Wiring only."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import FastAPI
from prometheus_client import ProcessCollector

from eagle_eye.detectors.signs.learned_model import LearnedModel
from eagle_eye.server import heap, ingest_assembly, outbound, telemetry
from eagle_eye.server.accounts.archive import Archive
from eagle_eye.server.accounts.bookkeeper import Bookkeeper
from eagle_eye.server.accounts.exposition import AccountsCollector
from eagle_eye.server.alert_refresh import AlertRefresh
from eagle_eye.server.api import (
    accounts,
    actions,
    audit,
    deliveries,
    description,
    enrolment,
    evidence,
    health,
    history,
    incidents,
    job_pictures,
    jobs,
    node_checks,
    node_history,
    nodes,
    nvrx,
    overview,
    pictures,
    problems,
    stream,
    subscriptions,
)
from eagle_eye.server.auth import Tokens
from eagle_eye.server.bundles import EVIDENCE_FOLDER, Bundles
from eagle_eye.server.changes import Signal
from eagle_eye.server.clock import Clock, SystemClock
from eagle_eye.server.config import ServerConfig, is_loopback
from eagle_eye.server.delivery_metrics import DeliveryCollector
from eagle_eye.server.embedded_history import EmbeddedHistory
from eagle_eye.server.errors import StoreUnavailable
from eagle_eye.server.evidence import SWEEP_S, Desk
from eagle_eye.server.filters import wants
from eagle_eye.server.fleet import Fleet
from eagle_eye.server.front import Front
from eagle_eye.server.host_metrics import HostCollector
from eagle_eye.server.idle_checks import IdleChecks
from eagle_eye.server.incident_metrics import IncidentListCollector, JobCollector
from eagle_eye.server.integrity import Integrity
from eagle_eye.server.job_sources import assembly as job_sources
from eagle_eye.server.known_nodes import recover, write_down
from eagle_eye.server.limits import Limits
from eagle_eye.server.missing_gpus import MissingGpus
from eagle_eye.server.model_file import POLL_S, ModelFile
from eagle_eye.server.node_checks import SWEEP_S as NODE_CHECKS_SWEEP_S
from eagle_eye.server.node_checks import NodeChecks
from eagle_eye.server.notifiers.formats import formats
from eagle_eye.server.notifiers.guard import Guard, Resolve, system_resolver
from eagle_eye.server.notifiers.targets import Targets
from eagle_eye.server.notifiers.webhook import Webhook
from eagle_eye.server.outbox import Outbox
from eagle_eye.server.outlines import Outlines
from eagle_eye.server.readiness import Doctor
from eagle_eye.server.reload import Reload
from eagle_eye.server.remote_store.remote_store import RemoteStore
from eagle_eye.server.remote_write import assembly as remote_write
from eagle_eye.server.segments.exposition import LevelsCollector
from eagle_eye.server.services import Services
from eagle_eye.server.sqlite_store import RECORDS_FILE, SqliteStore
from eagle_eye.server.store import SUBSCRIPTIONS, Change, Store
from eagle_eye.server.tls import Certificates, plain_text
from eagle_eye.server.tls_metrics import CertificateCollector
from eagle_eye.server.topology_file import Places, read_places, read_topology
from eagle_eye.server.vouching import Vouchers
from eagle_eye.server.watching import Outlook, Watcher

RESTART_S = 1.0  # a background task that failed starts again after this

WatcherFactory = Callable[[ServerConfig, Store, Clock], Watcher]

_log = logging.getLogger(__name__)


class _Parts(NamedTuple):
    services: Services
    store: SqliteStore
    history: EmbeddedHistory
    webhook: Webhook
    outbox: Outbox


def build_watcher(config: ServerConfig, store: Store, clock: Clock) -> Watcher:
    """Return the detection loop."""
    from eagle_eye.server.engine.engine import Engine
    from eagle_eye.server.watch import Watch

    engine = Engine(config.detection, watching_since_s=clock.now_s())
    if config.topology_file:
        engine.observe_topology(read_topology(Path(config.topology_file)))
    return Watch(engine, store, clock, config.policy, config.public_url, config.evidence)


def create_app(
    config: ServerConfig,
    clock: Clock | None = None,
    watcher: WatcherFactory = build_watcher,
    resolve: Resolve | None = None,
    jitter: Callable[[], float] = random.random,
    reread: Callable[[], ServerConfig] | None = None,
) -> Front:
    """Return the server as an ASGI application; ``config`` is one that ``config.load`` returned.

    ``reread`` returns the configuration as it is now, when a reload is asked for. Opens the files in ``data_dir``
    and reads the recent past back. Raises StoreUnavailable or HistoryUnavailable when it cannot, ConfigurationError
    when the certificate is of no use.
    """
    clock = clock or SystemClock()
    parts = _build(config, clock, watcher, resolve or system_resolver(), jitter)
    services = parts.services
    outlines = Outlines(services.history.outline)
    recover(services, outlines)
    reload = Reload(services, reread or (lambda: config))
    api = FastAPI(
        title="Eagle Eye",
        version=version("eagle-eye"),
        description="Finds the faulty node of a distributed training job. Errors are RFC 9457 problem details.",
        docs_url=None,
        openapi_url=None,  # description.py serves it
        redoc_url=None,
        lifespan=lambda _: _life(parts, reload),
    )
    api.state.services = services
    problems.install(api, services.telemetry)
    for module in (jobs, nodes, node_checks, incidents, evidence, actions, deliveries, subscriptions, enrolment):
        api.include_router(module.router)
    for module in (overview, pictures, job_pictures):
        api.include_router(module.router)
    for module in (accounts, node_history, audit, history, stream, health):
        api.include_router(module.router)
    nvrx.install(api)
    description.describe(api)

    async def found(nodes: list[str]) -> None:
        await asyncio.to_thread(write_down, services, nodes)

    def asked_of(node: str) -> list[dict[str, Any]]:
        return services.desk.asked_of(node) + services.node_checks.asked_of(node)

    def asks_anybody() -> bool:
        return services.desk.asks_anybody() or services.node_checks.asks_anybody()

    parts.history.journal.outlines.listen(outlines.take_used, outlines.forget)
    services.fleet.when_forgotten(outlines.expel)
    ingest = ingest_assembly.build(services, outlines, found, asked_of, asks_anybody)
    return Front(api, ingest, remote_write.build(services, found), services, reload)


def _build(
    config: ServerConfig,
    clock: Clock,
    watcher: WatcherFactory,
    resolve: Resolve,
    jitter: Callable[[], float],
) -> _Parts:
    folder = Path(config.data_dir)
    store = SqliteStore(folder / RECORDS_FILE)
    kept = EmbeddedHistory(folder, config.history, config.ingest.pending_bytes_max, clock, config.detection.window_s)
    counters = telemetry.Telemetry()
    places = read_places(Path(config.topology_file)) if config.topology_file else Places()
    fleet = Fleet(config.ingest.nodes_max, Vouchers(places.rack_of_node.keys() | places.switch_of_node.keys()))
    signal = Signal()
    store.listen(signal.notify)
    watching = watcher(config, store, clock)
    watching.count_fleet(lambda: fleet.vouched_count)
    outlook = Outlook(watching)
    guard = Guard(config.webhooks.allow_private, resolve)
    shapes = formats(config.public_url, config.webhooks)
    webhook = Webhook(guard, shapes.by_name())
    targets = Targets(config.webhooks, clock)
    refresh = AlertRefresh(store, webhook, shapes.alertmanager_api, targets, config.webhooks, clock, counters)
    retention_s = config.history.records_retention_s
    outbox = Outbox(store, webhook, config.webhooks, clock, counters, signal, retention_s, targets, refresh, jitter)
    tick_s, fresh_s = config.detection.tick_s, config.ingest.fresh_s
    sources = job_sources.build(config.job_sources, store, clock, fleet, watching, counters)
    archive = Archive(store, clock, config.accounts.hindsight_s)
    certificates = Certificates(config.tls, clock) if config.tls.certificate_file else None
    without = plain_text(config)
    notes = {"tls": (lambda: without) if certificates is None else certificates.ending}
    services = Services(
        config=config,
        clock=clock,
        store=store,
        history=kept,
        fleet=fleet,
        tokens=Tokens(store, clock, is_loopback(config.listen), certified=bool(config.tls.client_ca_file)),
        limits=Limits(config.limits, clock, lambda by: counters.rate_limited.labels(by).inc()),
        certificates=certificates,
        telemetry=counters,
        watcher=watching,
        outlook=outlook,
        doctor=Doctor(store, kept, watching, outlook, fleet, counters, clock, tick_s, fresh_s, sources.problem, notes),
        guard=guard,
        signal=signal,
        remote_store=RemoteStore(folder, config.remote_store, clock, counters.registry),
        desk=Desk(store, Bundles(folder / EVIDENCE_FOLDER), config.evidence, clock),
        node_checks=NodeChecks(
            store, clock, outlook.policy, lambda state: counters.node_checks.labels(state).inc(), config.public_url
        ),
        idle_checks=IdleChecks(store, clock, fleet, config.idle_checks, outlook.policy, watching.courses),
        missing_gpus=MissingGpus(store, clock, fleet, outlook.policy, config.public_url),
        bookkeeper=Bookkeeper(
            store, watching, fleet, clock, config.accounts, lambda why: counters.accounts_dropped.labels(why).inc()
        ),
        archive=archive,
        job_sources=sources,
        places=places,
    )
    for collector in (
        telemetry.FleetCollector(fleet, clock.now_s, fresh_s),
        telemetry.HistoryCollector(
            lambda: kept.journal.waiting_bytes,
            lambda: kept.dropped_by_retention,
            lambda: kept.problem() is None,
            kept.shelf.size,
            lambda: kept.shelf.set_aside_total,
            lambda: kept.compaction.failures,
        ),
        LevelsCollector(kept.shelf, kept.upkeep),
        telemetry.BlindCollector(outlook.blind),
        watching.tick_seconds,
        ProcessCollector(registry=None),
        HostCollector(folder),
        telemetry.IncidentCollector(store.open_incidents, outlook.incident_counts),
        IncidentListCollector(store, clock),
        JobCollector(outlook.courses, clock),
        DeliveryCollector(store, clock),
        telemetry.DropsCollector(outlook.drops),
        telemetry.LatestCollector(lambda: outlook.latest(config.series_max)),
        AccountsCollector(archive),
    ):
        counters.registry.register(collector)
    if certificates is not None:
        counters.registry.register(CertificateCollector(certificates))
    return _Parts(services, store, kept, webhook, outbox)


def _life(parts: _Parts, reload: Reload) -> AbstractAsyncContextManager[None]:
    @asynccontextmanager
    async def life() -> AsyncIterator[None]:
        services = parts.services
        services.signal.attach()
        services.outlook.attach()
        services.remote_store.start()
        tasks = [
            asyncio.create_task(_kept_running(services, name, work), name=name)
            for name, work in (
                ("detection", services.watcher.run),
                ("outbox", parts.outbox.run),
                ("heartbeat", lambda: _beat(services)),
                ("model", lambda: keep_model(services)),
                ("evidence", lambda: _sweep_evidence(services)),
                ("node checks", lambda: _sweep_node_checks(services)),
                ("idle checks", services.idle_checks.run),
                ("missing GPUs", services.missing_gpus.run),
                ("accounts", services.bookkeeper.run),
                ("reload", reload.run),
                ("job_sources", services.job_sources.run),
                ("integrity", Integrity(Path(services.config.data_dir), parts.store, parts.history).run),
                ("certificates", lambda: _follow_certificates(services)),
                ("garbage", heap.collect_young),
                ("memory", heap.trim),
            )
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            services.signal.detach()
            await parts.webhook.close()
            await asyncio.to_thread(services.remote_store.close)
            await asyncio.to_thread(parts.history.close)
            parts.store.close()

    return life()


async def keep_model(services: Services, poll_s: float = POLL_S) -> None:
    """Have the detection loop use the configured model, and any that takes its place; a bad one changes nothing."""
    if services.config.detection.model:
        file = ModelFile(Path(services.config.detection.model), services.telemetry.model_errors.inc)
        usable = False
        while True:
            found = await asyncio.to_thread(file.poll)
            if isinstance(found, LearnedModel):
                services.watcher.use_model(found)
                usable = True
            elif found is not None and not usable:
                services.watcher.use_model(str(found))
            await asyncio.sleep(poll_s)
    await asyncio.Event().wait()


async def _sweep_evidence(services: Services) -> None:
    """End requests that nobody answered and delete what is beyond the limits, now and then."""
    await asyncio.to_thread(services.desk.bundles.sweep_partial)
    while True:
        try:
            await asyncio.to_thread(services.desk.sweep)
        except StoreUnavailable:
            _log.warning("evidence is not swept: the records cannot be written")
        await asyncio.sleep(SWEEP_S)


async def _sweep_node_checks(services: Services) -> None:
    """End checks that nobody answered in time, now and then."""
    while True:
        try:
            await asyncio.to_thread(services.node_checks.sweep)
        except StoreUnavailable:
            _log.warning("node checks are not swept: the records cannot be written")
        await asyncio.sleep(NODE_CHECKS_SWEEP_S)


async def _follow_certificates(services: Services) -> None:
    if services.certificates is not None:
        await services.certificates.follow()
    await asyncio.Event().wait()


async def _beat(services: Services) -> None:
    """Announce, at every interval, that the server can judge; say nothing while it cannot."""
    interval_s = services.config.webhooks.heartbeat_s
    while interval_s > 0:
        await asyncio.sleep(interval_s)
        try:
            await asyncio.to_thread(beat, services, interval_s)
        except StoreUnavailable:
            _log.warning("no heartbeat: the records cannot be written")
    await asyncio.Event().wait()


def beat(services: Services, interval_s: float) -> None:
    """Commit one heartbeat, if the server can judge and somebody subscribed to it. Raises StoreUnavailable."""
    event = outbound.heartbeat(services.clock.now_s(), interval_s, services.config.public_url)
    subscriptions = services.store.all(SUBSCRIPTIONS)
    if any(known.active and wants(known, event) for known in subscriptions) and services.doctor.check().ready:
        services.store.commit(Change(events=(event,)))


async def _kept_running(services: Services, name: str, work: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await work()
        except Exception:  # noqa: BLE001 - a bug must not end detection or delivery for ever
            _log.exception("a part of the server failed and starts again", extra={"part": name})
            services.telemetry.failures.labels(name).inc()
        await asyncio.sleep(RESTART_S)
