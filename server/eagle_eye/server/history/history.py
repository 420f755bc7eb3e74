"""What the history is asked for, as one small protocol, so that another store can take its place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from eagle_eye.schema.frame import Frame, Rank
from eagle_eye.schema.metrics import MetricSpec, Scope
from eagle_eye.server.history.segments.downsampling import BucketSeries

# A frame older than this when it is sent was not sent as soon as it could be. If its node has sent a newer one it is
# late: something for the history, and no news of how the node is.
LATE_S = 10.0


class StreamRef:
    """A stream that frames come of again and again; the history keeps in ``held`` what spares it looking it up."""

    __slots__ = ("held", "name")

    def __init__(self, node: str, stream: str) -> None:
        self.name = (node, stream)
        self.held: Any = None


class Batch(NamedTuple):
    """Frames that came at about one moment, as columns: what every way of taking samples hands to the history.

    Line i is of the stream ``refs[i]``. ``time_s`` is by its node's clock, ``offset_s`` is added to it on reading.
    ``raw`` has each frame's bytes, a matrix where all are of one size. ``outlines`` are those, by id, that rows among
    them name and that may not be durable yet.
    """

    refs: Sequence[StreamRef]
    sequence: np.ndarray[Any, np.dtype[np.int64]]
    time_s: np.ndarray[Any, np.dtype[np.float64]]
    received_s: np.ndarray[Any, np.dtype[np.float64]]
    offset_s: np.ndarray[Any, np.dtype[np.float64]]
    raw: np.ndarray[Any, np.dtype[np.uint8]] | Sequence[bytes]
    outlines: Mapping[bytes, bytes] = MappingProxyType({})

    @classmethod
    def of(
        cls,
        lines: Iterable[tuple[StreamRef, int, float, float, float, bytes]],
        outlines: Mapping[bytes, bytes] = MappingProxyType({}),
    ) -> Batch:
        """Return lines, at least one, each as the columns have it."""
        refs, sequences, times_s, received_s, offsets_s, raw = zip(*lines, strict=True)
        times = np.array((times_s, received_s, offsets_s), np.float64)
        return cls(refs, np.array(sequences, np.int64), times[0], times[1], times[2], raw, outlines)

    @property
    def raw_bytes(self) -> int:
        """How many bytes the frames have."""
        return self.raw.nbytes if isinstance(self.raw, np.ndarray) else sum(map(len, self.raw))


class Appended(NamedTuple):
    """What became of a batch: ``new[i]`` is false where line i was there already.

    ``watermarks`` are the streams' highest durable sequences: agents send the frames of one stream in order, so
    everything that the agent still held of it up to there is here, and it may forget it.
    """

    new: list[bool]
    watermarks: list[int]


class Recorded(NamedTuple):
    """One frame of the history. Its times are as its node sent them; ``offset_s`` corrects them."""

    frame: Frame
    received_s: float
    offset_s: float


class RecordedRow(NamedTuple):
    """One row of the history that has numbers alone, as it came; ``outline_of_row(raw)`` names its outline."""

    raw: bytes
    received_s: float
    offset_s: float


class Run(NamedTuple):
    """Some of one series: a metric of a device, a link or (-1) a node; corrected times ascend, no value is NaN."""

    node: str
    key: int | str
    times_s: np.ndarray[Any, np.dtype[np.float64]]
    values: np.ndarray[Any, np.dtype[np.float64]]


class RankReport(NamedTuple):
    """Which ranks a node's agent told of, at a corrected time."""

    node: str
    time_s: float
    ranks: Sequence[Rank]


class QueryPart(NamedTuple):
    """A part of a query's time, and how long the buckets are that answer for it; 0: the values as they were sent."""

    start_s: float
    end_s: float
    bucket_s: int


class Gap(NamedTuple):
    """A part of the time, ends included, of which something cannot be read: what held it is damaged."""

    start_s: float
    end_s: float
    problem: str


class StepQuery(NamedTuple):
    """What a query with a step reads: about how many frames, and buckets of nodes; in which resolution; its values.

    ``courses`` are read as they are taken: runs of values as sent, and of buckets, each value in one of them.
    """

    frames: int
    spans: list[QueryPart]
    courses: Iterator[Run | BucketSeries]


class StreamInfo(NamedTuple):
    """One stream of an agent as the history knows it; ``heard_s`` is when something new of it was last received."""

    node: str
    stream: str
    watermark: int
    heard_s: float


class History(Protocol):
    """A durable, append-only record of all frames. Every method may be called from any thread."""

    def submit(self, batch: Batch) -> Future[Appended]:
        """Return a future that is done once all of the batch is durable, within about 100 ms.

        The future fails with HistoryUnavailable when nothing of the batch was kept. Raises HistoryBusy when
        too much waits already.
        """
        ...

    def outline(self, id_: bytes) -> bytes | None:
        """Return the outline of a durable row by its id; None: it is not known (any more)."""
        ...

    def replay(self, since_s: float, frames_max: int) -> Iterator[Recorded | RecordedRow]:
        """Yield the frames received at ``since_s`` or later in order of receipt; of too many, the newest.

        Rows of numbers alone come as they are: of a large fleet there are hundreds of thousands. Late frames are left
        out: detection goes forward.
        """
        ...

    def query(self, nodes: Sequence[str], start_s: float, end_s: float) -> Iterator[Recorded]:
        """Yield the nodes' frames (all if empty) whose corrected time is in the range.

        Part by part as these begin in the range, and in a part by node and then by time. A part is what came together:
        some minutes of some nodes, or what they sent late.
        """
        ...

    def runs(
        self, metric: MetricSpec, nodes: Sequence[str], start_s: float, end_s: float, job: str | None
    ) -> Iterator[Run]:
        """Yield the metric's values in the range, in parts as ``query``; with ``job`` of frames that speak of it.

        Gauges are as exact as float32, whichever part they come from.
        """
        ...

    def ranks(self, nodes: Sequence[str], start_s: float, end_s: float) -> Iterator[RankReport]:
        """Yield which ranks the nodes' frames in the range tell of, in parts as ``query``; it costs a part of it."""
        ...

    def courses(
        self,
        metric: MetricSpec,
        nodes: Sequence[str],
        start_s: float,
        end_s: float,
        job: str | None,
        step_s: float,
        limit: int,
    ) -> AbstractContextManager[StepQuery]:
        """Give the metric's course in the range, as fine as ``step_s`` asks for and as there still is.

        Buckets that lie in the range as a whole are in it. Frames are counted little further than ``limit``.
        """
        ...

    def count(self, nodes: Sequence[str], start_s: float, end_s: float, limit: int) -> int:
        """Return how many frames ``query`` would read, counting little further than ``limit``."""
        ...

    def gaps(self, nodes: Sequence[str], start_s: float, end_s: float, levels: bool) -> list[Gap]:
        """Return which parts of the range cannot be read of the nodes (all if empty), in order and apart.

        ``levels``: by a query with a step, which minutes and hours answer as well as frames. Ask after reading: what is
        found damaged while it is read counts then.
        """
        ...

    def begins_s(self) -> float | None:
        """Return since when all that came in time is here; None: nothing is. What came late may be older."""
        ...

    def streams(self) -> list[StreamInfo]:
        """Return every stream that the history knows."""
        ...

    def problem(self) -> str | None:
        """Return why frames cannot be made durable at the moment, or None."""
        ...

    def close(self) -> None:
        """Make durable what was submitted, then release the files."""
        ...


def speaks_of(frame: Frame, job: str) -> bool:
    """Return whether the frame's node or a rank on it belongs to the job."""
    return frame.job == job or any(rank.job == job for rank in frame.ranks)


def runs_of(frames: Iterable[tuple[Frame, float]], metric: MetricSpec) -> Iterator[Run]:
    """Yield what frames say of the metric at their corrected times: a node's together where its frames lie together."""
    for node, own in groupby(frames, lambda one: one[0].node):
        found: dict[tuple[int | str, ...], tuple[list[float], list[Any]]] = {}
        for frame, time_s in own:
            for block in frame.blocks:
                if block.scope is metric.scope and metric.name in block.metrics:
                    first = block.metrics.index(metric.name) * len(block.keys)
                    times_s, lines = found.setdefault(tuple(block.keys), ([], []))
                    times_s.append(time_s)
                    lines.append(np.frombuffer(block.values, "<f8", len(block.keys), 8 * first))
        for keys, (times_s, lines) in found.items():
            at_s, values = np.array(times_s), np.stack(lines)
            if (np.diff(at_s) < 0).any():  # corrections of the node's clock differ
                order = np.argsort(at_s, kind="stable")
                at_s, values = at_s[order], values[order]
            if not metric.exact:
                with np.errstate(over="ignore"):
                    values = values.astype(np.float32).astype(np.float64)
            known = ~np.isnan(values)
            for place, key in enumerate(keys):
                rows = known[:, place]
                if rows.any():
                    yield Run(node, str(key) if metric.scope is Scope.LINK else key, at_s[rows], values[rows, place])
