"""A job's part of the history as one stream, for ``eagle-eye record`` and whoever else wants frames back.

The stream is a sequence of messages, each after its length as four bytes, most significant first: an ``Opening``
(MessagePack map), then frames in the encoding of ``docs/wire.md``, their times on the server's clock, in the order of
``History.query``. A length of zero ends it; a stream without it was cut off.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from eagle_eye.schema.action import MemberRank
from eagle_eye.schema.frame import FRAME_BYTES_MAX, Block, Frame, encode_frame
from eagle_eye.server.engine.topology import Topology
from eagle_eye.server.errors import HistoryMoved
from eagle_eye.server.history import Gap, Recorded
from eagle_eye.server.node_clocks import corrected
from eagle_eye.server.services import Services
from eagle_eye.server.store import GPUS, JOBS
from eagle_eye.server.topology_file import read_topology

CONTENT_TYPE = "application/x-eagle-eye-recording"
VERSION = 1
OPENING_BYTES_MAX = 256 << 20
AUDIT_PAGES_MAX = 50  # of the newest entries, in which a job's states are looked for
AUDIT_PAGE = 1_000
CHUNK_BYTES = 1 << 18  # sent at a time

_JOB_DETAIL = re.compile(r"attempt (\d{1,10}) (\w+), \d+ ranks")


class Stated(msgspec.Struct, frozen=True):
    """What a scheduler or launcher said of the job, and when the server heard it."""

    time_s: float
    attempt: int
    state: str


class Opening(msgspec.Struct, frozen=True):
    """The first message. ``known`` says whether the server knows such a job at all.

    ``states`` are those within the time and the last before it, oldest first; ``ranks`` the members that the
    scheduler named last, for attempt ``attempt``. ``gaps`` are times of which frames are lost, from when until when and
    why. ``gpu_models`` are NVML's names of the nodes' GPUs, where all of a node's are one model. Times are Unix
    seconds, ``now_s`` the server's.
    """

    version: int
    job: str
    now_s: float
    known: bool
    states: list[Stated] = []
    attempt: int = 0
    ranks: list[MemberRank] = []
    topology: Topology = Topology()
    gaps: list[tuple[float, float, str]] = []
    gpu_models: dict[str, str] = {}


class BrokenStream(ValueError):
    """A recording that ends too early or holds something else."""


def stream(parts: Services, job: str, nodes: Sequence[str], start_s: float, end_s: float) -> Iterator[bytes]:
    """Yield the recording of a job's frames with corrected times in the range, in chunks; ``nodes`` [] looks at all."""
    gaps = parts.history.gaps(nodes, start_s, end_s, levels=False)
    opening = _opening(parts, job, start_s, end_s, gaps)
    observed = parts.fleet.jobs().get(job)
    members = {rank.node for rank in opening.ranks} | {rank.node for rank in (observed[1] if observed else [])}
    chunk = bytearray(_message(msgspec.msgpack.encode(opening)))
    for frame in frames_of(_recorded(parts, job, nodes, start_s, end_s), job, members):
        chunk += _message(encode_frame(frame))
        if len(chunk) >= CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
    if parts.history.gaps(nodes, start_s, end_s, levels=False) != gaps:
        raise HistoryMoved("a segment was found damaged meanwhile; asked again, the recording says what it lacks")
    yield bytes(chunk) + _message(b"")


def _recorded(parts: Services, job: str, nodes: Sequence[str], start_s: float, end_s: float) -> Iterator[Recorded]:
    """Yield the frames of the embedded history, after what a remote store has of the time before that begins.

    Raises RemoteStoreSilent: the recording would lack what nobody knows of.
    """
    past, begins_s = parts.remote_store.past, parts.history.begins_s()
    if past is not None and (begins_s is None or begins_s > start_s):
        seam_s = end_s if begins_s is None else min(begins_s, end_s)
        yield from past.frames(job, start_s, seam_s)
        start_s = seam_s
    yield from parts.history.query(nodes, start_s, end_s)


def frames_of(recorded: Iterable[Recorded], job: str, members: set[str]) -> Iterator[Frame]:
    """Yield what concerns the job, times corrected: frames of ``members``, and of others from when they speak of it.

    A member's frames count also while they do not name the job: its processes may have died. What they say of
    other jobs is left out.
    """
    spoke = set(members)
    for one in recorded:
        frame = one.frame
        if frame.node not in spoke:
            if frame.job != job and not any(rank.job == job for rank in frame.ranks):
                continue
            spoke.add(frame.node)
        yield _own_part(corrected(frame, one.offset_s, one.received_s), job)


def messages(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """Yield the messages of a stream that ``read(n)`` gives up to n bytes of. Raises BrokenStream."""
    limit = OPENING_BYTES_MAX
    while True:
        length = int.from_bytes(_exactly(read, 4), "big")
        if length == 0:
            return
        if length > limit:
            raise BrokenStream(f"a message of {length} bytes is announced; at most {limit} are read")
        limit = 2 * FRAME_BYTES_MAX  # whoever encodes anew may need some bytes more
        yield _exactly(read, length)


def _exactly(read: Callable[[int], bytes], length: int) -> bytes:
    parts = []
    while length:
        part = read(length)
        if not part:
            raise BrokenStream("the server's answer was cut off; its log may say why")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _message(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


def _opening(parts: Services, job: str, start_s: float, end_s: float, gaps: Sequence[Gap]) -> Opening:
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


def _gpu_models(parts: Services) -> dict[str, str]:
    names: dict[str, set[str]] = {}
    for gpu in parts.store.all(GPUS):
        names.setdefault(gpu.node, set()).add(gpu.model)
    return {node: next(iter(own)) for node, own in names.items() if len(own) == 1 and "" not in own}


def _states(parts: Services, job: str, start_s: float, end_s: float) -> list[Stated]:
    """Return from the audit trail what the job's scheduler said; the record itself keeps only the last word."""
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


def _own_part(frame: Frame, job: str) -> Frame:
    ranks = [rank for rank in frame.ranks if rank.job == job]
    events = [event for event in frame.events if event.attributes.get("job", job) == job]
    if len(ranks) == len(frame.ranks) and len(events) == len(frame.events):
        return frame
    foreign = {rank.device for rank in frame.ranks if rank.job != job} - {rank.device for rank in ranks}
    blocks = [_without(block, foreign) for block in frame.blocks]
    return msgspec.structs.replace(frame, ranks=ranks, events=events, blocks=blocks)


def _without(block: Block, devices: set[int]) -> Block:
    if devices.isdisjoint(block.keys):
        return block
    kept = [column for column, key in enumerate(block.keys) if key not in devices]
    cells = np.frombuffer(block.values, dtype="<f8").reshape(len(block.metrics), len(block.keys))
    return Block(block.scope, [block.keys[column] for column in kept], block.metrics, cells[:, kept].tobytes())
