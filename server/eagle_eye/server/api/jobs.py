"""/api/v1/jobs: jobs as schedulers and launchers report them or agents observe them; their progress, in charts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

from fastapi import APIRouter, Depends, Query, Response
from msgspec.structs import replace

from eagle_eye.schema.action import JobUpdate, MemberRank, PaceLeft
from eagle_eye.schema.frame import KEYS_MAX
from eagle_eye.schema.metrics import BY_NAME as METRICS
from eagle_eye.schema.names import NAME_CHARS_MAX, is_name, natural_order
from eagle_eye.server.accounts.archive import Archive
from eagle_eye.server.accounts.goodput import TimelineSpan, clipped
from eagle_eye.server.api import views
from eagle_eye.server.api.filter_values import ListedJobState
from eagle_eye.server.api.incidents import numbers, resolutions
from eagle_eye.server.api.metric_history import moments
from eagle_eye.server.api.requests import (
    NAME,
    NAME_OR_NONE,
    Body,
    Cell,
    Constraint,
    Cursor,
    Limit,
    Operator,
    Reader,
    Search,
    Since,
    answer,
    audited,
    body_of,
    decoded,
    given,
    missing,
    services,
)
from eagle_eye.server.charts import plots
from eagle_eye.server.charts.plots import LENGTH_S_MAX, POINTS, POINTS_MAX, picked, stretch
from eagle_eye.server.charts.reading import ReadValues, Turns, members_of, read
from eagle_eye.server.history.history import History, Statistic
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.jobs.reconcile import declared_job
from eagle_eye.server.model.clock import Clock, rfc3339
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.model.records import Action, Attempt, Incident, Job
from eagle_eye.server.monitor.cells import Cells
from eagle_eye.server.monitor.watcher import JobProgress, Outlook, Watcher
from eagle_eye.server.store.settings import DEFAULT_CELL
from eagle_eye.server.store.store import (
    ACTIONS,
    ATTEMPTS,
    INCIDENTS,
    JOBS,
    MEMBERSHIPS,
    OVER_JOB_STATES,
    PAGE_LIMIT_MAX,
    Change,
    Store,
)

# Jobs that no launcher or scheduler declares: those of which agents speak, and those of which they spoke.

OBSERVED = "observed"  # agents report the job
ENDED = "ended"  # none does any more: whether it finished or failed, nobody said
AGENTS = "agents"  # the source of such a job
ENDED_MAX = 200  # listed, the newest; each stays for as long as the accounts keep its attempt


class UndeclaredJobNeeds(Protocol):
    """The server's components that finding undeclared jobs uses."""

    clock: Clock
    fleet: Fleet
    outlook: Outlook
    store: Store


def observed(parts: UndeclaredJobNeeds) -> list[Job]:
    """Return the jobs of which agents speak, by name."""
    now_s = parts.clock.now_s()
    return [
        _job(name, attempt, OBSERVED, now_s, ranks=sorted(ranks, key=lambda rank: rank.rank))
        for name, (attempt, ranks) in sorted(parts.fleet.jobs().items())
        if parts.store.get(JOBS, name) is None
    ]


def ended(parts: UndeclaredJobNeeds) -> list[Job]:
    """Return the newest jobs of which agents spoke and speak no more, the last that began first."""
    newest: dict[str, Attempt] = {}
    for attempt in parts.store.page(ATTEMPTS, {}, limit=PAGE_LIMIT_MAX).items:
        newest.setdefault(attempt.job, attempt)
    found = dict(_known(parts, newest))
    return list(found.values())[:ENDED_MAX]


def undeclared_job(parts: UndeclaredJobNeeds, name: str) -> Job | None:
    """Return such a job by its name; None if no agent is known to have spoken of it."""
    if (job := next((job for job in observed(parts) if job.job == name), None)) is not None:
        return job
    attempts = parts.store.page(ATTEMPTS, {"job": name}, limit=1).items
    return dict(_known(parts, {attempt.job: attempt for attempt in attempts})).get(name)


def _known(parts: UndeclaredJobNeeds, newest: dict[str, Attempt]) -> Iterator[tuple[str, Job]]:
    """Yield the ended jobs of the detection loop, which are not on record for some seconds, and of the accounts."""
    spoken_of = parts.fleet.jobs()

    def is_over(name: str) -> bool:
        return name not in spoken_of and parts.store.get(JOBS, name) is None

    for course in parts.outlook.courses():
        attempt = newest.get(course.job)
        if (attempt is None or attempt.attempt < course.attempt) and is_over(course.job):
            yield course.job, _of_course(course)
    for name, attempt in newest.items():
        if is_over(name):
            yield name, _of_attempt(parts.store, attempt)


def _of_course(course: JobProgress) -> Job:
    last_s = course.progressed_s or course.started_s
    return _job(course.job, course.attempt, ENDED, last_s, nodes=list(course.nodes), owner=course.owner)


def _of_attempt(store: Store, attempt: Attempt) -> Job:
    last_s = attempt.seen_s if attempt.ended_s is None else attempt.ended_s
    members = store.get(MEMBERSHIPS, attempt.id)
    nodes = ([attempt.node] if attempt.node else []) if members is None else members.nodes
    return _job(attempt.job, attempt.attempt, ENDED, max(last_s, attempt.last_step_s or 0.0), nodes=nodes)


def _job(
    name: str,
    attempt: int,
    state: str,
    time_s: float,
    ranks: list[MemberRank] | None = None,
    nodes: list[str] | None = None,
    owner: str = "",
) -> Job:
    over = state == ENDED
    return Job(
        job=name,
        attempt=attempt,
        state=state,
        ranks=ranks or [],
        nodes=nodes or [],
        restart_owner="",
        updated_s=time_s,
        since_s=time_s if over else None,
        source=AGENTS,
        said=f"no agent speaks of it since {rfc3339(time_s)}; nobody said how it ended" if over else "",
        owner=owner,
    )


# Jobs as they are declared, and the list of all.

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


class JobNeeds(Protocol):
    """The server's components that the endpoints of jobs use."""

    cells: Cells | None
    clock: Clock
    fleet: Fleet
    outlook: Outlook
    store: Store
    watcher: Watcher


JobParts = Annotated[JobNeeds, Depends(services)]


@router.get("")
def list_jobs(
    parts: JobParts,
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
def get_job(parts: JobParts, _: Reader, job: str) -> Response:
    """One job."""
    record = parts.store.get(JOBS, job) or undeclared_job(parts, job)
    if record is None:
        raise missing("jobs", job)
    return answer(views.job(record, parts.outlook))


@router.put("/{job:name}", openapi_extra=body_of(JobUpdate, _UPDATE))
async def put_job(parts: JobParts, principal: Operator, job: str, body: Body) -> Response:
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
async def put_pace_left(parts: JobParts, _: Operator, job: str, body: Body) -> Response:
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


# A job's steps, loss, throughput and goodput, and its members over time.

SHOWN_S = 6 * 3_600.0  # of a job that runs for longer, unless since is given
LEAST_S = 300.0
BEFORE_S, AFTER_S = 30.0, 60.0  # around the run, so that its beginning and end are visible
NODES_MAX = 16  # nodes that are read: a synchronous job's steps are the same on all
FRAMES_MAX = 2_500  # for each of the metrics
ATTEMPTS_MAX = 200  # the newest
MARKS_MAX = 500  # incidents, and likewise actions: the newest
OptionalMoment = Annotated[
    Since, Query(description="RFC 3339, or Unix seconds; the present run by default, six hours of it at most.")
]


class JobChartNeeds(Protocol):
    """The server's components that the charts of jobs use."""

    archive: Archive
    clock: Clock
    fleet: Fleet
    history: History
    store: Store
    turns: Turns


JobChartParts = Annotated[JobChartNeeds, Depends(services)]


class _Past(NamedTuple):
    """The records of a job in a time range; ``cut`` says whether a limit left something out."""

    start_s: float
    end_s: float
    attempts: list[Attempt]
    incidents: list[Incident]
    actions: list[Action]
    cut: bool


@router.get("/{job:name}/course")
def get_course(
    parts: JobChartParts,
    _: Reader,
    job: str,
    since: OptionalMoment = None,
    until: OptionalMoment = None,
    points: Annotated[int, Query(ge=10, le=POINTS_MAX, description="About so many steps.")] = POINTS,
) -> Response:
    """Step time, loss, throughput and goodput of a job, and what happened to it in that time.

    All ``columns`` have one value for each step; null: not observed. ``parts`` is what the time was spent on,
    ``nodes_read`` says of how many of its nodes the columns are.
    """
    past = _past(parts, job, since, until)
    nodes = _nodes(parts, job, past)
    wanted = stretch(past.start_s, past.end_s, points)
    chosen = picked(nodes, NODES_MAX)
    with parts.turns.one():

        def of(metric: str, statistic: Statistic, nodes: Sequence[str]) -> ReadValues:
            return read(parts.history, METRICS[metric], statistic, ((), nodes), wanted, job, FRAMES_MAX)

        seconds = of("train_step_seconds", "mean", chosen)
        fitting = seconds.nodes or chosen  # how many fit is determined once
        loss, tokens = of("train_loss", "last", fitting), of("train_tokens_per_second", "mean", fitting)
    spans = clipped(parts.archive.jobs(job).jobs.get(job, []), past.start_s - plots.TRAILING_S, past.end_s)
    return answer(
        {
            "job": job,
            **_marks(past),
            "nodes": len(nodes),
            "nodes_read": len(seconds.nodes or chosen),
            "series": {
                "step_seconds": _spread(seconds),
                "loss": _spread(loss),
                "tokens_per_second": {
                    **_times(tokens),
                    "total": numbers(
                        plots.rank_total(tokens.series, tokens.stretch.steps, len(tokens.nodes), len(nodes))
                    ),
                },
                "goodput_ratio": {
                    "time": [round(time_s, 3) for time_s in wanted.times_s],
                    "step_seconds": wanted.step_s,
                    "trailing_seconds": plots.TRAILING_S,
                    "value": numbers(
                        plots.goodput_course(spans, [min(t + wanted.step_s, past.end_s) for t in wanted.times_s])
                    ),
                },
            },
            "parts": [_part(span) for span in plots.merged_spans(clipped(spans, past.start_s, past.end_s))],
            "resolutions": resolutions(seconds.spans),
        }
    )


@router.get("/{job:name}/timeline")
def get_timeline(
    parts: JobChartParts,
    _: Reader,
    job: str,
    since: OptionalMoment = None,
    until: OptionalMoment = None,
    rows: Annotated[
        int, Query(ge=8, le=plots.LANE_ROWS_MAX, description="At most so many rows.")
    ] = plots.LANE_ROWS_MAX,
) -> Response:
    """Which nodes took part in which attempt, with the incidents that concern them; neighbours share a row of many.

    ``unknown`` names the attempts of whose members nothing is on record (any more).
    """
    past = _past(parts, job, since, until)
    members = {a.id: m.nodes for a in past.attempts if (m := parts.store.get(MEMBERSHIPS, a.id)) is not None}
    newest = max((a.attempt for a in past.attempts), default=0)
    now_s = parts.clock.now_s()
    present = members_of(parts.store, parts.fleet, job, newest, now_s)
    found = plots.lane_rows(past.attempts, members, present.ranks, past.incidents, now_s, rows)
    return answer(
        {
            "job": job,
            **_marks(past),
            "rows": [
                {
                    "label": row.label,
                    "nodes": list(row.nodes),
                    "size": row.size,
                    "ranks": None if row.ranks is None else list(row.ranks),
                    "bars": [
                        {
                            "attempt_id": bar.attempt_id,
                            "attempt": bar.attempt,
                            "start": rfc3339(bar.start_s),
                            "end": rfc3339(bar.end_s),
                            "nodes": bar.nodes,
                        }
                        for bar in row.bars
                    ],
                    "incidents": list(row.incidents),
                }
                for row in found
            ],
            "nodes": sum(row.size for row in found),
            "unknown": [a.id for a in past.attempts if a.id not in members],
        }
    )


def _past(parts: JobChartNeeds, job: str, since: str | None, until: str | None) -> _Past:
    """Return the job's records in the requested range. Raises Refusal 404 for an unknown job."""
    store, now_s = parts.store, parts.clock.now_s()
    page = store.page(ATTEMPTS, {"job": job}, limit=ATTEMPTS_MAX)
    if not page.items and store.get(JOBS, job) is None and job not in parts.fleet.jobs():
        raise missing("jobs", job)
    newest = page.items[0] if page.items else None
    run = [a for a in page.items if newest is not None and a.run == newest.run]
    over_s = max((a.ended_s for a in run if a.ended_s is not None), default=now_s) if _over(run) else now_s
    end_s = min(now_s, over_s + AFTER_S)
    begun_s = min((a.started_s for a in run), default=end_s - LEAST_S)
    start_s = min(max(begun_s - BEFORE_S, end_s - SHOWN_S), end_s - LEAST_S)
    start_s, end_s = moments(since, until, (start_s, max(end_s, start_s + LEAST_S)))
    if not 0 < end_s - start_s <= LENGTH_S_MAX:
        raise Refusal(400, "time", f"{end_s - start_s:.0f} s; expected more than 0 and at most {LENGTH_S_MAX:.0f}")
    attempts = [a for a in page.items if a.started_s < end_s and (a.ended_s is None or a.ended_s > start_s)]
    incidents = store.page(INCIDENTS, {"job": job}, limit=PAGE_LIMIT_MAX)
    actions = store.page(ACTIONS, {"job": job}, limit=PAGE_LIMIT_MAX)
    reported = [i for i in incidents.items if i.onset_s < end_s and (i.ended_s is None or i.ended_s > start_s)]
    asked = [a for a in actions.items if start_s <= a.created_s <= end_s]
    cut = len(reported) > MARKS_MAX or len(asked) > MARKS_MAX or bool(incidents.next or actions.next or page.next)
    return _Past(start_s, end_s, attempts[::-1], reported[:MARKS_MAX], asked[:MARKS_MAX], cut)


def _over(run: list[Attempt]) -> bool:
    return bool(run) and all(attempt.ended_s is not None for attempt in run)


def _nodes(parts: JobChartNeeds, job: str, past: _Past) -> list[str]:
    """Return the known members of the attempts, in the order of their names."""
    names: set[str] = set()
    for attempt in past.attempts[-20:]:
        membership = parts.store.get(MEMBERSHIPS, attempt.id)
        names.update(membership.nodes if membership is not None else ())
    newest = past.attempts[-1].attempt if past.attempts else 0
    names.update(members_of(parts.store, parts.fleet, job, newest, past.end_s).nodes)
    return sorted(names, key=natural_order)


def _marks(past: _Past) -> dict[str, Any]:
    return {
        "start": rfc3339(past.start_s),
        "end": rfc3339(past.end_s),
        "attempts": [_attempt(attempt) for attempt in past.attempts],
        "incidents": [
            {
                "id": i.id,
                "fault": i.fault,
                "node": i.node,
                "nodes": i.nodes[:8],
                "attempt": i.attempt,
                "state": i.state,
                "onset": rfc3339(i.onset_s),
                "detected": rfc3339(i.detected_s),
                "ended": None if i.ended_s is None else rfc3339(i.ended_s),
                "summary": i.summary,
            }
            for i in past.incidents
        ],
        "actions": [
            {
                "id": a.id,
                "kind": a.kind,
                "state": a.state,
                "exclude": a.exclude[:8],
                "incident_id": a.incident_id,
                "created": rfc3339(a.created_s),
                "updated": rfc3339(a.updated_s),
            }
            for a in past.actions
        ],
        "cut": past.cut,
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        "id": attempt.id,
        "run": attempt.run,
        "attempt": attempt.attempt,
        "state": attempt.state,
        "started": rfc3339(attempt.started_s),
        "ended": None if attempt.ended_s is None else rfc3339(attempt.ended_s),
        "end": attempt.end,
        "nodes": attempt.nodes,
        "gpus": attempt.gpus,
        "first_step": attempt.first_step,
        "last_step": attempt.last_step,
        "step_seconds": attempt.step_s,
    }


def _times(found: ReadValues) -> dict[str, Any]:
    return {"time": [round(t, 3) for t in found.stretch.times_s], "step_seconds": found.stretch.step_s}


def _spread(found: ReadValues) -> dict[str, Any]:
    got = plots.rank_spread(found.series, found.stretch.steps)
    return {
        **_times(found),
        "low": numbers(got.low),
        "median": numbers(got.median),
        "high": numbers(got.high),
        "ranks_seen": [int(count) for count in got.seen],
        "not_finite": [int(count) for count in got.infinite],
    }


def _part(span: TimelineSpan) -> dict[str, Any]:
    return {
        "start": rfc3339(span.start_s),
        "end": rfc3339(span.end_s),
        "part": "slow" if span.part == "training" and span.slow_ratio > 0 else span.part,
        "fault": span.cause.fault if span.cause else "",
        "node": (span.cause.node or None) if span.cause else None,
        "incident_id": (span.cause.incident_id or None) if span.cause else None,
        "reason": span.reason,
    }
