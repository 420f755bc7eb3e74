"""/api/v1/jobs: jobs as schedulers and launchers report them, and their progress."""

from __future__ import annotations

import asyncio
from typing import Annotated, Protocol

from fastapi import APIRouter, Depends, Query, Response
from msgspec.structs import replace

from eagle_eye.schema.action import JobUpdate, MemberRank, PaceLeft
from eagle_eye.schema.frame import KEYS_MAX
from eagle_eye.schema.names import NAME_CHARS_MAX, is_name
from eagle_eye.server.api import views
from eagle_eye.server.api.constraints import NAME, NAME_OR_NONE, Constraint
from eagle_eye.server.api.filter_values import ListedJobState
from eagle_eye.server.api.requests import (
    Body,
    Cell,
    Cursor,
    Limit,
    Operator,
    Reader,
    Search,
    answer,
    audited,
    body_of,
    decoded,
    given,
    missing,
    services,
)
from eagle_eye.server.api.undeclared_jobs import ENDED, OBSERVED, ended, observed, undeclared_job
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.jobs.reconcile import declared_job
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.monitor.cells import Cells
from eagle_eye.server.monitor.watcher import Outlook, Watcher
from eagle_eye.server.store.settings import DEFAULT_CELL
from eagle_eye.server.store.store import JOBS, OVER_JOB_STATES, PAGE_LIMIT_MAX, Change, Store

STATES = ("running", "completing", "cancelled", "preempted", "timeout", "maintenance", "failed", "finished")
RANKS_MAX = 200_000
COUNT_MAX = (1 << 31) - 1  # of an attempt, of a rank
SIGNAL_MAX = 64  # Linux's last real-time signal
EXIT_CODE_MAX = 255

_COUNT = {"minimum": 0, "maximum": COUNT_MAX}
_RANK = {
    "rank": _COUNT,
    "node": NAME,
    "device": {"minimum": -1, "maximum": KEYS_MAX - 1},
    "role": NAME_OR_NONE,
}
_EXIT_CODE = {"minimum": -SIGNAL_MAX, "maximum": EXIT_CODE_MAX}
_UPDATE: dict[str, Constraint] = {
    "attempt": _COUNT,
    "state": {"enum": [*STATES]},
    "ranks": {"maxItems": RANKS_MAX, "items": {"properties": _RANK}},
    "restart_owner": NAME_OR_NONE,
    "owner": NAME_OR_NONE,
    "held_up_by": {"items": _COUNT},
    "pace_left_ratio": {"minimum": 0.0, "maximum": 1.0},
    "exits": {"items": {"properties": {"rank": _COUNT, "exit_code": _EXIT_CODE}}},
}
_PACE_LEFT: dict[str, Constraint] = {"pace_left_ratio": _UPDATE["pace_left_ratio"]}

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"])


class Needs(Protocol):
    """The server's components that this module uses."""

    cells: Cells | None
    clock: Clock
    fleet: Fleet
    outlook: Outlook
    store: Store
    watcher: Watcher


Parts = Annotated[Needs, Depends(services)]


@router.get("")
def list_jobs(
    parts: Parts,
    _: Reader,
    state: ListedJobState | None = None,
    node: str | None = None,
    search: Search = "",
    cell: Cell = None,
    members: Annotated[bool, Query(description="Without, ``ranks`` and ``nodes`` are left empty.")] = True,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Response:
    """Jobs, newest first. Those that only agents speak of have state "observed" and stand on the first page.

    So do the newest of which they spoke, with state "ended": nobody said how these ended.
    """
    page = parts.store.page(JOBS, given(state=state, node=node, cell=cell), cursor, limit, search)
    records = page.items
    if cursor is None and state in (None, OBSERVED, ENDED):
        by_agents = [
            job
            for job in [*observed(parts), *ended(parts)]
            if state in (None, job.state)
            and cell in (None, DEFAULT_CELL if parts.cells is None else parts.cells.cell_of(job.job))
            and (node is None or node in job.nodes or any(r.node == node for r in job.ranks))
            and search.lower() in job.job.lower()
        ]
        records = by_agents[:PAGE_LIMIT_MAX] + records
    items = [views.job(record, parts.outlook, members=members) for record in records]
    return answer({"items": items, "next": page.next})


@router.get("/{job:name}")
def get_job(parts: Parts, _: Reader, job: str) -> Response:
    """One job."""
    record = parts.store.get(JOBS, job) or undeclared_job(parts, job)
    if record is None:
        raise missing("jobs", job)
    return answer(views.job(record, parts.outlook))


@router.put("/{job:name}", openapi_extra=body_of(JobUpdate, _UPDATE))
async def put_job(parts: Parts, principal: Operator, job: str, body: Body) -> Response:
    """Take the membership, attempt and state of a job from its launcher. 409 for an old attempt.

    Its state stays another where the job's scheduler says that it was stopped.
    """
    update = decoded(body, JobUpdate)
    _check(job, update)
    now_s = parts.clock.now_s()

    def put(store: Store) -> Change:
        known = store.get(JOBS, job)
        if known is not None and update.attempt < known.attempt and known.state not in OVER_JOB_STATES:
            raise Refusal(409, "attempt", f"job {job} is at attempt {known.attempt}; {update.attempt} is an old one")
        record = declared_job(job, update, known, now_s)
        same_story = known is not None and (known.attempt, known.state) == (record.attempt, record.state)
        detail = f"attempt {record.attempt} {record.state}, {len(record.ranks)} ranks"
        # A launcher repeats itself; the audit trail has only changes.
        entries = () if same_story else (audited(parts, principal, "job", job, detail),)
        return Change(jobs=(record,), audit=entries)

    (record,) = (await asyncio.to_thread(parts.store.update, put)).jobs
    # On the event loop, as the watcher requires, and only once it is durable.
    parts.watcher.observe_job(record)
    return answer(views.job(record, parts.outlook))


@router.put("/{job:name}/pace-left", openapi_extra=body_of(PaceLeft, _PACE_LEFT))
async def put_pace_left(parts: Parts, _: Operator, job: str, body: Body) -> Response:
    """Take what is left of a job's pace without one of its nodes, from whoever restarts it by a plan.

    It holds until it is reported anew, or the job's launcher declares the job.
    """
    reported = decoded(body, PaceLeft)
    _check_pace_left(reported.pace_left_ratio)

    def put(store: Store) -> Change:
        known = store.get(JOBS, job)
        if known is None:
            raise missing("jobs", job)
        return Change(jobs=(replace(known, pace_left_ratio=reported.pace_left_ratio),))

    (record,) = (await asyncio.to_thread(parts.store.update, put)).jobs
    parts.watcher.observe_job(record)
    return answer(views.job(record, parts.outlook))


def _check(job: str, update: JobUpdate) -> None:
    if not is_name(job):
        raise Refusal(400, "job", f"a job's name has 1 to {NAME_CHARS_MAX} printable characters")
    if update.state not in STATES:
        raise Refusal(400, "state", f"state {update.state[:80]!r} is unknown; expected one of {', '.join(STATES)}")
    for field, text in (("owner", update.owner), ("restart_owner", update.restart_owner)):
        if text and not is_name(text):
            raise Refusal(400, field, f"{field}: expected at most {NAME_CHARS_MAX} printable characters, or none")
    if not 0 <= update.attempt <= COUNT_MAX:
        raise Refusal(400, "attempt", f"attempt is {update.attempt}; expected 0 to {COUNT_MAX}")
    _check_ranks(update.ranks)
    members = {rank.rank for rank in update.ranks}
    if unknown := set(update.held_up_by) - members:
        raise Refusal(400, "held_up_by", f"held_up_by names rank {min(unknown)}, which is not among the ranks")
    if unknown := {one.rank for one in update.exits} - members:
        raise Refusal(400, "exits", f"exits names rank {min(unknown)}, which is not among the ranks")
    if wrong := [one.exit_code for one in update.exits if not -SIGNAL_MAX <= one.exit_code <= EXIT_CODE_MAX]:
        expected = f"expected -{SIGNAL_MAX} to {EXIT_CODE_MAX}, negative for a signal"
        raise Refusal(400, "exits", f"exits has exit code {wrong[0]}; {expected}")
    _check_pace_left(update.pace_left_ratio)


def _check_pace_left(ratio: float | None) -> None:
    if ratio is not None and not 0 <= ratio <= 1:
        raise Refusal(400, "pace_left_ratio", f"pace_left_ratio is {ratio:g}; expected 0 to 1")


def _check_ranks(ranks: list[MemberRank]) -> None:
    """Raise Refusal unless names of ranks follow the rules for frames: they reach pages and orchestrators."""
    if len(ranks) > RANKS_MAX:
        raise Refusal(413, "oversized", f"{len(ranks)} ranks; at most {RANKS_MAX}")
    for node in {rank.node for rank in ranks}:
        if not is_name(node):
            raise Refusal(400, "ranks", f"node {node[:80]!r}: expected 1 to {NAME_CHARS_MAX} printable characters")
    for role in {rank.role for rank in ranks}:
        if role and not is_name(role):
            raise Refusal(400, "ranks", f"role {role[:80]!r}: expected at most {NAME_CHARS_MAX} printable characters")
    for rank in ranks:
        if not (0 <= rank.rank <= COUNT_MAX and -1 <= rank.device < KEYS_MAX):
            detail = f"rank {rank.rank} on device {rank.device}; expected 0 to {COUNT_MAX} on -1 to {KEYS_MAX - 1}"
            raise Refusal(400, "ranks", detail)
