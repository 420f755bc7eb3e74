"""Moves jobs from cell to cell: by hand, off a cell that is drained, and where one has far too much. Touches: store.

A move is one record, written in the site's one transaction at a time: the cell before writes no judgement of the job
after it, the next one none before. Agents go on their own; what the next cell sees begins with the move, as after a
takeover, so that a job stays where something of its is open.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from eagle_eye.server.engine.cell_choice import choose, next_move
from eagle_eye.server.engine.situation import UNDER_WAY_STATES
from eagle_eye.server.model.records import AuditEntry, JobCell
from eagle_eye.server.store.settings import DEFAULT_CELL
from eagle_eye.server.store.store import ACTIONS, CELLS, JOB_CELLS, JOBS, PAGE_LIMIT_MAX, Change, Store

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
