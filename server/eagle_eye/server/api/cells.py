"""/api/v1/cells: the cells of the site, and which of them judges which job."""

from __future__ import annotations

from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Query, Response
from msgspec.structs import replace

from eagle_eye.server.api.requests import Operator, Reader, answer, audited, services
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.model.records import CellStatus
from eagle_eye.server.model.timestamps import rfc3339
from eagle_eye.server.monitor.cells import Cells, drained, moved, why_held
from eagle_eye.server.store.settings import DEFAULT_CELL
from eagle_eye.server.store.store import CELLS, JOB_CELLS, JOBS, Change, Store

router = APIRouter(prefix="/api/v1/cells", tags=["cells"])
Force = Annotated[bool, Query(description="Whatever is open of the job.")]


class Needs(Protocol):
    """The server's components that this module uses."""

    cells: Cells | None
    clock: Clock
    config: ServerConfig
    fleet: Fleet
    store: Store


Parts = Annotated[Needs, Depends(services)]


@router.get("")
def list_cells(parts: Parts, _: Reader) -> Response:
    """The cells, by name, as their leaders last said they are; a site without others has the one called "default".

    ``leads``: the cell has a leader, which said something within half a minute; else its jobs are not judged.
    ``nodes`` are those heard that somebody vouches for, ``jobs`` those given to the cell that are not over. A cell that
    is ``drained`` gets no new jobs.
    """
    cells = parts.cells
    if cells is None:
        alone = CellStatus(
            cell=DEFAULT_CELL,
            url=parts.config.public_url,
            epoch=0,
            nodes=parts.fleet.vouched_count,
            jobs=len(parts.fleet.jobs()),
            problem="",
            updated_s=parts.clock.now_s(),
        )
        return answer({"items": [_view(alone, leads=True)]})
    known = sorted(parts.store.all(CELLS), key=lambda one: one.cell)
    living = cells.living()
    return answer({"items": [_view(one, leads=one.cell in living) for one in known]})


@router.post("/{cell}/jobs/{job:name}")
def move(parts: Parts, principal: Operator, cell: str, job: str, force: Force = False) -> Response:
    """Have the cell judge the job from now on; the job's agents go there by themselves.

    409 while an incident or an action of the job is open (``force``: then, too), or where the cell has no leader.
    """
    cells = _known(parts, cell)
    if cell not in cells.living():
        raise Refusal(409, "no_leader", f"cell {cell} has no leader: start a server of it first")
    agents = job in parts.fleet.jobs()

    def change(store: Store) -> Change:
        if not (agents or store.get(JOBS, job) or store.get(JOB_CELLS, job)):
            raise Refusal(404, "not_found", f"none of the jobs is called {job[:200]!r}; GET /api/v1/jobs lists them")
        held = "" if force else why_held(store, job)
        if held:
            raise Refusal(409, "busy", f"{held}: move {job} once that is over, or with force=true")
        return moved(store, job, cell, principal.who, parts.clock.now_s())

    parts.store.update(change)
    return answer({"job": job, "cell": cell})


@router.post("/{cell}/drain")
def drain(parts: Parts, principal: Operator, cell: str) -> Response:
    """Give the cell no new jobs, and have others judge those that it has.

    ``stays`` are the jobs of which something is open: drain again once that is over.
    """
    cells = _known(parts, cell)
    stays: list[str] = []

    def change(store: Store) -> Change:
        found, stays[:] = drained(store, cell, cells.living(), principal.who, parts.clock.now_s())
        entry = audited(parts, principal, "drain", f"cell {cell}")
        return Change(cells=found.cells, job_cells=found.job_cells, audit=(*found.audit, entry))

    done = parts.store.update(change)
    return answer({"cell": cell, "moved": [one.job for one in done.job_cells], "stays": stays})


@router.post("/{cell}/fill")
def fill(parts: Parts, principal: Operator, cell: str) -> Response:
    """Give the cell new jobs again, after it was drained."""
    _known(parts, cell)

    def change(store: Store) -> Change:
        status = store.get(CELLS, cell)
        if status is None or not status.drained:
            return Change()
        entry = audited(parts, principal, "fill", f"cell {cell}")
        return Change(cells=(replace(status, drained=False),), audit=(entry,))

    parts.store.update(change)
    return answer({"cell": cell, "moved": [], "stays": []})


def _known(parts: Needs, cell: str) -> Cells:
    cells = parts.cells
    if cells is None or parts.store.get(CELLS, cell) is None:
        raise Refusal(404, "not_found", f"none of the cells is called {cell[:200]!r}; GET /api/v1/cells lists them")
    return cells


def _view(status: CellStatus, *, leads: bool) -> dict[str, Any]:
    return {
        "cell": status.cell,
        "url": status.url,
        "epoch": status.epoch,
        "leads": leads,
        "nodes": status.nodes,
        "jobs": status.jobs,
        "drained": status.drained,
        "problem": status.problem,
        "updated": rfc3339(status.updated_s),
    }
