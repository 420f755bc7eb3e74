"""What the tests of the embedded history share: one that compacts in this process, and frames of many kinds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Rank, block, encode_frame
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.history import compactor, minutes
from eagle_eye.server.history.embedded_history import EmbeddedHistory
from eagle_eye.server.history.segment_tables import Step, no_step
from eagle_eye.server.history.settings import HistorySettings
from eagle_eye.server.model.batch import Batch
from tests.server.builders import NOW, FakeClock, batch_of, frame

WITHIN_S = 10.0
FOREVER_S = 4e9


@contextmanager
def opened(folder: Path, clock: FakeClock | None = None, **settings: Any) -> Iterator[EmbeddedHistory]:
    history = EmbeddedHistory(folder, HistorySettings(**settings), 64 << 20, clock or FakeClock(), 900.0)
    try:
        yield history
    finally:
        history.close()


def compact(history: EmbeddedHistory, step: Step = no_step) -> None:
    """Compact as the compactor does, without a process of its own."""
    (through,) = history.journal.reader.read("SELECT max(id) FROM chunks", ())[0]
    history.compaction._step = step
    compactor.compact(history.journal.path, history.segment_store.folder, through or 0, history.compaction._take, step)


def remake(history: EmbeddedHistory, step: Step = no_step) -> int:
    """Make the minutes that are lacking, without a process of its own; return how many."""
    history.compaction._step = step
    names = history.segment_store.levels.without_minutes(history.compaction._clock.now_s())
    for name in names:
        history.compaction._take_minutes(minutes.remake(history.segment_store.folder.parent, name, step))
    return len(names)


def retain(history: EmbeddedHistory) -> None:
    """Have the journal's writer keep its file small; the clock must have moved on since it last did."""
    changes = 0
    while changes < 2 or history.journal._retaining is not None:  # it does a step of it after each change
        history.journal.change(lambda _writer: None).result(WITHIN_S)
        changes += 1


def batch(raws: Iterable[bytes], received_s: float = NOW, offset_s: float = 0.0) -> Batch:
    frames = [msgspec.msgpack.decode(raw) for raw in raws]
    entries = [(one["sequence"], one["time_s"], raw) for one, raw in zip(frames, raws, strict=True)]
    return batch_of(frames[0]["node"], frames[0]["stream"], received_s, offset_s, entries)


def told(history: EmbeddedHistory, nodes: Iterable[str] = ()) -> list[tuple[str, str, int, bytes]]:
    """Return all that the history holds, in order; frames as they would be sent again."""
    return sorted(
        (one.frame.node, one.frame.stream, one.frame.sequence, encode_frame(one.frame))
        for one in history.query(list(nodes), 0.0, FOREVER_S)
    )


def rich(sequence: int, node: str = "n1") -> bytes:
    """Return a frame with rows of every scope, ranks, events, and collectors."""
    devices = {device: {"gpu_power_watts": 300.0 + sequence + device, "train_step": 2.0**40 + 1} for device in range(2)}
    return encode_frame(
        frame(
            sequence,
            node,
            NOW + sequence,
            ranks=[Rank("job", 3, 8, 0, attempt=1, pid=77, role="pp0", silent_s=0.5)],
            blocks=[
                block(Scope.DEVICE, devices),
                block(Scope.NODE, {-1: {"node_cpu_utilization_ratio": 0.25}}),
                block(Scope.LINK, {"mlx5_1": {"link_up": 1.0}, "mlx5_0": {"link_errors_total": 7.0}}),
            ],
            events=[Event(NOW + sequence, "xid", 1, {"code": 79, "text": "Grüße"})] if sequence % 2 else [],
            collectors={"nvml": "ok"},
            dropped={"late": 2},
        )
    )
