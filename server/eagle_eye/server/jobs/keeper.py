"""Polls the configured job sources; writes their reports to the store and passes them to the detection loop.

``eagle-eye server --check-job-sources`` queries each of them once instead, and shows its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.schema.backoff import Backoff
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.names import is_name
from eagle_eye.server.engine.idle_faults import NO_JOB
from eagle_eye.server.engine.judgement import SchedulerReports
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.ingest.remote_write.keeper import SENDER, SENDER_UNPACED
from eagle_eye.server.jobs.kubernetes import Kubernetes
from eagle_eye.server.jobs.reconcile import Knowledge, ObservedJob, Reconciled, is_our_reason, reconcile, standing
from eagle_eye.server.jobs.slurm import SlurmRest, Squeue
from eagle_eye.server.jobs.source import JobSource, JobSourceSettings, Snapshot, SourceFailed
from eagle_eye.server.model.clock import Clock, SystemClock, rfc3339
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.identity import NodeNames
from eagle_eye.server.model.records import AuditEntry, Job, Node
from eagle_eye.server.monitor.watcher import Watcher
from eagle_eye.server.store.store import JOBS, NODES, PAGE_LIMIT_MAX, Change, Store
from eagle_eye.server.telemetry.counters import Telemetry, metric_name


def sources_of(settings: JobSourceSettings, clock: Clock, environ: Mapping[str, str]) -> list[tuple[JobSource, str]]:
    """Return the configured sources, each with the restart owner of its jobs; [] for none."""
    found: list[tuple[JobSource, str]] = []
    slurm, kubernetes = settings.slurm, settings.kubernetes
    if slurm.use == "squeue":
        found.append((Squeue(slurm, clock), slurm.restart_owner))
    elif slurm.use == "rest":
        found.append((SlurmRest(slurm, clock), slurm.restart_owner))
    if kubernetes.use == "watch":
        found.append((Kubernetes(kubernetes, clock, environ), kubernetes.restart_owner))
    return found


# Polling, on a clock.

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


@dataclass(frozen=True, slots=True)
class Schedulers:
    """The sources to poll, each with the restart owner of its jobs.

    A fault waits ``patience_s`` for their reports. Of their jobs, those that are ``mine`` are written.
    """

    sources: Sequence[tuple[JobSource, str]]
    patience_s: float
    mine: Callable[[str], bool] = lambda _: True


class JobSources:
    """Polls each source at its interval, and sooner when a fault needs its report."""

    def __init__(
        self,
        schedulers: Schedulers,
        store: Store,
        clock: Clock,
        fleet: Fleet,
        watcher: Watcher,
        telemetry: Telemetry,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._mine = schedulers.mine
        self._patience_s = schedulers.patience_s
        self._store = store
        self._clock = clock
        self._fleet = fleet
        self._watcher = watcher
        self._telemetry = telemetry
        self._jitter = jitter
        self._sooner = {source.name: asyncio.Event() for source, _ in schedulers.sources}
        self._healths = [Health(source, owner, clock.monotonic_s()) for source, owner in schedulers.sources]

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


class JobSourceCollector(Collector):
    """The age of each scheduler's report, and its number of jobs."""

    def __init__(self, ages_s: Callable[[], dict[str, float]], counts: Callable[[], dict[str, int]]) -> None:
        self._ages_s = ages_s
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Yield two families; a scheduler that never answered has no age."""
        ages = GaugeMetricFamily(
            metric_name("job_source_age_seconds"), "Time since this scheduler last answered.", labels=["source"]
        )
        for source, age_s in self._ages_s().items():
            ages.add_metric([source], age_s)
        yield ages
        jobs = GaugeMetricFamily(
            metric_name("job_source_jobs"), "Jobs of ours that this scheduler speaks for.", labels=["source"]
        )
        for source, count in self._counts().items():
            jobs.add_metric([source], count)
        yield jobs


# ``--check-job-sources`` writes nothing. Touches: what the sources touch, stdout, stderr.

SHOWN_MAX = 20  # jobs, and nodes out of service, that are shown one by one
REFUSED_S = 2.0  # by then an API server has refused a watch that it does not allow
SHOWN_CHARS_MAX = 60


def check_job_sources(settings: JobSourceSettings, clock: Clock | None = None) -> int:
    """Show each source's answer; return 0 when all have answered, else 1.

    Raises ConfigurationError when none is configured.
    """
    clock = clock or SystemClock()
    sources = [source for source, _ in sources_of(settings, clock, os.environ)]
    if not sources:
        raise ConfigurationError(
            "job_sources: expected slurm.use or kubernetes.use, got neither: there is no scheduler to ask"
        )
    failed = 0
    for source in sources:
        try:
            snapshot, took_s = asyncio.run(_first_answer(source, clock))
        except SourceFailed as error:
            failed += 1
            sys.stderr.write(f"eagle-eye server: {source.name} gives no answer ({error.reason}): {error}\n")
        else:
            sys.stdout.write("\n".join(answer_lines(source.name, snapshot, took_s)) + "\n")
    return 1 if failed else 0


async def _first_answer(source: JobSource, clock: Clock) -> tuple[Snapshot, float]:
    """Return the source's first answer and its duration. Raises SourceFailed, also if it cannot continue after it."""
    begun_s = clock.monotonic_s()
    async with contextlib.aclosing(source.snapshots(asyncio.Event())) as snapshots:
        first = await anext(snapshots)
        took_s = clock.monotonic_s() - begun_s
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(anext(snapshots), REFUSED_S)
        return first, took_s


def answer_lines(name: str, snapshot: Snapshot, took_s: float) -> Iterator[str]:
    """Yield the lines that show an answer."""
    states = Counter(job.state or f"unknown: {_clean(job.said)}" for job in snapshot.jobs)
    yield f"{name} answered in {took_s:.2f} s"
    yield f"jobs: {_counted(len(snapshot.jobs), states)}"
    yield from _table(
        ("ID", "CALLED", "STATE", "ATTEMPT", "NODES", "ENDS", "OWNER"),
        (
            (
                job.id,
                job.name,
                job.state or job.said,
                str(job.attempt),
                _some(job.nodes),
                "-" if job.ends_s is None else rfc3339(job.ends_s),
                job.owner or "-",
            )
            for job in snapshot.jobs[:SHOWN_MAX]
        ),
        len(snapshot.jobs),
    )
    if snapshot.nodes is not None:
        yield f"nodes: {_counted(len(snapshot.nodes), Counter(node.state for node in snapshot.nodes))}"
        out = [node for node in snapshot.nodes if node.state != "in_service" or node.maintenance]
        yield from _table(
            ("NODE", "STATE", "WHOSE", "REASON"),
            (
                (
                    node.name,
                    "maintenance" if node.maintenance else node.state,
                    "Eagle Eye's" if is_our_reason(node.reason) else "the scheduler's",
                    node.reason or "-",
                )
                for node in out[:SHOWN_MAX]
            ),
            len(out),
        )
    if snapshot.left_out:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(snapshot.left_out.items()))
        yield f"left out, as of no use: {counts}"


def _counted(total: int, kinds: Counter[str]) -> str:
    if not total:
        return "none"
    return f"{total} ({', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))})"


def _some(nodes: Sequence[str]) -> str:
    if not nodes:
        return "-"
    return f"{nodes[0]} and {len(nodes) - 1} more" if len(nodes) > 1 else nodes[0]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], total: int) -> Iterator[str]:
    """Yield aligned lines; not rich's, which break names at the terminal's width: this is copied into tickets."""
    shown = [head, *(tuple(map(_clean, row)) for row in rows)]
    if len(shown) == 1:
        return
    widths = [max(len(row[at]) for row in shown) for at in range(len(head))]
    for row in shown:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if total > SHOWN_MAX:
        yield f"  and {total - SHOWN_MAX} more"


def _clean(text: str) -> str:
    """Return a scheduler's text without control characters, which could move a terminal's cursor."""
    visible = "".join(char if char.isprintable() else "?" for char in text)
    return visible if len(visible) <= SHOWN_CHARS_MAX else f"{visible[: SHOWN_CHARS_MAX - 1]}…"
