"""Records the past as it happens: polls the jobs every few seconds and records agents' events. Writes the store.

It runs beside the detection loop, never in it: the event loop only hands over its data; the store is written in a
thread.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, TypeVar

from eagle_eye.schema.events import Event
from eagle_eye.server.accounts import node_records
from eagle_eye.server.accounts.goodput import LOOK_S, UNWATCHED_S, Witness, follow, forsaken, worth_writing
from eagle_eye.server.accounts.node_records import ErrorCount, GpuReport
from eagle_eye.server.accounts.trust import AccountSettings
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.records import Attempt, AttemptMembers, DriverError, Gpu
from eagle_eye.server.monitor.watcher import JobProgress, Watcher
from eagle_eye.server.store.store import (
    ATTEMPTS,
    DRIVER_ERRORS,
    GPU_CHECKS,
    GPUS,
    MEMBERSHIPS,
    NODE_CHECKS,
    PAGE_LIMIT_MAX,
    TICKETS,
    Change,
    Kind,
    Store,
    repeat,
)

PENDING_MAX = 200_000  # GPUs, and likewise errors, waiting for the next poll: those of a fleet that starts at once
BATCH = 1_000  # records written in one transaction: bounds how long other writers wait
GPUS_PER_NODE_MAX = 64
ERRORS_PER_NODE_MAX = 256  # codes by device
PRUNE_EVERY_S = 3_600.0
CHECKS_KEPT_S = 90 * 86_400.0  # of nodes: idle ones are checked daily
MEMBERS_KEPT_S = 14 * 86_400.0  # or twice the look-back time

_Error = tuple[str, int, str, int]  # node, device, kind, code
_KeyT = TypeVar("_KeyT")
_ValueT = TypeVar("_ValueT", GpuReport, ErrorCount)


class Bookkeeper:
    """Sole writer of the attempts and memberships of the jobs that are ``mine``, of GPUs and driver errors.

    ``dropped`` counts by reason what a limit left out.
    """

    def __init__(
        self,
        store: Store,
        watcher: Watcher,
        fleet: Fleet,
        clock: Clock,
        settings: AccountSettings,
        dropped: Callable[[str], None],
        mine: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._mine = mine
        self._store = store
        self._watcher = watcher
        self._fleet = fleet
        self._clock = clock
        self._retention_s = settings.retention_s
        self._members_kept_s = max(MEMBERS_KEPT_S, 2 * settings.hindsight_s)
        self._dropped = dropped
        self._lock = threading.Lock()
        self._gpus: dict[str, GpuReport] = {}
        self._errors: dict[_Error, ErrorCount] = {}
        self._unwritten: dict[str, Attempt] = {}  # by id
        self._known: dict[str, Attempt] = {}  # by job, the newest
        self._written_s: dict[str, float] = {}  # by attempt
        self._members: dict[str, tuple[str, ...]] = {}  # as written, by attempt
        self._spoken_s: dict[str, float] = {}  # by job
        self._opened_s: float | None = None
        self._pruned_s = clock.monotonic_s()

    def record_events(self, node: str, events: Iterable[Event]) -> None:
        """Record a node's events, with times on the server's clock. On the event loop; returns at once."""
        for event in events:
            if event.kind == node_records.INVENTORY:
                reported = node_records.reported_gpus(node, event.device, event.attributes, event.time_s)
                if reported is not None:
                    self._put(self._gpus, reported.uuid, reported, "gpu_backlog")
            elif event.kind in node_records.ERRORS:
                code = node_records.code_of(event.attributes)
                if code is not None:
                    key = (node, event.device, event.kind, code)
                    self._put(self._errors, key, ErrorCount(1, event.time_s, event.time_s), "error_backlog")

    async def run(self) -> None:
        """Poll the jobs every LOOK_S until cancelled."""
        await repeat(
            lambda: asyncio.to_thread(self.write_changes, self._watcher.courses(), self._clock.now_s()),
            LOOK_S,
            "the accounts are not kept up",
        )

    def write_changes(self, courses: Iterable[JobProgress], now_s: float) -> None:
        """Write what has changed since the last poll. Raises StoreUnavailable; then nothing is lost."""
        if self._opened_s is None:
            self._open(now_s)
        self._write_attempts(list(courses), now_s)
        self._write_gpus()
        self._write_errors()
        if self._clock.monotonic_s() - self._pruned_s >= PRUNE_EVERY_S:
            self._prune(now_s)

    def _open(self, now_s: float) -> None:
        cursor: str | None = None
        while True:
            page = self._store.page(ATTEMPTS, {"end": ""}, cursor, PAGE_LIMIT_MAX)
            for attempt in page.items:
                self._known.setdefault(attempt.job, attempt)
            cursor = page.next
            if cursor is None:
                break
        self._opened_s = now_s

    def _write_attempts(self, courses: list[JobProgress], now_s: float) -> None:
        members: list[tuple[AttemptMembers, tuple[str, ...]]] = []
        for course in courses:
            known = self._newest(course.job)
            found = follow(known, course, self._witness(course), now_s, lambda: f"att_{secrets.token_hex(8)}")
            for new in found:
                old = known if known is not None and known.id == new.id else None
                if worth_writing(old, new, self._written_s.get(new.id, -float("inf")), now_s):
                    self._unwritten[new.id] = new
            if found:
                current = found[-1]
                if current.ended_s is None and self._members.get(current.id) != course.nodes:
                    nodes = sorted(course.nodes)
                    membership = AttemptMembers(
                        id=current.id, job=current.job, started_s=current.started_s, nodes=nodes
                    )
                    members.append((membership, course.nodes))
                self._known[course.job] = current
        self._unwritten.update({over.id: over for over in self._forsaken({course.job for course in courses}, now_s)})
        while self._unwritten:
            batch = list(self._unwritten.values())[:BATCH]
            self._store.commit(Change(attempts=tuple(batch)))
            for attempt in batch:
                del self._unwritten[attempt.id]
                self._written_s[attempt.id] = now_s
        for membership, nodes_seen in members:  # each may hold thousands of names
            self._store.commit(Change(memberships=(membership,)))
            self._members[membership.id] = nodes_seen

    def _forsaken(self, spoken_of: set[str], now_s: float) -> list[Attempt]:
        """Return the attempts that the detection loop no longer knows, ended; forget the jobs that are over."""
        ended = []
        for job in [job for job in self._known if job not in spoken_of]:
            attempt = self._known[job]
            # Right after the start, agents may not have reported yet.
            over = forsaken(attempt, now_s) if now_s - (self._opened_s or now_s) > UNWATCHED_S * 5 else None
            gone = not self._mine(job)  # to another cell, which goes on with its accounts
            if over is not None and not gone:
                ended.append(over)
            if gone or over is not None or attempt.ended_s is not None:
                del self._known[job]
                self._members.pop(attempt.id, None)
                self._written_s.pop(attempt.id, None)
                self._spoken_s.pop(job, None)
        return ended

    def _newest(self, job: str) -> Attempt | None:
        known = self._known.get(job)
        if known is None:
            found = self._store.page(ATTEMPTS, {"job": job}, limit=1).items
            known = found[0] if found else None
            if known is not None:
                self._known[job] = known
        return known

    def _witness(self, course: JobProgress) -> Witness:
        """Return when the job's nodes were heard; in a healthy job the first node suffices."""
        heard_s: float | None = None
        now_s = self._clock.now_s()
        for node in course.nodes:
            last = self._fleet.last(node)
            if last is None:
                continue
            heard_s = last.received_s if heard_s is None else max(heard_s, last.received_s)
            if last.job == course.job or any(rank.job == course.job for rank in last.ranks):
                before_s = self._spoken_s.get(course.job, last.received_s)
                self._spoken_s[course.job] = max(before_s, last.received_s)
                if now_s - last.received_s <= UNWATCHED_S:
                    break
        return Witness(heard_s, self._spoken_s.get(course.job))

    def _write_gpus(self) -> None:
        while batch := self._taken(self._gpus):
            try:
                seated = tuple(self._seated(self._store, batch))
                self._store.commit(Change(gpus=seated))
            except StoreUnavailable:
                for uuid, reported in batch.items():
                    self._put(self._gpus, uuid, reported, "gpu_backlog")
                raise

    def _seated(self, store: Store, batch: Mapping[str, GpuReport]) -> Iterable[Gpu]:
        room: dict[str, int] = {}
        for uuid, reported in batch.items():
            known = store.get(GPUS, uuid)
            if known is None:
                if reported.node not in room:
                    there = store.page(GPUS, {"node": reported.node}, limit=GPUS_PER_NODE_MAX).items
                    room[reported.node] = GPUS_PER_NODE_MAX - len(there)
                room[reported.node] -= 1
                if room[reported.node] < 0:
                    self._dropped("gpus_of_node")
                    continue
            new = node_records.seated(known, reported)
            if new is not known:
                yield new

    def _write_errors(self) -> None:
        while batch := self._taken(self._errors):
            try:
                counted = tuple(self._counted(self._store, batch))
                self._store.commit(Change(driver_errors=counted))
            except StoreUnavailable:
                for error, tally in batch.items():
                    self._put(self._errors, error, tally, "error_backlog")
                raise

    def _counted(self, store: Store, batch: Mapping[_Error, ErrorCount]) -> Iterable[DriverError]:
        room: dict[str, int] = {}
        seats: dict[str, list[Gpu]] = {}
        for (node, device, kind, code), tally in batch.items():
            if node not in seats:
                seats[node] = store.page(GPUS, {"node": node}, limit=GPUS_PER_NODE_MAX).items
            uuid = next(
                (gpu.uuid for gpu in seats[node] if node_records.sat_at(gpu, tally.last_s) == (node, device)), ""
            )
            id_ = node_records.error_id(node, device, kind, code, uuid)
            known = store.get(DRIVER_ERRORS, id_)
            if known is None:
                if node not in room:
                    there = store.page(DRIVER_ERRORS, {"node": node}, limit=ERRORS_PER_NODE_MAX).items
                    room[node] = ERRORS_PER_NODE_MAX - len(there)
                room[node] -= 1
                if room[node] < 0:
                    self._dropped("errors_of_node")
                    continue
            reported = DriverError(
                id=id_,
                node=node,
                device=device,
                uuid=uuid,
                kind=kind,
                code=code,
                count=tally.times,
                first_s=tally.first_s,
                last_s=tally.last_s,
            )
            yield node_records.counted(known, reported)

    def _prune(self, now_s: float) -> None:
        aged: tuple[tuple[Kind[Any], str, float], ...] = (
            (ATTEMPTS, "started_s", self._retention_s),
            (MEMBERSHIPS, "started_s", self._members_kept_s),
            (GPUS, "seen_s", self._retention_s),
            (GPU_CHECKS, "last_s", self._retention_s),
            (NODE_CHECKS, "created_s", CHECKS_KEPT_S),
            (DRIVER_ERRORS, "last_s", self._retention_s),
            (TICKETS, "opened_s", self._retention_s),
        )
        for kind, column, kept_s in aged:
            self._store.retire(kind, column, now_s - kept_s, BATCH)
        current = {attempt.id for attempt in self._known.values()}
        self._written_s = {id_: written_s for id_, written_s in self._written_s.items() if id_ in current}
        self._pruned_s = self._clock.monotonic_s()

    def _put(self, pending: dict[_KeyT, _ValueT], key: _KeyT, value: _ValueT, reason: str) -> None:
        with self._lock:
            known = pending.get(key)
            if known is not None:
                pending[key] = known.joined(value)
            elif len(pending) < PENDING_MAX:
                pending[key] = value
            else:
                self._dropped(reason)

    def _taken(self, pending: dict[_KeyT, _ValueT]) -> dict[_KeyT, _ValueT]:
        with self._lock:
            return {key: pending.pop(key) for key in list(islice(pending, BATCH))}
