"""/api/v1/jobs/{job}/course and /timeline: a job's steps, loss, throughput, goodput, and members over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, Protocol

from fastapi import APIRouter, Depends, Query, Response

from eagle_eye.schema.metrics import BY_NAME as METRICS
from eagle_eye.schema.natural_order import natural
from eagle_eye.server.accounts.archive import Archive
from eagle_eye.server.accounts.goodput import clipped
from eagle_eye.server.accounts.timeline import TimelineSpan
from eagle_eye.server.api.history import moments
from eagle_eye.server.api.incident_charts import numbers, resolutions
from eagle_eye.server.api.requests import Reader, Since, answer, missing, services
from eagle_eye.server.charts import course, lanes
from eagle_eye.server.charts.members import members_of
from eagle_eye.server.charts.peer_selection import picked
from eagle_eye.server.charts.reading import ReadValues, Turns, read
from eagle_eye.server.charts.windows import LENGTH_S_MAX, POINTS, POINTS_MAX, stretch
from eagle_eye.server.history.history import History
from eagle_eye.server.history.steps import Statistic
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.account_records import Attempt
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.model.records import Action, Incident
from eagle_eye.server.model.timestamps import rfc3339
from eagle_eye.server.store.store import ACTIONS, ATTEMPTS, INCIDENTS, JOBS, MEMBERSHIPS, PAGE_LIMIT_MAX, Store

SHOWN_S = 6 * 3_600.0  # of a job that runs for longer, unless since is given
LEAST_S = 300.0
BEFORE_S, AFTER_S = 30.0, 60.0  # around the run, so that its beginning and end are visible
NODES_MAX = 16  # nodes that are read: a synchronous job's steps are the same on all
FRAMES_MAX = 2_500  # for each of the metrics
ATTEMPTS_MAX = 200  # the newest
MARKS_MAX = 500  # incidents, and likewise actions: the newest

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"])
OptionalMoment = Annotated[
    Since, Query(description="RFC 3339, or Unix seconds; the present run by default, six hours of it at most.")
]


class Needs(Protocol):
    """The server's components that this module uses."""

    archive: Archive
    clock: Clock
    fleet: Fleet
    history: History
    store: Store
    turns: Turns


Parts = Annotated[Needs, Depends(services)]


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
    parts: Parts,
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
    spans = clipped(parts.archive.jobs(job).jobs.get(job, []), past.start_s - course.TRAILING_S, past.end_s)
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
                    "total": numbers(course.total(tokens.series, tokens.stretch.steps, len(tokens.nodes), len(nodes))),
                },
                "goodput_ratio": {
                    "time": [round(time_s, 3) for time_s in wanted.times_s],
                    "step_seconds": wanted.step_s,
                    "trailing_seconds": course.TRAILING_S,
                    "value": numbers(
                        course.goodput_course(spans, [min(t + wanted.step_s, past.end_s) for t in wanted.times_s])
                    ),
                },
            },
            "parts": [_part(span) for span in course.fewer(clipped(spans, past.start_s, past.end_s))],
            "resolutions": resolutions(seconds.spans),
        }
    )


@router.get("/{job:name}/timeline")
def get_timeline(
    parts: Parts,
    _: Reader,
    job: str,
    since: OptionalMoment = None,
    until: OptionalMoment = None,
    rows: Annotated[int, Query(ge=8, le=lanes.ROWS_MAX, description="At most so many rows.")] = lanes.ROWS_MAX,
) -> Response:
    """Which nodes took part in which attempt, with the incidents that concern them; neighbours share a row of many.

    ``unknown`` names the attempts of whose members nothing is on record (any more).
    """
    past = _past(parts, job, since, until)
    members = {a.id: m.nodes for a in past.attempts if (m := parts.store.get(MEMBERSHIPS, a.id)) is not None}
    newest = max((a.attempt for a in past.attempts), default=0)
    now_s = parts.clock.now_s()
    present = members_of(parts.store, parts.fleet, job, newest, now_s)
    found = lanes.rows(past.attempts, members, present.ranks, past.incidents, now_s, rows)
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


def _past(parts: Needs, job: str, since: str | None, until: str | None) -> _Past:
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


def _nodes(parts: Needs, job: str, past: _Past) -> list[str]:
    """Return the known members of the attempts, in the order of their names."""
    names: set[str] = set()
    for attempt in past.attempts[-20:]:
        membership = parts.store.get(MEMBERSHIPS, attempt.id)
        names.update(membership.nodes if membership is not None else ())
    newest = past.attempts[-1].attempt if past.attempts else 0
    names.update(members_of(parts.store, parts.fleet, job, newest, past.end_s).nodes)
    return sorted(names, key=natural)


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
    got = course.spread(found.series, found.stretch.steps)
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
