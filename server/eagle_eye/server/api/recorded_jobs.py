"""Streams a job's part of the history for ``GET /api/v1/jobs/{job}/recording``, as ``schema/recording.py`` has it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from eagle_eye.schema.frame import encode_frame
from eagle_eye.schema.recording import VERSION, message
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.engine.topology import Topology
from eagle_eye.server.history.history import History, Recorded, UnreadableRange
from eagle_eye.server.history.recording import Opening, Stated, frames_of
from eagle_eye.server.history.remote_store.remote_store import RemoteStore
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import HistoryMoved
from eagle_eye.server.site_files.topology import read_topology
from eagle_eye.server.store.store import GPUS, JOBS, Store

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


def stream(parts: Needs, job: str, nodes: Sequence[str], start_s: float, end_s: float) -> Iterator[bytes]:
    """Yield the recording of a job's frames with corrected times in the range, in chunks; ``nodes`` [] reads all."""
    gaps = parts.history.gaps(nodes, start_s, end_s, levels=False)
    opening = _opening(parts, job, start_s, end_s, gaps)
    observed = parts.fleet.jobs().get(job)
    members = {rank.node for rank in opening.ranks} | {rank.node for rank in (observed[1] if observed else [])}
    chunk = bytearray(message(msgspec.msgpack.encode(opening)))
    for frame in frames_of(_recorded(parts, job, nodes, start_s, end_s), job, members):
        chunk += message(encode_frame(frame))
        if len(chunk) >= CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
    if parts.history.gaps(nodes, start_s, end_s, levels=False) != gaps:
        raise HistoryMoved("a segment was found damaged meanwhile; asked again, the recording says what it lacks")
    yield bytes(chunk) + message(b"")


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
