"""What a job's recording holds (the stream is ``schema/recording.py``'s): an opening, then frames of that job alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from eagle_eye.schema.action import MemberRank
from eagle_eye.schema.frame import Block, Frame
from eagle_eye.server.engine.roster import Topology
from eagle_eye.server.history.history import Recorded
from eagle_eye.server.model.node_clocks import corrected


class Stated(msgspec.Struct, frozen=True):
    """What a scheduler or launcher reported about the job, and when the server received it."""

    time_s: float
    attempt: int
    state: str


class Opening(msgspec.Struct, frozen=True):
    """The first message. ``known`` says whether the server knows the job at all.

    ``states`` are those within the range and the last one before it, oldest first; ``ranks`` are the members that the
    scheduler last named, for attempt ``attempt``. ``gaps`` are ranges with lost frames: start, end and reason.
    ``gpu_models`` are NVML's names of the nodes' GPUs, for nodes whose GPUs are all one model. Times are Unix seconds;
    ``now_s`` is the server's.
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


def frames_of(recorded: Iterable[Recorded], job: str, members: set[str]) -> Iterator[Frame]:
    """Yield the job's frames with corrected times: of ``members``, and of other nodes once they name the job.

    A member's frames count even while they do not name the job: its processes may have died. What they report about
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
