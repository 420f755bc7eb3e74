"""GET /api/v1/query_range: a metric's course, read from the history; and a job's part of it as a recording."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.metrics import Scope
from eagle_eye.server import recording
from eagle_eye.server.api.requests import Parts, Reader, answer
from eagle_eye.server.errors import Refusal
from eagle_eye.server.services import Services
from eagle_eye.server.store import JOBS
from eagle_eye.server.timestamps import rfc3339, unix_seconds

POINTS_MAX = 11_000  # of one series
SERIES_MAX = 20_000
RECORDINGS_MAX = 2  # at a time: each reads as much of the disk as it can

router = APIRouter(prefix="/api/v1", tags=["history"])
Moment = Annotated[str, Query(max_length=64, description="RFC 3339, or Unix seconds.")]


@router.get("/query_range")
def query_range(
    parts: Parts,
    _: Reader,
    metric: str,
    start: Moment,
    end: Moment,
    step: Annotated[float, Query(gt=0, le=86_400, description="Seconds between points.")] = 1.0,
    job: str | None = None,
    node: str | None = None,
) -> Response:
    """The last value in each step, by series. Steps in which nothing was observed have no point."""
    spec = catalogue.BY_NAME.get(metric)
    if spec is None:
        raise Refusal(400, "metric", f"metric {metric[:80]!r} is not in the catalogue")
    start_s, end_s = _range(start, end, step)
    nodes = _nodes(parts, job, node)
    limit = parts.config.history.query_frames_max
    if parts.history.count(nodes, start_s, end_s, limit) > limit:
        raise Refusal(
            400,
            "too_much",
            f"more than {limit} frames lie in the range (history.query_frames_max); name a node or shorten it",
        )
    series: dict[tuple[str, int | str], dict[int, tuple[float, float]]] = {}
    for run in parts.history.runs(spec, nodes, start_s, end_s, job):
        points = np.floor((run.times_s - start_s) / step).astype(np.int64)
        last = np.flatnonzero(np.r_[points[1:] != points[:-1], True])
        newest = series.setdefault((run.node, run.key), {})
        for point, time_s, value in zip(
            points[last].tolist(), run.times_s[last].tolist(), run.values[last].tolist(), strict=True
        ):
            if point not in newest or newest[point][0] <= time_s:
                newest[point] = (time_s, value)
        if len(series) > SERIES_MAX:
            raise Refusal(400, "too_much", f"more than {SERIES_MAX} series lie in the range; name a node")
    shortest = _exact if spec.exact else _of_float32
    shown = [
        {
            "node": name,
            "device": None if spec.scope is Scope.NODE else key,
            "points": [
                [rfc3339(start_s + at * step), _finite(shortest(value))] for at, (_, value) in sorted(newest.items())
            ],
        }
        for (name, key), newest in sorted(series.items(), key=lambda item: (item[0][0], str(item[0][1])))
    ]
    return answer({"metric": metric, "unit": spec.unit, "step_seconds": step, "series": shown})


@router.get("/jobs/{job}/recording")
async def record(parts: Parts, _: Reader, job: str, start: Moment, end: Moment) -> Response:
    """Every frame of the job in the range, for ``eagle-eye record``; see the document for the stream's format."""
    start_s, end_s = _moments(start, end)
    open_now = parts.open_recordings
    if open_now.count >= RECORDINGS_MAX:
        raise Refusal(
            503, "busy", f"{RECORDINGS_MAX} recordings are being read, which is the most", {"Retry-After": "30"}
        )

    async def body() -> AsyncIterator[bytes]:
        open_now.count += 1
        try:
            nodes = await asyncio.to_thread(_nodes, parts, job, None)
            chunks = recording.stream(parts, job, nodes, start_s, end_s)
            while not parts.stopping.is_set():
                chunk = await asyncio.to_thread(next, chunks, None)
                if chunk is None:
                    return
                yield chunk
        finally:
            open_now.count -= 1

    return StreamingResponse(body(), media_type=recording.CONTENT_TYPE, headers={"Cache-Control": "no-store"})


def _moments(start: str, end: str) -> tuple[float, float]:
    try:
        start_s, end_s = unix_seconds(start), unix_seconds(end)
    except ValueError as error:
        raise Refusal(400, "time", f"{error}"[:300]) from None
    if not start_s <= end_s:
        raise Refusal(400, "time", f"start {start[:64]} is after end {end[:64]}")
    return start_s, end_s


def _range(start: str, end: str, step: float) -> tuple[float, float]:
    start_s, end_s = _moments(start, end)
    if (end_s - start_s) / step > POINTS_MAX:
        raise Refusal(
            400, "too_much", f"{(end_s - start_s) / step:.0f} steps; at most {POINTS_MAX}: take a longer step"
        )
    return start_s, end_s


def _nodes(parts: Services, job: str | None, node: str | None) -> list[str]:
    """Return the nodes to read; [] for all."""
    if node is not None:
        return [node]
    if job is None:
        return []
    # Former members count too, so what the scheduler says now is not enough: only names a start.
    record = parts.store.get(JOBS, job)
    observed = parts.fleet.jobs().get(job)
    members = {rank.node for rank in (record.ranks if record else [])}
    members |= {rank.node for rank in (observed[1] if observed else [])}
    return [] if record is not None and record.attempt > 0 else sorted(members)


def _exact(value: float) -> float:
    return value


def _of_float32(value: float) -> float:
    """Return the shortest number that float32 keeps as this one: 0.83 was sent, not 0.829999983."""
    return float(str(np.float32(value)))


def _finite(value: float) -> float | str:
    """Return the value; JSON has no infinity, so it is spelt as Prometheus does."""
    return value if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")
