"""This server's part in the site's cells: whose job is whose, where nodes belong, how the other cells are.

Each job is judged by one cell; one that no record gives to a cell is the default cell's. The records say who: a
judgement is written in a transaction that reads there whether the job is still this cell's, and of a site's
transactions one runs at a time. So a job that is moved is judged by two at no moment. What is held here in memory is
only how each server knows it between transactions, from the trail of changes.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from eagle_eye.server.engine.routing import HELD_STATES
from eagle_eye.server.engine.rules import UNDER_WAY_STATES
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.records import AuditEntry, CellStatus, Job, JobCell
from eagle_eye.server.monitor.watcher import Watcher
from eagle_eye.server.store.leadership import Leadership
from eagle_eye.server.store.settings import DEFAULT_CELL
from eagle_eye.server.store.sql_store import SqlStore
from eagle_eye.server.store.store import (
    ACTIONS,
    CELLS,
    JOB_CELLS,
    JOBS,
    NODES,
    OVER_JOB_STATES,
    PAGE_LIMIT_MAX,
    Change,
    Store,
)

MUCH_RATIO = 1.5  # of the mean load of the cells: who has more gives a job away
MUCH_NODES = 64  # above the mean; below it there is nothing to gain


class Move(NamedTuple):
    """A job, and the cells that it leaves and goes to."""

    job: str
    source: str
    target: str


def choose(load: Mapping[str, int], here: str, near: Iterable[str] = ()) -> str:
    """Return the cell for a new job: the one that judges most jobs on its nodes, else the one with the fewest nodes.

    ``load`` has the nodes of each cell that lives, ``near`` the cells of the other jobs on its nodes, one for each
    node: a node's frames go to one cell. Of cells with equally many nodes it is ``here``, which hears the job now.
    """
    shared = [cell for cell in near if cell in load]
    if shared:
        return max(sorted(set(shared)), key=shared.count)
    return min(load, key=lambda cell: (load[cell], cell != here, cell))


def next_move(
    nodes: Mapping[str, int], cell_of: Mapping[str, str], living: Collection[str], held: Collection[str]
) -> Move | None:
    """Return the one job to move so that no cell has far more than its share, None where nothing is to gain.

    ``nodes`` are those of each job, ``held`` the jobs that stay: something of theirs is open. The largest job goes that
    leaves its cell with at least as much as the other one has then.
    """
    load = dict.fromkeys(living, 0)
    for job, count in nodes.items():
        if cell_of[job] in load:
            load[cell_of[job]] += count
    if len(load) < 2:
        return None
    mean = sum(load.values()) / len(load)
    source, target = max(sorted(load), key=load.__getitem__), min(sorted(load), key=load.__getitem__)
    if load[source] <= MUCH_RATIO * mean or load[source] - mean < MUCH_NODES:
        return None
    excess = (load[source] - load[target]) / 2
    movable = [
        (count, job)
        for job, count in nodes.items()
        if cell_of[job] == source and job not in held and 0 < count <= excess
    ]
    return Move(max(movable)[1], source, target) if movable else None


# Moves jobs from cell to cell: by hand, off a cell that is drained, and where one has far too much. Touches: store.
#
# A move is one record, written in the site's one transaction at a time: the cell before writes no judgement of the job
# after it, the next one none before. Agents go on their own; what the next cell sees begins with the move, as after a
# takeover, so that a job stays where something of its is open.

GOING_ON = ("suspected", "confirmed", "acting")  # states of an incident that keep its job where it is
REST_S = 600.0  # between two moves for balance, and for which a job stays after one


def why_held(store: Store, job: str) -> str:
    """Return what is open of the job, for which it should stay, "" for nothing."""
    incident = next((one for one in store.open_incidents() if one.job == job and one.state in GOING_ON), None)
    if incident is not None:
        return f"incident {incident.id} is {incident.state}"
    under_way = store.page(ACTIONS, {"job": job, "state": sorted(UNDER_WAY_STATES)}, limit=1).items
    return f"action {under_way[0].id} is {under_way[0].state}" if under_way else ""


def held_jobs(store: Store) -> set[str]:
    """Return the jobs of which something is open."""
    actions = store.page(ACTIONS, {"state": sorted(UNDER_WAY_STATES)}, limit=PAGE_LIMIT_MAX).items
    return {one.job for one in store.open_incidents() if one.state in GOING_ON} | {one.job for one in actions}


def moved(store: Store, job: str, cell: str, who: str, now_s: float, why: str = "") -> Change:
    """Return the change that gives the job to the cell; nothing where it is there. To be called within ``update``."""
    before = store.get(JOB_CELLS, job)
    source = DEFAULT_CELL if before is None else before.cell
    if source == cell:
        return Change()
    if before is None:
        known = store.get(JOBS, job)
        nodes = 0 if known is None else len({*known.nodes, *(rank.node for rank in known.ranks)})
        before = JobCell(job=job, cell=source, nodes=nodes, since_s=now_s, by=who)
    entry = AuditEntry(
        time_s=now_s, who=who, verb="move", subject=job, detail=f"cell {source} to {cell}{f': {why}' if why else ''}"
    )
    return Change(job_cells=(replace(before, cell=cell, since_s=now_s, by=who),), audit=(entry,))


def drained(store: Store, cell: str, living: Collection[str], who: str, now_s: float) -> tuple[Change, list[str]]:
    """Return the change that has the cell get no new job and gives its jobs away, and the jobs that stay for now.

    To be called within ``update``. ``living`` are the cells with a leader.
    """
    status = store.get(CELLS, cell)
    active = [one for one in store.all(JOB_CELLS) if one.over_s is None]
    others = {one.cell for one in store.all(CELLS) if one.cell in living and one.cell != cell and not one.drained}
    load = {other: sum(one.nodes for one in active if one.cell == other) for other in others}
    held = held_jobs(store)
    stays, changes = [], [] if status is None or status.drained else [Change(cells=(replace(status, drained=True),))]
    for one in sorted((one for one in active if one.cell == cell), key=lambda one: -one.nodes):
        if one.job in held or not load:
            stays.append(one.job)
            continue
        target = choose(load, cell)
        load[target] += one.nodes
        changes.append(moved(store, one.job, target, who, now_s, "its cell is drained"))
    return joined(changes), stays


def balanced(store: Store, living: Collection[str], now_s: float) -> Change:
    """Return the change that moves one job where a cell has far too much. To be called within ``update``."""
    cells = [one.cell for one in store.all(CELLS) if one.cell in living and not one.drained]
    active = [one for one in store.all(JOB_CELLS) if one.over_s is None]
    if any(one.by == "balance" and now_s - one.since_s < REST_S for one in active):
        return Change()  # its nodes are on their way
    young = {one.job for one in active if now_s - one.since_s < REST_S}
    found = next_move(
        {one.job: one.nodes for one in active}, {one.job: one.cell for one in active}, cells, held_jobs(store) | young
    )
    if found is None:
        return Change()
    return moved(store, found.job, found.target, "balance", now_s, f"cell {found.source} has far more than its share")


def joined(changes: Iterable[Change]) -> Change:
    """Return the changes of cells as one."""
    kept = tuple(changes)
    return Change(
        cells=tuple(one for change in kept for one in change.cells),
        job_cells=tuple(one for change in kept for one in change.job_cells),
        audit=tuple(one for change in kept for one in change.audit),
    )


LOOK_S = 0.5  # how often what other cells wrote is looked for
DELIVERING_LOOK_S = 0.25  # by the cell that delivers what all ask for
ASKED_S = 2.0  # how often it is looked for what is asked of agents, which is in no trail of changes
ALONE_LOOK_S = 2.0  # how often it is looked for another cell, while there is none
PASS_S = 2.0  # how often jobs that are new are given to a cell, and nodes sent to theirs
STATUS_S = 10.0  # how often each cell says how it is
SILENT_S = 35.0  # a cell that said nothing for so long has no leader
NAMED_S = 120.0  # how long an agent's report of its job is used
GONE_S = 600.0  # a job that only agents speak of is over once none did for so long
KEPT_S = 3 * 86_400.0  # how long it is remembered whose a job was that is over
CHANGES_MAX = 2_000  # beyond this many at once, everything is reread
GREW_RATIO = 1.1  # of a job's nodes: beyond it the new number is written
RETIRED_MAX = 1_000

_log = logging.getLogger(__name__)


class _Declared(NamedTuple):
    """A job on record: its state, and its nodes."""

    state: str
    nodes: frozenset[str]


class _News(NamedTuple):
    """What other servers wrote: records by key, None for one that is gone."""

    jobs: dict[str, Job | None]
    job_cells: dict[str, JobCell | None]
    cells: dict[str, CellStatus | None]
    nodes: list[str]


class Cells:
    """The cells as this one knows them. Changed on the event loop; ``mine`` and the counts from any thread.

    When other servers have written something, who listens to the store is told.
    """

    def __init__(
        self, own: str, store: SqlStore, leadership: Leadership, clock: Clock, fleet: Fleet, watcher: Watcher
    ) -> None:
        self.own = own
        self.several = False
        # Nodes that report here and belong to another cell, with the URL of its leader, "" while it has none. Each is
        # told once in PASS_S and taken else, so that none is refused by two cells for long.
        self.elsewhere: dict[str, str] = {}
        self._leadership = leadership
        self._store = store
        self._clock = clock
        self._fleet = fleet
        self._watcher = watcher
        self._problem: Callable[[], str] = lambda: ""
        self._sequence = -1
        self._newest = -1  # of the records' changes, as others have read it, at ``_newest_s``
        self._newest_s = self._looked_s = -math.inf
        self._woken = asyncio.Event()
        self._cell_of: dict[str, JobCell] = {}
        self._cells: dict[str, CellStatus] = {}
        self._said_s: dict[str, float] = {}  # when each other cell last said something, by the monotonic clock
        self._declared: dict[str, _Declared] = {}
        self._named_s: dict[str, float] = {}  # when an agent here last named the job
        self._passed_s = self._told_s = self._waked_s = -math.inf
        self._began_s = clock.monotonic_s()

    def begin(self, problem: Callable[[], str]) -> None:
        """Read everything, before anything is judged; ``problem()`` says why this server cannot judge, "" if it can.

        Raises StoreUnavailable.
        """
        self._problem = problem
        self.read()

    # JobShare

    def mine(self, job: str) -> bool:
        """Return whether this cell judges the job, as far as is known."""
        return self.cell_of(job) == self.own

    def still_mine(self, store: Store, job: str) -> bool:
        """Return whether this cell judges the job by the records; to be asked within the transaction that judges."""
        found = store.get(JOB_CELLS, job)
        return (DEFAULT_CELL if found is None else found.cell) == self.own

    def cell_of(self, job: str) -> str:
        """Return the cell that judges the job."""
        found = self._cell_of.get(job)
        return DEFAULT_CELL if found is None else found.cell

    def other_cell_of(self, job: str) -> str:
        """Return the other cell that judges the job, "" if this one does or nobody was given it."""
        found = self._cell_of.get(job)
        return "" if found is None or found.cell == self.own or found.over_s is not None else found.cell

    # The other cells

    @property
    def is_default(self) -> bool:
        """Whether this cell also does what is the whole site's: it delivers, and judges nodes without a job."""
        return self.own == DEFAULT_CELL

    def living(self) -> dict[str, CellStatus]:
        """Return the cells with a leader, as each last said it is; of this one what it said itself."""
        since_s = self._clock.monotonic_s() - SILENT_S
        return {
            name: one for name, one in self._cells.items() if name == self.own or self._said_s.get(name, 0.0) >= since_s
        }

    def all(self) -> dict[str, CellStatus]:
        """Return all cells as they last said they are."""
        return dict(self._cells)

    def silent_s(self, cell: str) -> float:
        """Return for how long the cell has said nothing; 0.0 of this one."""
        return 0.0 if cell == self.own else self._clock.monotonic_s() - self._said_s.get(cell, -math.inf)

    def nodes_of_others(self) -> int:
        """Return how many vouched nodes the other cells hear."""
        return sum(one.nodes for name, one in self.living().items() if name != self.own)

    def jobs_of(self, cell: str) -> int:
        """Return how many jobs are the cell's that are not over, of those that were given to one."""
        return sum(one.cell == cell and one.over_s is None for one in tuple(self._cell_of.values()))

    def agents_due(self) -> bool:
        """Return whether agents should be heard here: not where all jobs are other cells'."""
        return not self.several or self.jobs_of(self.own) > 0

    def hears(self, node: str) -> bool:
        """Return whether the node reports to this cell."""
        return self._fleet.last(node) is not None

    def url_of(self, cell: str) -> str:
        """Return the URL of the cell's leader, "" where it has none."""
        found = self.living().get(cell)
        return "" if found is None else found.url

    def problem(self) -> str | None:
        """Return what is wrong with other cells, "ok" if nothing, None where there is only one. From any thread."""
        if not self.several:
            return None
        said = []
        for name, one in sorted(self._cells.items()):
            if name == self.own:
                continue
            if self.silent_s(name) > SILENT_S:
                jobs = self.jobs_of(name)
                if jobs:
                    said.append(f"cell {name} has no leader: its {jobs} jobs are not judged")
            elif one.problem:
                said.append(f"cell {name}: {one.problem}")
        return "; ".join(said) or "ok"

    # Reading what others wrote

    def read(self) -> None:
        """Read everything anew. Raises StoreUnavailable."""
        # Before the records: what changes meanwhile is read a second time.
        sequence = self._store.change_range()[1]
        cells = {one.cell: one for one in self._store.all(CELLS)}
        job_cells = {one.job: one for one in self._store.all(JOB_CELLS)}
        declared = {job.job: _declared(job) for job in self._store.all(JOBS)}
        now_s, wall_s = self._clock.monotonic_s(), self._clock.now_s()
        for name, one in cells.items():
            if name not in self._said_s:  # only here two servers' clocks count
                self._said_s[name] = now_s - max(0.0, wall_s - one.updated_s)
            elif one != self._cells.get(name):
                self._said_s[name] = now_s
        self._sequence, self._cells, self._cell_of, self._declared = sequence, cells, job_cells, declared
        self.several = any(name != self.own for name in cells)

    async def run(self) -> None:
        """Follow the other cells until cancelled."""
        well, told = True, False
        while True:
            try:
                if not told:
                    await asyncio.to_thread(self._say)
                    told = True
                await self._follow()
                well = True
            except StoreUnavailable as error:
                self._looked_s = self._clock.monotonic_s()
                if well:
                    _log.warning("the other cells are not followed while the records cannot be used: %s", error)
                well = False
            await self._until_due()

    def note_newest(self, sequence: int, asked_s: float) -> None:
        """Take which change of the records was the newest when somebody asked. On the event loop."""
        self._newest, self._newest_s = sequence, asked_s
        if self.several and sequence != self._sequence:
            self._woken.set()

    async def _until_due(self) -> None:
        """Return when others may have written something: it was read that they did, or nobody has asked for a while."""
        if not self.several:
            await asyncio.sleep(ALONE_LOOK_S)
            return
        look_s = DELIVERING_LOOK_S if self.is_default else LOOK_S
        self._woken.clear()
        left_s = self._looked_s + look_s - self._clock.monotonic_s()
        due = asyncio.get_running_loop().call_later(max(left_s, 0.0), self._woken.set)
        try:
            await self._woken.wait()
        finally:
            due.cancel()

    async def _follow(self) -> None:
        if self.several:
            await self.catch_up()
        elif await asyncio.to_thread(lambda: any(one.cell != self.own for one in self._store.all(CELLS))):
            await asyncio.to_thread(self.read)
            await asyncio.to_thread(self._say)
            said = {"cells": sorted(self._cells)}
            _log.warning("there is another cell: jobs are spread over them", extra=said)

    async def catch_up(self) -> None:
        """Take in what others wrote; give new jobs to cells, send nodes to theirs, and say how this one is."""
        news = await self._read_news()
        if news is not None:
            self._take(news)
        now_s = self._clock.monotonic_s()
        if news is not None or now_s - self._waked_s >= ASKED_S:
            self._waked_s = now_s
            self._store.call_listeners()
        if now_s - self._passed_s >= PASS_S:
            self._passed_s = now_s
            wanted, gone, grown = self._direct()
            if wanted or gone or grown:
                await asyncio.to_thread(self._give, wanted, gone, grown)
        if now_s - self._told_s >= STATUS_S:
            await asyncio.to_thread(self._say)
            if self.is_default:
                await asyncio.to_thread(
                    self._store.update, lambda store: balanced(store, self.living(), self._clock.now_s())
                )

    async def _read_news(self) -> _News | None:
        """Return what was written since the last time; None for nothing, as others may have read already."""
        if self._newest_s > self._looked_s and self._newest == self._sequence:
            self._looked_s = self._newest_s
            return None
        self._looked_s = self._clock.monotonic_s()
        return await asyncio.to_thread(self._news)

    def _news(self) -> _News | None:
        """Return what was written since the last time; None for nothing."""
        oldest, newest = self._store.change_range()
        if newest == self._sequence:
            return None
        changes = self._store.changes_since(self._sequence, CHANGES_MAX + 1)
        if oldest > self._sequence + 1 or newest < self._sequence or len(changes) > CHANGES_MAX:
            before = dict(self._cell_of)
            self.read()
            keys = {*before, *self._cell_of, *self._declared}
            return _News({job: self._store.get(JOBS, job) for job in keys}, dict(self._cell_of), {}, [])
        self._sequence = changes[-1].sequence if changes else newest
        keys_of: dict[str, dict[str, None]] = {}
        for change in changes:
            keys_of.setdefault(change.kind, {})[change.key] = None
        moved = keys_of.get(JOB_CELLS.name, {})
        return _News(
            {job: self._store.get(JOBS, job) for job in {**keys_of.get(JOBS.name, {}), **moved}},
            {job: self._store.get(JOB_CELLS, job) for job in moved},
            {cell: self._store.get(CELLS, cell) for cell in keys_of.get(CELLS.name, {})},
            [node for node in keys_of.get(NODES.name, {}) if not self._fleet.is_known(node)],
        )

    def _take(self, news: _News) -> None:
        for node in news.nodes:
            self._fleet.know(node)
        for cell, status in news.cells.items():
            if status is not None:
                self._cells[cell], self._said_s[cell] = status, self._clock.monotonic_s()
        came = [job for job, entry in news.job_cells.items() if self._take_entry(job, entry)]
        for job, record in news.jobs.items():
            if record is None:
                self._declared.pop(job, None)
            else:
                self._declared[job] = _declared(record)
                self._watcher.observe_job(record)
        for job in came:
            self._watcher.take_over(job)

    def _take_entry(self, job: str, entry: JobCell | None) -> bool:
        """Note whose the job is now; return whether it came to this cell."""
        was = self.mine(job)
        if entry is None:
            self._cell_of.pop(job, None)
        else:
            self._cell_of[job] = entry
        if was and not self.mine(job):
            self._watcher.give_up(job)
        return self.mine(job) and not was

    # Giving jobs to cells, and sending nodes to theirs

    def _direct(self) -> tuple[dict[str, list[str]], list[str], dict[str, int]]:
        """Send nodes to their cells; return the jobs to give to one with their nodes, those gone, and those grown."""
        now_s = self._clock.monotonic_s()
        mine = {job: one for job, one in self._cell_of.items() if one.cell == self.own and one.over_s is None}
        named: dict[str, list[str]] = {job: [] for job in mine}
        others: dict[str, set[str]] = {}  # the jobs of the nodes that have another than this cell's
        for voice in self._fleet.voices(self._clock.now_s() - NAMED_S):
            ranks = voice.ranks
            job = ranks[0].job if ranks else voice.job
            if job is None:
                continue
            if job in mine and (not ranks or ranks[-1].job == job):  # nearly all, where most jobs are this cell's
                named[job].append(voice.node)
                continue
            for one in {job, ranks[-1].job} if ranks else {job}:
                named.setdefault(one, []).append(voice.node)
                others.setdefault(voice.node, set()).add(one)
        self._named_s.update((job, now_s) for job, nodes in named.items() if nodes)
        self._send_away(mine, named, others)
        for job in named.keys() - mine.keys():
            if job in self._cell_of and not self.mine(job):
                self._watcher.give_up(job)
        wanted = {job: nodes for job, nodes in named.items() if nodes and self._is_new(job)}
        if self.is_default:
            held = (job for job, one in self._declared.items() if one.state in HELD_STATES and one.nodes)
            wanted.update({job: sorted(self._declared[job].nodes) for job in held if self._is_new(job)})
        gone = [job for job in mine if self._is_gone(job, now_s)]
        sizes = {job: max(len(named[job]), len(self._nodes_on_record(job))) for job in mine.keys() - set(gone)}
        return wanted, gone, {job: size for job, size in sizes.items() if size > GREW_RATIO * mine[job].nodes}

    def _send_away(
        self, mine: Mapping[str, JobCell], named: Mapping[str, list[str]], others: dict[str, set[str]]
    ) -> None:
        """Send on the nodes that have jobs of other cells, and none of this one."""
        for job, one in self._declared.items():
            if one.state in HELD_STATES and job not in mine and job in self._cell_of:
                for node in one.nodes:
                    others.setdefault(node, set()).add(job)
        stays: set[str] = set()
        if others:
            stays.update(*(named[job] for job in mine), *(self._nodes_on_record(job) for job in mine))
        self.elsewhere.clear()
        for node, jobs in others.items():
            cells = [self._cell_of[job].cell for job in jobs if job in self._cell_of]
            if cells and node not in stays:
                self.elsewhere[node] = self.url_of(max(sorted(set(cells)), key=cells.count))
        self._fleet.leave(self.elsewhere)

    def _is_new(self, job: str) -> bool:
        found = self._cell_of.get(job)
        return found is None or (found.over_s is not None and not self._is_over(job))

    def _is_over(self, job: str) -> bool:
        found = self._declared.get(job)
        return found is not None and found.state in OVER_JOB_STATES

    def _is_gone(self, job: str, now_s: float) -> bool:
        """Return whether a job of this cell is over, or nothing speaks of it any more."""
        if job in self._declared:
            return self._is_over(job)
        return now_s - max(self._named_s.get(job, -math.inf), self._began_s) > GONE_S

    def _nodes_on_record(self, job: str) -> frozenset[str]:
        found = self._declared.get(job)
        return frozenset() if found is None else found.nodes

    def _near(self, nodes: Iterable[str]) -> list[str]:
        """Return the cells of the jobs on record that run on these nodes, one for each node."""
        wanted = set(nodes)
        return [
            self._cell_of[job].cell
            for job, one in tuple(self._declared.items())
            if job in self._cell_of and one.state in HELD_STATES
            for _ in one.nodes & wanted
        ]

    def _give(self, wanted: Mapping[str, list[str]], gone: list[str], grown: Mapping[str, int]) -> None:
        """Write which cells judge jobs that are new, and which of this cell's are over or have grown."""

        def work(store: Store) -> Change:
            now_s = self._clock.now_s()
            known = {one.job: one for one in store.all(JOB_CELLS)}
            load = dict.fromkeys(self._taking_jobs(), 0)
            for one in known.values():
                if one.over_s is None and one.cell in load:
                    load[one.cell] += one.nodes
            made: dict[str, JobCell] = {}
            for job, nodes in sorted(wanted.items()):
                before = known.get(job)
                if before is not None and before.over_s is None:
                    continue  # another server was first
                near = self._near(nodes)
                cell = before.cell if before is not None and before.cell in load else choose(load, self.own, near)
                made[job] = JobCell(job=job, cell=cell, nodes=len(nodes), since_s=now_s, by="server")
                load[cell] += len(nodes)
            entries = tuple(
                AuditEntry(time_s=now_s, who="server", verb="assign", subject=one.job, detail=f"cell {one.cell}")
                for one in made.values()
            )
            for job in gone:
                if job in known and known[job].cell == self.own:
                    made[job] = replace(known[job], over_s=now_s)
            for job, size in grown.items():
                if job in known and known[job].cell == self.own:
                    made[job] = replace(known[job], nodes=size)
            return Change(job_cells=tuple(made.values()), audit=entries)

        self._store.update(work)

    def _taking_jobs(self) -> set[str]:
        """Return the cells that new jobs are given to: those that live, and are not drained unless all are."""
        living = {self.own: self._cells.get(self.own), **self.living()}
        return {name for name, one in living.items() if one is None or not one.drained} or {*living}

    def _say(self) -> None:
        """Write how this cell is. Raises StoreUnavailable."""
        self._told_s = self._clock.monotonic_s()

        def said(store: Store) -> Change:
            before = store.get(CELLS, self.own)
            return Change(cells=(replace(status, drained=before is not None and before.drained),))

        status = CellStatus(
            cell=self.own,
            url=self._leadership.url,
            epoch=self._leadership.epoch,
            nodes=self._fleet.vouched_count,
            jobs=self.jobs_of(self.own),
            problem=self._problem()[:500],
            updated_s=self._clock.now_s(),
        )
        (self._cells[self.own],) = self._store.update(said).cells
        if self.several:
            self._store.retire(JOB_CELLS, "over_s", self._clock.now_s() - KEPT_S, RETIRED_MAX)


def _declared(job: Job) -> _Declared:
    return _Declared(job.state, frozenset([*job.nodes, *(rank.node for rank in job.ranks)]))
