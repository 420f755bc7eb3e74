"""Streams a job's part of the history for ``GET /api/v1/jobs/{job}/recording``, as ``schema/recording.py`` has it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec.structs import replace

from eagle_eye.schema.frame import Frame, encode_frame
from eagle_eye.schema.recording import VERSION, message
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.engine.roster import Topology
from eagle_eye.server.history.history import History, Recorded, UnreadableRange, speaks_of
from eagle_eye.server.history.recording import Opening, Stated, frames_of
from eagle_eye.server.history.remote_store.remote_store import RemoteStore
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import HistoryMoved
from eagle_eye.server.site_files.topology import read_topology
from eagle_eye.server.store.store import ATTEMPTS, GPUS, JOBS, MEMBERSHIPS, PAGE_LIMIT_MAX, Store

AUDIT_PAGES_MAX = 50  # of the newest entries, searched for a job's states
AUDIT_PAGE = 1_000
CHUNK_BYTES = 1 << 18  # sent at a time

_JOB_DETAIL = re.compile(r"attempt (\d{1,10}) (\w+), \d+ ranks")


class Needs(Protocol):
    """The server's components that this module uses."""

    clock: Clock
    config: ServerConfig
    fleet: Fleet
    history: History
    remote_store: RemoteStore
    store: Store


def stream(
    parts: Needs, job: str, nodes: Sequence[str], start_s: float, end_s: float, *, only_while_there: bool = False
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
    frames = frames_of(_recorded(parts, job, nodes, start_s, end_s), job, members)
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


def _worked(parts: Needs, job: str, start_s: float, end_s: float) -> dict[str, list[tuple[float, float]]]:
    """Return when each node worked for the job within the range, by its attempts on record."""
    found: dict[str, list[tuple[float, float]]] = {}
    for attempt in parts.store.page(ATTEMPTS, {"job": job}, limit=PAGE_LIMIT_MAX).items:
        until_s = attempt.seen_s if attempt.ended_s is None else attempt.ended_s
        if attempt.started_s <= end_s and until_s >= start_s:
            members = parts.store.get(MEMBERSHIPS, attempt.id)
            for node in members.nodes if members is not None else [attempt.node]:
                found.setdefault(node, []).append((attempt.started_s, until_s))
    return found


def _recorded(parts: Needs, job: str, nodes: Sequence[str], start_s: float, end_s: float) -> Iterator[Recorded]:
    """Yield the frames of the embedded history, preceded by those that a remote store has from before it.

    Raises RemoteStoreSilent, as the recording would otherwise have an unreported gap.
    """
    past, begins_s = parts.remote_store.past, parts.history.begins_s()
    if past is not None and (begins_s is None or begins_s > start_s):
        seam_s = end_s if begins_s is None else min(begins_s, end_s)
        yield from past.frames(job, start_s, seam_s)
        start_s = seam_s
    yield from parts.history.query(nodes, start_s, end_s)


def _opening(parts: Needs, job: str, start_s: float, end_s: float, gaps: Sequence[UnreadableRange]) -> Opening:
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


def _gpu_models(parts: Needs) -> dict[str, str]:
    names: dict[str, set[str]] = {}
    for gpu in parts.store.all(GPUS):
        names.setdefault(gpu.node, set()).add(gpu.model)
    return {node: next(iter(own)) for node, own in names.items() if len(own) == 1 and "" not in own}


def _states(parts: Needs, job: str, start_s: float, end_s: float) -> list[Stated]:
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
