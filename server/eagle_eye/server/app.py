"""The server as an application: its endpoints, and what runs beside them. Wiring only."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from fastapi import APIRouter, FastAPI

from eagle_eye.schema.frame import Frame
from eagle_eye.server import process
from eagle_eye.server.admin.data_folder import Integrity
from eagle_eye.server.api import (
    accounts,
    actions,
    credentials,
    description,
    events,
    evidence,
    incidents,
    jobs,
    metric_history,
    nodes,
    nvrx,
    overview,
    requests,
    silences,
)
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.delivery.webhook import Resolve, system_resolver
from eagle_eye.server.history.history import LATE_S
from eagle_eye.server.ingest.decoding import RowsReader, Templates, UnknownThings
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.ingest.frames import AgentAnswers, FrameSinks, Ingest, RowsIngest
from eagle_eye.server.ingest.remote_write import mapping
from eagle_eye.server.ingest.remote_write.endpoint import PATH as WRITE_PATH
from eagle_eye.server.ingest.remote_write.endpoint import NodeJobs, OtherCells, RemoteWrite, WriteStages
from eagle_eye.server.ingest.remote_write.intake import RemoteWriteIntake
from eagle_eye.server.ingest.remote_write.keeper import CodeMemory, Keeper, known_interval_s
from eagle_eye.server.model.batch import Batch
from eagle_eye.server.model.clock import Clock, SystemClock
from eagle_eye.server.model.identity import Naming
from eagle_eye.server.model.records import AuditEntry
from eagle_eye.server.monitor.recall import recent_past
from eagle_eye.server.parts import ServerParts, Services, WatcherFactory, build, build_watcher
from eagle_eye.server.process import keep_running
from eagle_eye.server.reload import Reload
from eagle_eye.server.site_files import ModelFile, keep_model_current
from eagle_eye.server.store.leadership import Leadership
from eagle_eye.server.store.store import Change
from eagle_eye.server.web.dispatcher import Dispatcher

Work = tuple[str, Callable[[], Awaitable[None]]]  # by name


def create_app(
    config: ServerConfig,
    clock: Clock | None = None,
    watcher: WatcherFactory = build_watcher,
    resolve: Resolve | None = None,
    jitter: Callable[[], float] = random.random,
    reread: Callable[[], ServerConfig] | None = None,
    leadership: Leadership | None = None,
) -> Dispatcher[Services]:
    """Return the server as an ASGI application; ``config`` is one that ``config.load`` returned.

    ``reread`` returns the configuration as it is now, when a reload is asked for. With ``leadership`` the application
    is that of the leader if this server leads, else a standby's, and stays so. Opens the files in ``data_dir``
    and reads the recent past back. Raises StoreUnavailable or HistoryUnavailable when it cannot, ConfigurationError
    when the certificate is of no use.
    """
    clock = clock or SystemClock()
    parts = build(config, clock, watcher, resolve or system_resolver(), jitter, leadership)
    services = parts.services
    templates = Templates(services.history.template)
    if parts.forwarding is None:
        _read_back(services, templates)
    reload = Reload(services, reread or (lambda: config))
    api = _api(services, lambda: _life(parts, reload))

    parts.history.journal.templates.listen(templates.take_used, templates.forget)
    services.fleet.when_forgotten(templates.expel)
    takers = _frames(services, templates), _remote_write(services, parts.to_cells)
    return Dispatcher(api, *takers, services, reload.request_reload, parts.forwarding, parts.joint)


def _read_back(services: Services, templates: Templates) -> None:
    """Show the recent past to those who judge; first of all, which jobs are this server's."""
    config, clock = services.config, services.clock
    if services.cells is not None:
        services.cells.begin(services.doctor.own_problem)
    forgotten_s = services.known_nodes.recover(services.history)

    def past(fleet: Fleet | None = None) -> Iterator[tuple[Frame, float] | Batch]:
        since_s, frames_max = clock.now_s() - config.detection.window_s, config.history.replay_frames_max
        return recent_past(services.history, fleet, templates, forgotten_s, since_s, frames_max)

    services.watcher.recover(past(services.fleet))
    services.fleet.keep_names(clock.now_s())
    services.watcher.follow(services.resends, past)
    if services.leadership is not None:  # another server may have led until now
        services.resends.expect(services.fleet.unheard(clock.now_s() - LATE_S))


def _api(services: Services, life: Callable[[], AbstractAsyncContextManager[None]]) -> FastAPI:
    api = FastAPI(
        title="Eagle Eye",
        version=version("eagle-eye"),
        description="Finds the faulty node of a distributed training job. Errors are RFC 9457 problem details.",
        docs_url=None,
        openapi_url=None,  # description.py serves it
        redoc_url=None,
        lifespan=lambda _: life(),
    )
    api.state.services = services
    requests.answer_problems(api, services.telemetry)
    api.router.routes.extend(_endpoints().routes)
    nvrx.install(api)
    description.describe(api)
    return api


@functools.cache
def _endpoints() -> APIRouter:
    """Return the API's endpoints. FastAPI takes a tenth of a second to look into their signatures: once per process."""
    router = APIRouter()
    for one in (jobs.router, nodes.router, nodes.checks_router, incidents.router, evidence.router, actions.router):
        router.include_router(one)
    for one in (events.deliveries_router, events.router, credentials.enrolment_router, overview.router):
        router.include_router(one)
    for one in (silences.router, overview.cells_router, accounts.router, nodes.history_router, accounts.audit_router):
        router.include_router(one)
    for one in (metric_history.router, events.stream_router, overview.health_router, credentials.router):
        router.include_router(one)
    return router


def _life(parts: ServerParts, reload: Reload) -> AbstractAsyncContextManager[None]:
    @asynccontextmanager
    async def life() -> AsyncIterator[None]:
        services = parts.services
        services.signal.attach()
        services.outlook.attach()
        if parts.forwarding is None:
            services.remote_store.start()

        def failed(part: str) -> None:
            services.telemetry.failures.labels(part).inc()

        tasks = [
            asyncio.create_task(keep_running(name, work, failed), name=name) for name, work in _work(parts, reload)
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await _close(parts)

    return life()


def _work(parts: ServerParts, reload: Reload) -> tuple[Work, ...]:
    """Return what runs beside the endpoints, by name; a server that stands by judges nothing and asks for nothing."""
    services = parts.services
    of_each: tuple[Work, ...] = (
        ("certificates", lambda: _follow_certificates(services)),
        ("garbage", process.collect_young),
        ("memory", process.trim_heap),
    )
    if parts.forwarding is not None:
        return of_each
    return (
        ("detection", lambda: _judge(parts)),
        *(() if services.cells is None else (("cells", services.cells.run),)),
        *_of_the_site(parts),
        ("model", lambda: _follow_model(services)),
        ("evidence", services.evidence_requests.run),
        ("node checks", services.node_checks.run),
        ("idle checks", services.idle_checks.run),
        ("missing GPUs", services.missing_gpus.run),
        ("accounts", services.bookkeeper.run),
        ("reload", reload.run),
        ("job_sources", services.job_sources.run),
        ("integrity", Integrity(Path(services.config.data_dir), parts.store, parts.history).run),
        *of_each,
    )


async def _close(parts: ServerParts) -> None:
    services = parts.services
    services.signal.detach()
    await parts.webhook.close()
    if services.provider is not None:
        await services.provider.close()
    for to_others in (parts.forwarding, parts.joint):
        if to_others is not None:
            await to_others.close()
    if parts.to_cells is not None:
        await parts.to_cells.aclose()
    await asyncio.to_thread(services.remote_store.close)
    await asyncio.to_thread(parts.history.close)
    parts.store.close()


def _of_the_site(parts: ServerParts) -> tuple[Work, ...]:
    """Return what only one server of a site does: that of the default cell, where there are several."""
    if parts.services.cells is not None and not parts.services.cells.is_default:
        return ()
    return ("outbox", parts.outbox.run), ("heartbeat", parts.heartbeat.run)


async def _judge(parts: ServerParts) -> None:
    """Judge, once subscribers know who leads; a server alone has no epoch to tell them."""
    leadership = parts.services.leadership
    cells = parts.services.cells
    if leadership is not None:
        if cells is None or cells.is_default:  # the events of all cells are delivered by that one, under its epoch
            await parts.leader_ping.sent()
        if leadership.followed:
            now_s = parts.services.clock.now_s()
            entry = AuditEntry(
                time_s=now_s, who="server", verb="step down", subject="leader", detail=leadership.followed
            )
            await asyncio.to_thread(parts.store.commit, Change(audit=(entry,)))
            leadership.followed = ""
    await parts.services.watcher.run()


def _frames(services: Services, templates: Templates) -> Ingest:
    """Return what takes agents' frames."""
    config, limits = services.config.ingest, services.limits
    tokens, telemetry, clock = services.tokens, services.telemetry, services.clock
    reader = RowsReader(templates, UnknownThings(telemetry), config.body_bytes_max, clock)

    def asked_of(node: str) -> list[dict[str, Any]]:
        return services.evidence_requests.asked_of(node) + services.node_checks.asked_of(node)

    def has_requests() -> bool:
        return services.evidence_requests.has_requests() or services.node_checks.has_requests()

    watcher, cells = services.watcher, services.cells
    sinks = FrameSinks(services.history, watcher.observe_rows, _observe(services), watcher.observe, services.resends)
    answers = AgentAnswers(services.known_nodes.introduce, asked_of, has_requests)
    if cells is not None:
        answers = replace(answers, elsewhere=cells.elsewhere, several=lambda: cells.several)
    rows = RowsIngest(config, tokens, telemetry, clock, reader, services.fleet, sinks, answers)
    return Ingest(config, tokens, telemetry, clock, limits.check_frames, rows, reader)


def _remote_write(services: Services, to_cells: httpx.AsyncClient | None) -> RemoteWrite:
    """Return what takes Prometheus' remote write."""
    settings, fleet = services.config.remote_write, services.fleet
    table = mapping.load()
    membership = NodeJobs(services.store, services.clock, fleet.vouchers)
    codes = CodeMemory(services.store, services.telemetry.failures.labels("last codes").inc)
    fleet.when_forgotten(codes.forget)
    intake = RemoteWriteIntake(
        table,
        Naming(settings.node_labels, settings.cluster_labels, fleet.clusters, fleet.matching),
        fleet.claims,
        settings.job_labels,
        settings.series_max,
        2 * services.config.ingest.nodes_max,
        lambda node: known_interval_s(fleet.last(node)),
        codes.of,
    )
    keeper = Keeper(
        services.history,
        fleet,
        services.telemetry,
        services.clock,
        _observe(services),
        services.known_nodes.introduce,
        membership.job_of,
        codes,
    )
    other_cells = None
    if services.cells is not None and to_cells is not None:
        other_cells = OtherCells(services.cells, membership.job_of, to_cells, WRITE_PATH, services.clock)
    return RemoteWrite(
        settings,
        services.config.ingest,
        services.tokens,
        services.limits.check_remote_write,
        fleet,
        WriteStages(table.wanted, membership, intake, keeper, other_cells),
        services.telemetry,
        services.clock,
    )


def _observe(services: Services) -> Callable[[Frame, float, float], None]:
    """Return what shows a durable frame to detection and to the accounts."""

    def observe(frame: Frame, received_s: float, offset_s: float) -> None:
        services.watcher.observe(frame, received_s, offset_s)
        if frame.events:
            services.bookkeeper.record_events(frame.node, frame.events)

    return observe


async def _follow_model(services: Services) -> None:
    if services.config.detection.model:
        file = ModelFile(Path(services.config.detection.model), services.telemetry.model_errors.inc)
        await keep_model_current(file, services.watcher.use_model)
    await asyncio.Event().wait()


async def _follow_certificates(services: Services) -> None:
    if services.certificates is not None:
        await services.certificates.follow()
    await asyncio.Event().wait()
