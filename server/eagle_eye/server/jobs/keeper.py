"""Polls the job sources on a clock; writes their reports to the store and passes them to the detection loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from eagle_eye.schema.backoff import Backoff
from eagle_eye.schema.names import is_name
from eagle_eye.server.engine.idle_faults import NO_JOB
from eagle_eye.server.engine.judgement import SchedulerReports
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.ingest.remote_write.keeper import SENDER, SENDER_UNPACED
from eagle_eye.server.jobs.reconcile import Knowledge, ObservedJob, Reconciled, reconcile
from eagle_eye.server.jobs.source import JobSource, Snapshot, SourceFailed
from eagle_eye.server.jobs.standing import standing
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.identity import NodeNames
from eagle_eye.server.model.records import AuditEntry, Job, Node
from eagle_eye.server.monitor.watcher import Watcher
from eagle_eye.server.store.store import JOBS, NODES, PAGE_LIMIT_MAX, Change, Store
from eagle_eye.server.telemetry.counters import Telemetry

BACKOFF_S, BACKOFF_S_MAX = 1.0, 60.0  # delay after a failed query; doubles
SEEN_S = 120.0  # how long an agent's report of where jobs run is used
LIVE_STATES = ("running", "completing", "suspended", "pending", "maintenance")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Health:
    """The state of a source. ``heard_s`` is by the monotonic clock, None if it never answered; ``problem`` "": none."""

    source: JobSource
    restart_owner: str
    began_s: float
    heard_s: float | None = None
    jobs: int = 0
    problem: str = ""
    reserved: frozenset[str] = frozenset()


class JobSources:
    """Polls each source at its interval, and sooner when a fault needs its report."""

    def __init__(
        self,
        sources: Sequence[tuple[JobSource, str]],
        patience_s: float,
        store: Store,
        clock: Clock,
        fleet: Fleet,
        watcher: Watcher,
        telemetry: Telemetry,
        jitter: Callable[[], float] = random.random,
        mine: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Take the sources, each with the restart owner of its jobs; of these, those that are ``mine`` are written."""
        self._mine = mine
        self._patience_s = patience_s
        self._store = store
        self._clock = clock
        self._fleet = fleet
        self._watcher = watcher
        self._telemetry = telemetry
        self._jitter = jitter
        self._sooner = {source.name: asyncio.Event() for source, _ in sources}
        self._healths = [Health(source, owner, clock.monotonic_s()) for source, owner in sources]

    async def run(self) -> None:
        """Follow all sources until cancelled."""
        self._watcher.call_schedulers(self.ask_sooner)
        for health in self._healths:
            self._watcher.observe_scheduler(SchedulerReports(health.source.name, None, patience_s=self._patience_s))
        async with asyncio.TaskGroup() as group:
            for health in self._healths:
                group.create_task(self._follow(health), name=health.source.name)
            await asyncio.Event().wait()

    def ask_sooner(self) -> None:
        """Have every source queried now; on the event loop."""
        for event in self._sooner.values():
            event.set()

    def problem(self) -> str | None:
        """Return what is wrong with the sources, "ok" if nothing, None if there are none. From any thread."""
        if not self._healths:
            return None
        return "; ".join(filter(None, map(self._problem_of, self._healths))) or "ok"

    def ages_s(self) -> dict[str, float]:
        """Return how long ago each source last answered; sources that never did are missing."""
        now_s = self._clock.monotonic_s()
        return {h.source.name: now_s - h.heard_s for h in self._healths if h.heard_s is not None}

    def counts(self) -> dict[str, int]:
        """Return how many of our jobs each source reports on."""
        return {health.source.name: health.jobs for health in self._healths}

    def _problem_of(self, health: Health) -> str:
        age_s = self._clock.monotonic_s() - (health.began_s if health.heard_s is None else health.heard_s)
        if age_s <= health.source.patience_s:
            return ""
        why = f": {health.problem}" if health.problem else ""
        return f"{health.source.name} was not heard for {age_s:.0f} s{why}"

    async def _follow(self, health: Health) -> None:
        name, backoff = health.source.name, Backoff(BACKOFF_S, BACKOFF_S_MAX, self._jitter)
        while True:
            try:
                async with contextlib.aclosing(health.source.snapshots(self._sooner[name])) as snapshots:
                    async for snapshot in snapshots:
                        await self._take(health, snapshot)
                        if health.problem:
                            log.info("a scheduler is heard again", extra={"source": name})
                        health.problem = ""
                        backoff.reset()
            except SourceFailed as error:
                self._telemetry.job_source_answers.labels(name, error.reason).inc()
                self._fail(health, str(error))
            except StoreUnavailable:
                self._telemetry.job_source_answers.labels(name, "unsaved").inc()
                self._fail(health, "the records cannot be written")
            await asyncio.sleep(backoff.next_s())

    def _fail(self, health: Health, problem: str) -> None:
        if problem != health.problem:  # logged once, however often it is retried
            log.warning("a scheduler gives no answer", extra={"source": health.source.name, "error": problem})
        health.problem = problem

    async def _take(self, health: Health, snapshot: Snapshot) -> None:
        """Write the changes that follow from an answer, and pass it to the detection loop. Raises StoreUnavailable."""
        snapshot = _named(snapshot)
        source = health.source.name
        reported, reserved = await asyncio.to_thread(self._write, health, snapshot)
        health.reserved = reserved
        if snapshot.nodes is not None:
            named = await asyncio.to_thread(NodeNames, [node.name for node in snapshot.nodes])
            self._fleet.vouchers.use_scheduler(source, named)
        for job in reported.jobs:
            self._watcher.observe_job(job)
        self._watcher.observe_scheduler(
            SchedulerReports(source, snapshot.asked_s, reported.speaks_for, self._patience_s)
        )
        health.heard_s, health.jobs = self._clock.monotonic_s(), len(reported.speaks_for)
        self._telemetry.job_source_answers.labels(source, "ok").inc()
        for reason, count in {**snapshot.left_out, **reported.left_out}.items():
            if count:
                self._telemetry.job_source_left_out.labels(source, reason).inc(count)

    def _write(self, health: Health, snapshot: Snapshot) -> tuple[Reconciled, frozenset[str]]:
        found: list[Reconciled] = []
        names = NodeNames(self._fleet.names())
        seen, scraped = self._seen()
        reserved = health.reserved
        if snapshot.nodes is not None:
            there = (names.ours(node.name) for node in snapshot.nodes if node.maintenance)
            reserved = frozenset(name for name in there if name is not None)
        work = functools.partial(self._change, health, snapshot, seen, scraped, names, reserved, found)
        if not work(self._store).empty:
            # Computed again inside the transaction, to include what a launcher or person did meanwhile.
            self._store.update(work)
        return found[-1], reserved

    def _change(
        self,
        health: Health,
        snapshot: Snapshot,
        seen: dict[str, ObservedJob],
        scraped: frozenset[str],
        names: NodeNames,
        reserved: frozenset[str],
        found: list[Reconciled],
        store: Store,
    ) -> Change:
        source, now_s = health.source.name, self._clock.now_s()
        jobs = _jobs_concerned(store, {*seen, *(job.name for job in snapshot.jobs)})
        known = Knowledge(jobs, seen, names, scraped, reserved)
        reported = reconcile(source, snapshot.jobs, known, health.restart_owner, now_s)
        reported = replace(reported, jobs=tuple([job for job in reported.jobs if self._mine(job.job)]))
        found.append(reported)
        nodes: tuple[Node, ...] = ()
        if snapshot.nodes is not None and self._mine(NO_JOB):
            nodes = standing(source, snapshot.nodes, {node.node: node for node in store.all(NODES)}, names, now_s)
        entries = [_reported_of_job(source, job, now_s) for job in reported.jobs if _is_news(job, jobs.get(job.job))]
        entries += [_reported_of_node(source, node, now_s) for node in nodes]
        return Change(jobs=reported.jobs, nodes=nodes, audit=tuple(entries))

    def _seen(self) -> tuple[dict[str, ObservedJob], frozenset[str]]:
        """Return the jobs that agents reported recently, and the nodes reported only by Prometheus."""
        attempts: dict[str, int] = {}
        nodes: dict[str, set[str]] = {}
        scraped = set()
        for voice in self._fleet.voices(self._clock.now_s() - SEEN_S):
            if voice.agent_version in (SENDER, SENDER_UNPACED):
                scraped.add(voice.node)
            if voice.job is not None:
                attempts.setdefault(voice.job, 0)
                if not voice.ranks:
                    nodes.setdefault(voice.job, set()).add(voice.node)
            for rank in voice.ranks:
                if rank.attempt > attempts.get(rank.job, -1):
                    attempts[rank.job], nodes[rank.job] = rank.attempt, set()
                if rank.attempt == attempts[rank.job]:
                    nodes.setdefault(rank.job, set()).add(voice.node)
        seen = {job: ObservedJob(attempt, frozenset(nodes.get(job, ()))) for job, attempt in attempts.items()}
        return seen, frozenset(scraped)


def _named(snapshot: Snapshot) -> Snapshot:
    """Return the answer without jobs whose names are invalid; these are counted as left out."""
    jobs = tuple([job for job in snapshot.jobs if is_name(job.name)])
    bad = len(snapshot.jobs) - len(jobs)
    if not bad:
        return snapshot
    return replace(snapshot, jobs=jobs, left_out={**snapshot.left_out, "name": bad})


def _jobs_concerned(store: Store, names: set[str]) -> dict[str, Job]:
    """Return the jobs on record that are not over, and those with the given names."""
    found: dict[str, Job] = {}
    cursor: str | None = None
    while True:
        page = store.page(JOBS, {"state": LIVE_STATES}, cursor, PAGE_LIMIT_MAX)
        found.update({job.job: job for job in page.items})
        cursor = page.next
        if cursor is None:
            break
    for name in names - found.keys():
        job = store.get(JOBS, name)
        if job is not None:
            found[name] = job
    return found


def _is_news(job: Job, before: Job | None) -> bool:
    return before is None or (job.state, job.attempt, job.conflict) != (before.state, before.attempt, before.conflict)


def _reported_of_job(source: str, job: Job, now_s: float) -> AuditEntry:
    # In the form of a launcher's report, so that recordings find both.
    detail = f"attempt {job.attempt} {job.state}, {len(job.ranks)} ranks"
    more = "; ".join(filter(None, (f"{job.scheduled_as} {job.said}", job.conflict)))
    return AuditEntry(time_s=now_s, who=source, verb="job", subject=job.job, detail=f"{detail}; {more}")


def _reported_of_node(source: str, node: Node, now_s: float) -> AuditEntry:
    return AuditEntry(time_s=now_s, who=source, verb=node.state, subject=node.node, detail=node.reason)
