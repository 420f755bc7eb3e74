"""The server put together: parts, endpoints, and what runs beside them. Wiring only."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from fastapi import FastAPI

from eagle_eye.detectors.signs.learned_model import LearnedModel
from eagle_eye.schema.frame import Frame
from eagle_eye.server import outbound, telemetry
from eagle_eye.server.api import (
    actions,
    deliveries,
    description,
    enrolment,
    evidence,
    health,
    history,
    incidents,
    jobs,
    nodes,
    problems,
    stream,
    subscriptions,
)
from eagle_eye.server.auth import Tokens
from eagle_eye.server.bundles import EVIDENCE_FOLDER, Bundles
from eagle_eye.server.changes import Signal
from eagle_eye.server.clock import Clock, SystemClock
from eagle_eye.server.config import ServerConfig, is_loopback
from eagle_eye.server.embedded_history import EmbeddedHistory
from eagle_eye.server.errors import StoreUnavailable
from eagle_eye.server.evidence import SWEEP_S, Desk
from eagle_eye.server.fleet import Fleet
from eagle_eye.server.front import Front
from eagle_eye.server.ingest import Ingest, corrected
from eagle_eye.server.limits import Limits
from eagle_eye.server.model_file import POLL_S, ModelFile
from eagle_eye.server.notifiers.guard import Guard, Resolve, system_resolver
from eagle_eye.server.notifiers.webhook import Webhook
from eagle_eye.server.outbox import Outbox
from eagle_eye.server.readiness import Doctor
from eagle_eye.server.records import Node
from eagle_eye.server.reload import Reload
from eagle_eye.server.remote_write import assembly as remote_write
from eagle_eye.server.remote_write.keeper import judged
from eagle_eye.server.services import Services
from eagle_eye.server.sqlite_store import RECORDS_FILE, SqliteStore
from eagle_eye.server.store import NODES, SUBSCRIPTIONS, Change, Store
from eagle_eye.server.tls import Certificates
from eagle_eye.server.topology_file import read_topology
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

    ``reread`` returns the configuration as it is now, when a reload is asked for. Opens the files in ``data_dir``.
    Raises StoreUnavailable when it cannot, ConfigurationError when the certificate is of no use.
    """
    clock = clock or SystemClock()
    parts = _build(config, clock, watcher, resolve or system_resolver(), jitter)
    services = parts.services
    reload = Reload(services, reread or (lambda: config))
    api = FastAPI(
        title="Eagle Eye",
        version="1",
        description="Finds the faulty node of a distributed training job. Errors are RFC 9457 problem details.",
        docs_url=None,
        redoc_url=None,
        lifespan=lambda _: _life(parts, reload),
    )
    api.state.services = services
    problems.install(api, services.telemetry)
    for module in (jobs, nodes, incidents, evidence, actions, deliveries, subscriptions, enrolment):
        api.include_router(module.router)
    for module in (history, stream, health):
        api.include_router(module.router)
    description.describe(api)

    async def found(node: str) -> None:
        await asyncio.to_thread(_write_down, services, [node])

    ingest = Ingest(
        config.ingest,
        services.history,
        services.fleet,
        services.tokens,
        services.telemetry,
        clock,
        services.watcher.observe,
        found,
        services.desk.asked_of,
        services.limits.check_frames,
    )
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
    fleet = Fleet(config.ingest.nodes_max)
    signal = Signal()
    store.listen(signal.notify)
    watching = watcher(config, store, clock)
    outlook = Outlook(watching)
    guard = Guard(config.webhooks.allow_private, resolve)
    webhook = Webhook(guard, config.public_url)
    retention_s = config.history.records_retention_s
    outbox = Outbox(store, webhook, config.webhooks, clock, counters, signal, retention_s, jitter)
    tick_s, fresh_s = config.detection.tick_s, config.ingest.fresh_s
    services = Services(
        config=config,
        clock=clock,
        store=store,
        history=kept,
        fleet=fleet,
        tokens=Tokens(store, clock, is_loopback(config.listen), certified=bool(config.tls.client_ca_file)),
        limits=Limits(config.limits, clock, lambda by: counters.rate_limited.labels(by).inc()),
        certificates=Certificates(config.tls, counters.tls_reload_success.set) if config.tls.certificate_file else None,
        telemetry=counters,
        watcher=watching,
        outlook=outlook,
        doctor=Doctor(store, kept, watching, outlook, fleet, counters, clock, tick_s, fresh_s),
        guard=guard,
        signal=signal,
        desk=Desk(store, Bundles(folder / EVIDENCE_FOLDER), config.evidence, clock),
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
        telemetry.BlindCollector(outlook.blind),
        telemetry.HeldCollector(store.open_incidents),
        telemetry.DropsCollector(outlook.drops),
        telemetry.LatestCollector(lambda: outlook.latest(config.series_max)),
    ):
        counters.registry.register(collector)
    return _Parts(services, store, kept, webhook, outbox)


def _life(parts: _Parts, reload: Reload) -> AbstractAsyncContextManager[None]:
    @asynccontextmanager
    async def life() -> AsyncIterator[None]:
        services = parts.services
        services.signal.attach()
        services.outlook.attach()
        await asyncio.to_thread(_recover, services)
        tasks = [
            asyncio.create_task(_kept_running(services, name, work), name=name)
            for name, work in (
                ("detection", services.watcher.run),
                ("outbox", parts.outbox.run),
                ("heartbeat", lambda: _beat(services)),
                ("model", lambda: keep_model(services)),
                ("evidence", lambda: _sweep_evidence(services)),
                ("reload", reload.run),
                ("certificates", lambda: _follow_certificates(services)),
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
            await asyncio.to_thread(parts.history.close)
            parts.store.close()

    return life()


def _recover(services: Services) -> None:
    """Read the recent past back, before the first new frame."""
    names = {stream.node for stream in services.history.streams()}
    names.update(node.node for node in services.store.all(NODES))
    for name in names:
        services.fleet.know(name)
    _write_down(services, sorted(names))

    def past() -> Iterator[tuple[Frame, float]]:
        since_s = services.clock.now_s() - services.config.detection.window_s
        frames_max = services.config.history.replay_frames_max
        for frame, received_s, offset_s in services.history.replay(since_s, frames_max):
            services.fleet.heard(frame, received_s)
            yield judged(corrected(frame, offset_s)), received_s

    services.watcher.recover(past())


def _write_down(services: Services, names: list[str]) -> None:
    """Have a record of each node; those that have one keep it."""

    def nodes(store: Store) -> Change:
        now_s = services.clock.now_s()
        return Change(
            nodes=tuple(
                Node(node=name, state="in_service", reason="", updated_s=now_s)
                for name in names
                if store.get(NODES, name) is None
            )
        )

    services.store.update(nodes)


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
    if any(known.active and outbound.wants(known, event) for known in subscriptions) and services.doctor.check().ready:
        services.store.commit(Change(events=(event,)))


async def _kept_running(services: Services, name: str, work: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await work()
        except Exception:  # noqa: BLE001 - a bug must not end detection or delivery for ever
            _log.exception("a part of the server failed and starts again", extra={"part": name})
            services.telemetry.failures.labels(name).inc()
        await asyncio.sleep(RESTART_S)
