"""Readiness: whether the server can detect faults. A blind server reports it, and its heartbeat stops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from eagle_eye.server.delivery import events
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.history.history import History
from eagle_eye.server.ingest.fleet import RECENT_S, Fleet
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.event_filters import wants
from eagle_eye.server.model.identity import CLUSTER_MARK
from eagle_eye.server.monitor.watcher import Outlook, Watcher
from eagle_eye.server.store.leadership import Leadership
from eagle_eye.server.store.store import SUBSCRIPTIONS, Change, Store, repeat
from eagle_eye.server.telemetry.counters import Telemetry

PROBE_S = 2.0  # an answer is cached for this long, so that frequent requests do not wear out the disk
LOOP_TICKS = 10.0  # ticks of silence after which the detection loop counts as stuck
LOOP_FLOOR_S = 10.0
DISPUTES_SHOWN = 4
CLUSTERS_SHOWN = 6


class Readiness(NamedTuple):
    """``checks`` maps storage, detection and agents to "ok" or to the problem; ready means that all are ok.

    Where schedulers are queried for jobs, ``job_sources`` is another check: without them a fault cannot be
    distinguished from a job's end.

    Where several cells share the records, ``cells`` is another check: what is wrong with the others.

    Where servers share a database, ``leader`` is another check, and the only one of a server that stands by.

    ``blind`` names detectors that could evaluate nothing, with the reason; a site may lack what one of them needs, so
    they alone do not make the server unready. ``notes`` are matters that people should fix before they do harm.
    """

    ready: bool
    checks: Mapping[str, str]
    blind: Mapping[str, str]
    notes: Mapping[str, str]


def coverage_note(fleet: Fleet, outlook: Outlook, now_s: float, fresh_s: float) -> str:
    """Return which nodes nobody judges: those that are silent, and those of no known job; "" for none."""
    recent = fleet.recent(now_s - RECENT_S)
    fresh = [one.node for one in fleet.presences() if one.is_fresh(now_s, fresh_s)]
    members = {node for course in outlook.courses() for node in course.nodes}
    apart = sum(node not in members for node in fresh)
    said = []
    if len(fresh) < recent:
        said.append(f"{recent - len(fresh)} of {recent} nodes are silent")
    if apart:
        said.append(
            f"{apart} of {len(fresh)} nodes that report belong to no job that is known: if they train, declare the job"
            " (launcher, scheduler under [job_sources], or a job label of their series)"
        )
    return f"not judged: {'; '.join(said)}" if said else ""


def identity_note(fleet: Fleet, now_s: float) -> str:
    """Return which nodes' names two machines have, and of which clusters nodes are named with theirs; "" for none."""
    disputes = [str(dispute) for dispute in fleet.claims.disputes(now_s)]
    said = []
    if disputes:
        more = f", and so do {len(disputes) - DISPUTES_SHOWN} more names" if len(disputes) > DISPUTES_SHOWN else ""
        said.append(
            f"{'; '.join(disputes[:DISPUTES_SHOWN])}{more}: what is disputed accuses nobody; give each machine its own"
            " name, or label series with their cluster"
        )
    clusters = fleet.clusters
    if clusters.others and not clusters.configured:
        said.append(
            f"series name the clusters {', '.join([clusters.home, *clusters.others][:CLUSTERS_SHOWN])}: nodes of"
            f" {clusters.home} are named as they are, those of another as NODE{CLUSTER_MARK}CLUSTER; set"
            " [identity] cluster to the one whose jobs this server acts on"
        )
    return "; ".join(said)


def remote_write_note(fleet: Fleet, now_s: float) -> str:
    """Return which senders' series are all left out because no name of theirs is mapped; "" for none."""
    said = "; ".join(fleet.unmapped_senders.said(now_s))
    return f"{said}: docs/how-to/prometheus.md has those that are" if said else ""


def replication_note(leadership: Leadership | None, policy: PolicySettings, *, async_ok: bool) -> str:
    """Return what a leader that acts has to say of replicas which lag behind the database, "" for nothing."""
    behind = leadership.replicas_behind if leadership is not None and leadership.leads else 0
    acts = policy.mode == "act" or any(rule.mode == "act" for rule in policy.modes)
    if async_ok or not behind or not acts:
        return ""
    return (
        f"{behind} of the database's replicas may lack the last commits when it fails over, and with them what was"
        " decided: set synchronous_standby_names, or records.async_ok = true"
    )


@dataclass(frozen=True, slots=True)
class VitalParts:
    """The server's parts without which nothing is judged."""

    store: Store
    history: History
    watcher: Watcher
    outlook: Outlook
    fleet: Fleet


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a server shares its site with.

    ``job_sources()`` says what is wrong with the schedulers, ``cells()`` with the other cells, None where there is
    none; ``agents_due()`` whether this server should hear any agent at all.
    """

    job_sources: Callable[[], str | None] = lambda: None
    leadership: Leadership | None = None
    cells: Callable[[], str | None] = lambda: None
    agents_due: Callable[[], bool] = lambda: True


class Doctor:
    """Checks the server's own health. ``check`` may be called from any thread. Notes that are "" are not shown."""

    def __init__(
        self,
        parts: VitalParts,
        telemetry: Telemetry,
        clock: Clock,
        tick_s: float,
        fresh_s: float,
        around: Surroundings,
        notes: Mapping[str, Callable[[], str]] = MappingProxyType({}),
    ) -> None:
        self._store = parts.store
        self._history = parts.history
        self._watcher = parts.watcher
        self._outlook = parts.outlook
        self._fleet = parts.fleet
        self._telemetry = telemetry
        self._clock = clock
        self._loop_s = max(LOOP_TICKS * tick_s, LOOP_FLOOR_S)
        self._fresh_s = fresh_s
        self._job_sources = around.job_sources
        self._notes = notes
        self._leadership = around.leadership
        self._cells = around.cells
        self._agents_due = around.agents_due
        self._storage = "ok"
        self._probed_s: float | None = None
        self._lock = threading.Lock()

    def check(self) -> Readiness:
        """Return whether the server is ready, and what is missing."""
        checks = self._checks()
        leads = self._leadership is None or self._leadership.leads
        blind = self._outlook.blind() if leads else {}
        return Readiness(
            _all_ok(checks), checks, blind, {n: said for n, note in self._notes.items() if (said := note())}
        )

    def is_ready(self) -> bool:
        """Return whether the server is ready, without looking for notes: they cost a pass over all nodes."""
        return _all_ok(self._checks())

    def _checks(self) -> dict[str, str]:
        leadership = self._leadership
        if leadership is not None and not leadership.leads:
            self._telemetry.ready.set(0)
            return {"leader": f"this server stands by; {leadership.state()}"}
        checks = {"storage": self._check_storage(), "detection": self._check_loop(), "agents": self._check_agents()}
        if leadership is not None:
            checks["leader"] = leadership.problem() or "ok"
        schedulers = self._job_sources()
        if schedulers is not None:
            checks["job_sources"] = schedulers
        cells = self._cells()
        if cells is not None:
            checks["cells"] = cells
        self._telemetry.ready.set(_all_ok(checks))
        return checks

    def own_problem(self) -> str:
        """Return why this server cannot judge, whatever is wrong with other cells; "" if it can."""
        checks = self._checks().items()
        return "; ".join(f"{name}: {said}" for name, said in checks if said != "ok" and name != "cells")

    def _check_storage(self) -> str:
        with self._lock:
            now_s = self._clock.monotonic_s()
            if self._probed_s is None or now_s - self._probed_s >= PROBE_S:
                try:
                    self._store.probe()
                    self._storage = "ok"
                except StoreUnavailable as error:
                    self._storage = str(error)
                self._probed_s = now_s
            return self._history.problem() or self._storage

    def _check_loop(self) -> str:
        ticked_s = self._watcher.ticked_s()
        if ticked_s is None:
            return "the detection loop has not judged yet"
        now_s = self._clock.monotonic_s()
        age_s = now_s - ticked_s
        if age_s <= self._loop_s:
            return "ok"
        judged_s = self._watcher.judged_s()
        if judged_s is not None and now_s - judged_s <= self._loop_s:
            return f"detectors go on in memory, and nothing was decided for {age_s:.0f} s"
        return f"the detection loop has not judged for {age_s:.0f} s"

    def _check_agents(self) -> str:
        if not self._agents_due():
            return "ok"
        newest_s = self._fleet.newest_s()
        if newest_s is None:
            return "no agent has sent anything yet"
        age_s = self._clock.now_s() - newest_s
        patience_s = self._fleet.patience_s(self._fresh_s)
        if age_s < -patience_s:
            return f"no agent was heard since the clock was set back by {-age_s:.0f} s or more"
        return "ok" if age_s <= patience_s else f"no agent was heard for {age_s:.0f} s (ingest.fresh_s)"


def _all_ok(checks: Mapping[str, str]) -> bool:
    return all(said == "ok" for said in checks.values())


class Heartbeat:
    """The heartbeat; ``interval_s`` 0 disables it."""

    def __init__(self, store: Store, doctor: Doctor, clock: Clock, interval_s: float, public_url: str) -> None:
        self._store = store
        self._doctor = doctor
        self._clock = clock
        self._interval_s = interval_s
        self._public_url = public_url

    async def run(self) -> None:
        """Send a heartbeat at every interval until cancelled."""
        await repeat(lambda: asyncio.to_thread(self.beat), self._interval_s, "no heartbeat", wait_first=True)

    def beat(self) -> None:
        """Commit one heartbeat, if the server is ready and any subscription wants it. Raises StoreUnavailable."""
        event = events.heartbeat(self._clock.now_s(), self._interval_s, self._public_url)
        subscriptions = self._store.all(SUBSCRIPTIONS)
        if any(known.active and wants(known, event) for known in subscriptions) and self._doctor.is_ready():
            self._store.commit(Change(events=(event,)))
