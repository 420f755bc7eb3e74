"""GET /api/v1/query_range: a metric over time from the history; and a job's part of the history as a recording."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import msgspec
import numpy as np
from fastapi import APIRouter, Depends, Query, Response
from fastapi.responses import StreamingResponse
from msgspec.structs import replace

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.frame import Frame, encode_frame
from eagle_eye.schema.metrics import MetricSpec, Scope
from eagle_eye.schema.names import did_you_mean
from eagle_eye.schema.recording import CONTENT_TYPE as RECORDING
from eagle_eye.schema.recording import VERSION, message
from eagle_eye.schema.times import unix_seconds
from eagle_eye.server.api.requests import Moment, OpenStreams, Reader, Seen, answer, services
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.engine.roster import Topology
from eagle_eye.server.history.history import (
    History,
    Opening,
    QueryPart,
    Recorded,
    SeriesKey,
    SeriesSteps,
    Stated,
    Statistic,
    TooManySeries,
    UnreadableRange,
    applies_to,
    in_steps,
    job_frames,
    speaks_of,
)
from eagle_eye.server.history.remote_history import SeriesQuery, with_past
from eagle_eye.server.history.remote_store import RemoteStore
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.clock import Clock, rfc3339
from eagle_eye.server.model.errors import HistoryMoved, Refusal
from eagle_eye.server.site_files import read_topology
from eagle_eye.server.store.store import ATTEMPTS, GPUS, JOBS, MEMBERSHIPS, PAGE_LIMIT_MAX, Store

# A recording of a job, as schema/recording.py has it.

AUDIT_PAGES_MAX = 50  # of the newest entries, searched for a job's states
AUDIT_PAGE = 1_000
CHUNK_BYTES = 1 << 18  # sent at a time

_JOB_DETAIL = re.compile(r"attempt (\d{1,10}) (\w+), \d+ ranks")


class RecordingNeeds(Protocol):
    """The server's components that a recording uses."""

    clock: Clock
    config: ServerConfig
    fleet: Fleet
    history: History
    remote_store: RemoteStore
    store: Store


def stream(
    parts: RecordingNeeds,
    job: str,
    nodes: Sequence[str],
    start_s: float,
    end_s: float,
    *,
    only_while_there: bool = False,
) -> Iterator[bytes]:
    """Yield the recording of a job's frames with corrected times in the range, in chunks; ``nodes`` [] reads all.

    ``only_while_there``: without frames from times in which the node did not work for the job, which may tell of
    whoever had it then.
    """
    gaps = parts.history.gaps(nodes, start_s, end_s, levels=False)
    opening = _opening(parts, job, start_s, end_s, gaps)
    observed = parts.fleet.jobs().get(job)
    members = {rank.node for rank in opening.ranks} | {rank.node for rank in (observed[1] if observed else [])}
    chunk = bytearray(message(msgspec.msgpack.encode(opening)))
    frames = job_frames(_recorded(parts, job, nodes, start_s, end_s), job, members)
    if only_while_there:
        frames = _while_there(frames, job, _worked(parts, job, start_s, end_s))
    for frame in frames:
        chunk += message(encode_frame(frame))
        if len(chunk) >= CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
    if parts.history.gaps(nodes, start_s, end_s, levels=False) != gaps:
        raise HistoryMoved("a segment was found damaged meanwhile; asked again, the recording says what it lacks")
    yield bytes(chunk) + message(b"")


def _while_there(
    frames: Iterable[Frame], job: str, worked: Mapping[str, Sequence[tuple[float, float]]]
) -> Iterator[Frame]:
    """Yield the frames that name the job, or lie in times in which their node ``worked`` for it; none names another."""
    for frame in frames:
        spans = worked.get(frame.node, ())
        if speaks_of(frame, job) or any(start_s <= frame.time_s <= end_s for start_s, end_s in spans):
            yield replace(frame, job=job if frame.job == job else None)


def _worked(parts: RecordingNeeds, job: str, start_s: float, end_s: float) -> dict[str, list[tuple[float, float]]]:
    """Return when each node worked for the job within the range, by its attempts on record."""
    found: dict[str, list[tuple[float, float]]] = {}
    for attempt in parts.store.page(ATTEMPTS, {"job": job}, limit=PAGE_LIMIT_MAX).items:
        until_s = attempt.seen_s if attempt.ended_s is None else attempt.ended_s
        if attempt.started_s <= end_s and until_s >= start_s:
            members = parts.store.get(MEMBERSHIPS, attempt.id)
            for node in members.nodes if members is not None else [attempt.node]:
                found.setdefault(node, []).append((attempt.started_s, until_s))
    return found


def _recorded(
    parts: RecordingNeeds, job: str, nodes: Sequence[str], start_s: float, end_s: float
) -> Iterator[Recorded]:
    """Yield the frames of the embedded history, preceded by those that a remote store has from before it.

    Raises RemoteStoreSilent, as the recording would otherwise have an unreported gap.
    """
    past, begins_s = parts.remote_store.past, parts.history.begins_s()
    if past is not None and (begins_s is None or begins_s > start_s):
        seam_s = end_s if begins_s is None else min(begins_s, end_s)
        yield from past.frames(job, start_s, seam_s)
        start_s = seam_s
    yield from parts.history.query(nodes, start_s, end_s)


def _opening(parts: RecordingNeeds, job: str, start_s: float, end_s: float, gaps: Sequence[UnreadableRange]) -> Opening:
    record = parts.store.get(JOBS, job)
    file = parts.config.topology_file
    return Opening(
        version=VERSION,
        job=job,
        now_s=parts.clock.now_s(),
        known=record is not None or job in parts.fleet.jobs(),
        states=_states(parts, job, start_s, end_s),
        attempt=record.attempt if record else 0,
        ranks=record.ranks if record else [],
        topology=read_topology(Path(file)) if file else Topology(),
        gaps=[(gap.start_s, gap.end_s, gap.problem) for gap in gaps],
        gpu_models=_gpu_models(parts),
    )


def _gpu_models(parts: RecordingNeeds) -> dict[str, str]:
    names: dict[str, set[str]] = {}
    for gpu in parts.store.all(GPUS):
        names.setdefault(gpu.node, set()).add(gpu.model)
    return {node: next(iter(own)) for node, own in names.items() if len(own) == 1 and "" not in own}


def _states(parts: RecordingNeeds, job: str, start_s: float, end_s: float) -> list[Stated]:
    """Return the scheduler's states of the job from the audit trail; the record itself has only the last one."""
    found: list[Stated] = []
    cursor: str | None = None
    for _ in range(AUDIT_PAGES_MAX):
        page = parts.store.audit(cursor, AUDIT_PAGE, subject=job, verb="job")
        for entry in page.items:
            match = _JOB_DETAIL.match(entry.detail)
            if match and entry.time_s <= end_s:
                found.append(Stated(entry.time_s, int(match[1]), match[2]))
                if entry.time_s < start_s:
                    return found[::-1]
        cursor = page.next
        if cursor is None:
            break
    return found[::-1]


# Both endpoints.

POINTS_MAX = 11_000  # per series
SERIES_MAX = 20_000
RECORDINGS_MAX = 2  # concurrent: each reads as fast as the disk allows

router = APIRouter(prefix="/api/v1", tags=["history"])


class HistoryNeeds(Protocol):
    """The server's components that the history's endpoints use."""

    clock: Clock
    config: ServerConfig
    fleet: Fleet
    history: History
    open_recordings: OpenStreams
    remote_store: RemoteStore
    stopping: threading.Event
    store: Store


Parts = Annotated[HistoryNeeds, Depends(services)]


class _Range(NamedTuple):
    """The part of the history that a query covers; no nodes: all."""

    nodes: tuple[str, ...]
    start_s: float
    end_s: float
    step_s: float
    job: str | None


@router.get("/query_range")
def query_range(
    parts: Parts,
    _: Reader,
    metric: Annotated[str, Query(json_schema_extra={"enum": [*catalogue.BY_NAME]})],
    start: Moment,
    end: Moment,
    step: Annotated[float, Query(gt=0, le=86_400, description="Seconds between points.")] = 1.0,
    job: str | None = None,
    node: str | None = None,
    statistic: Annotated[Statistic, Query(description="Of the values in a step; increase: of counters.")] = "last",
) -> Response:
    """The last value in each step, or another statistic of the step, by series.

    Steps in which nothing was observed have no point. ``resolutions`` says which buckets answered for which time.
    """
    spec = catalogue.BY_NAME.get(metric)
    if spec is None:
        near = did_you_mean(metric, catalogue.BY_NAME)
        raise Refusal(400, "metric", f"metric {metric[:80]!r} is not in the catalogue{near}")
    if not applies_to(statistic, spec):
        raise Refusal(400, "statistic", f"a {spec.kind.value} such as {metric} has no {statistic}")
    start_s, end_s = _range(start, end, step)
    nodes = _nodes(parts, job, node)
    spans, series = _read(parts, spec, statistic, _Range(tuple(nodes), start_s, end_s, step, job))
    shortest = _exact if spec.exact else _of_float32
    shown = [
        {
            "node": name,
            "device": None if spec.scope is Scope.NODE else key,
            "points": [
                [rfc3339(start_s + at * step), _finite(shortest(value))]
                for at, value in zip(found.steps, found.values, strict=True)
            ],
        }
        for (name, key), found in sorted(series.items(), key=lambda item: (item[0][0], str(item[0][1])))
    ]
    body = {
        "metric": metric,
        "unit": spec.unit,
        "step_seconds": step,
        "statistic": statistic,
        "resolutions": [
            {"start": rfc3339(span.start_s), "end": rfc3339(span.end_s), "resolution_seconds": span.bucket_s}
            for span in spans
        ],
        "series": shown,
    }
    asked = SeriesQuery(spec, node, job, start_s, step)
    steps = max(1, math.ceil((end_s - start_s) / step))
    # The store has last values only, and need not be queried for times that are downsampled here.
    past = parts.remote_store.past if statistic == "last" else None
    raw_s = parts.history.begins_s()
    begins_s = min([span.start_s for span in spans if span.bucket_s] + ([] if raw_s is None else [raw_s]), default=None)
    gaps = parts.history.gaps(nodes, start_s, end_s, levels=True)
    return answer(with_past(body, past, begins_s, asked, steps, lambda value: _finite(shortest(value)), gaps))


@router.get("/jobs/{job:name}/recording")
async def record(parts: Parts, sight: Seen, job: str, start: Moment, end: Moment) -> Response:
    """Every frame of the job in the range, for ``eagle-eye record``; see the document for the stream's format.

    For people who see their own jobs alone without what nodes said before they worked for the job, and afterwards.
    """
    start_s, end_s = moments(start, end)
    open_now = parts.open_recordings
    if open_now.count >= RECORDINGS_MAX:
        raise Refusal(
            503, "busy", f"{RECORDINGS_MAX} recordings are being read, which is the most", {"Retry-After": "30"}
        )

    async def body() -> AsyncIterator[bytes]:
        open_now.count += 1
        try:
            nodes = await asyncio.to_thread(_nodes, parts, job, None)
            chunks = stream(parts, job, nodes, start_s, end_s, only_while_there=sight is not None)
            while not parts.stopping.is_set():
                chunk = await asyncio.to_thread(next, chunks, None)
                if chunk is None:
                    return
                yield chunk
        finally:
            open_now.count -= 1

    return StreamingResponse(body(), media_type=RECORDING, headers={"Cache-Control": "no-store"})


def _read(
    parts: HistoryNeeds, spec: MetricSpec, statistic: Statistic, of: _Range
) -> tuple[list[QueryPart], dict[SeriesKey, SeriesSteps]]:
    """Return the resolutions in which the history answers, and the values. Raises Refusal, HistoryUnavailable."""
    limit = parts.config.history.query_frames_max
    for last in (False, False, True):
        try:
            with parts.history.courses(spec, of.nodes, of.start_s, of.end_s, of.job, of.step_s, limit) as reading:
                if reading.frames > limit:
                    raise Refusal(
                        400,
                        "too_much",
                        f"more than {limit} frames lie in the range (history.query_frames_max); name a node, shorten"
                        " it, or ask for steps of a minute: those are kept apart",
                    )
                found = in_steps(reading.courses, spec, statistic, of.start_s, of.step_s, SERIES_MAX)
                return reading.spans, found
        except TooManySeries:
            raise Refusal(400, "too_much", f"more than {SERIES_MAX} series lie in the range; name a node") from None
        except HistoryMoved:  # something was found broken; the rest answers
            if last:
                raise
    raise AssertionError  # for the type checker


def moments(start: str | None, end: str | None, otherwise_s: tuple[float, float] = (0.0, 0.0)) -> tuple[float, float]:
    """Return two times of a query as Unix seconds, with ``otherwise_s`` for omitted ones.

    Raises Refusal 400 when they are invalid or in the wrong order.
    """
    try:
        start_s = otherwise_s[0] if start is None else unix_seconds(start)
        end_s = otherwise_s[1] if end is None else unix_seconds(end)
    except ValueError as error:
        raise Refusal(400, "time", f"{error}"[:300]) from None
    if not start_s <= end_s:
        raise Refusal(400, "time", f"start {rfc3339(start_s)} is after end {rfc3339(end_s)}")
    return start_s, end_s


def _range(start: str, end: str, step: float) -> tuple[float, float]:
    start_s, end_s = moments(start, end)
    if (end_s - start_s) / step > POINTS_MAX:
        raise Refusal(
            400, "too_much", f"{(end_s - start_s) / step:.0f} steps; at most {POINTS_MAX}: take a longer step"
        )
    return start_s, end_s


def _nodes(parts: HistoryNeeds, job: str | None, node: str | None) -> list[str]:
    """Return the nodes to read; [] for all."""
    if node is not None:
        return [node]
    if job is None:
        return []
    record = parts.store.get(JOBS, job)
    attempt, ranks = parts.fleet.jobs().get(job, (0, []))
    members = {rank.node for rank in ranks}
    if record is not None:
        attempt = max(attempt, record.attempt)
        members |= {*record.nodes, *(rank.node for rank in record.ranks)}
    # A restarted job had other nodes before, which are no longer known: all are searched for it.
    return [] if attempt > 0 else sorted(members)


def _exact(value: float) -> float:
    return value


def _of_float32(value: float) -> float:
    """Return the shortest number with the same float32 value: 0.83 was sent, not 0.829999983."""
    return float(str(np.float32(value)))


def _finite(value: float) -> float | str:
    """Return the value; JSON has no infinity, so it is spelled as Prometheus does."""
    return value if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")
