"""The History protocol: everything the server asks of sample storage, so that another store can implement it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np

from eagle_eye.schema.frame import Frame, Rank
from eagle_eye.schema.metrics import MetricSpec, Scope
from eagle_eye.server.history.segments.downsampling import BucketSeries
from eagle_eye.server.model.batch import Batch

# A frame older than this when sent was not sent promptly. It is late if its node has sent a newer one: it is stored,
# but says nothing about the node's current state.
LATE_S = 10.0


class Appended(NamedTuple):
    """The result of appending a batch: ``new[i]`` is false if row i was a duplicate.

    ``watermarks`` are the streams' highest durable sequences. Agents send the frames of a stream in order, so all
    frames up to the watermark that the agent still buffered are durable, and it may discard them.
    """

    new: list[bool]
    watermarks: list[int]


class Recorded(NamedTuple):
    """One stored frame. Its times are as its node sent them; ``offset_s`` corrects them."""

    frame: Frame
    received_s: float
    offset_s: float


class RecordedRow(NamedTuple):
    """One stored row of numbers alone, as received; ``template_of_row(raw)`` is the id of its template."""

    raw: bytes
    received_s: float
    offset_s: float


class Run(NamedTuple):
    """Part of one series: a metric of a device, a link or (-1) a node; corrected times ascend, no value is NaN."""

    node: str
    key: int | str
    times_s: np.ndarray[Any, np.dtype[np.float64]]
    values: np.ndarray[Any, np.dtype[np.float64]]


class RankReport(NamedTuple):
    """The ranks that a node's agent reported at a corrected time."""

    node: str
    time_s: float
    ranks: Sequence[Rank]


class QueryPart(NamedTuple):
    """A part of a query's range and the bucket length used for it; 0 means values as sent."""

    start_s: float
    end_s: float
    bucket_s: int


class UnreadableRange(NamedTuple):
    """A time range, ends included, in which some data cannot be read because its segment is damaged."""

    start_s: float
    end_s: float
    problem: str


class StepQuery(NamedTuple):
    """What a query with a step reads: approximate count of frames and node buckets, resolutions, and values.

    ``courses`` is lazy: runs of values as sent and series of buckets; no value is in two of them.
    """

    frames: int
    spans: list[QueryPart]
    courses: Iterator[Run | BucketSeries]


class StreamInfo(NamedTuple):
    """One stream of an agent; ``heard_s`` is when something new of it was last received."""

    node: str
    stream: str
    watermark: int
    heard_s: float


class History(Protocol):
    """A durable, append-only record of all frames. Every method may be called from any thread.

    ``id`` names it: a record that begins anew has another one.
    """

    id: str

    def submit(self, batch: Batch) -> Future[Appended]:
        """Return a future that is done once all of the batch is durable, within about 100 ms.

        The future fails with HistoryUnavailable when nothing of the batch was kept. Raises HistoryBusy when too many
        bytes are waiting already.
        """
        ...

    def template(self, id_: bytes) -> bytes | None:
        """Return the template of a durable row by its id; None if it is unknown or was deleted."""
        ...

    def replay(self, since_s: float, frames_max: int) -> Iterator[Recorded | RecordedRow]:
        """Yield the frames from ``since_s`` on in order of their corrected times, at most the newest ``frames_max``.

        So late ones come in their turn: detection only moves forward. Rows of numbers alone stay encoded: a large fleet
        has hundreds of thousands.
        """
        ...

    def query(self, nodes: Sequence[str], start_s: float, end_s: float) -> Iterator[Recorded]:
        """Yield the nodes' frames (all if empty) whose corrected time is in the range.

        Frames come in parts, ordered by where the parts begin in the range; within a part by node, then time. A part is
        what is stored together: some minutes of some nodes, or frames that they sent late.
        """
        ...

    def runs(
        self, metric: MetricSpec, nodes: Sequence[str], start_s: float, end_s: float, job: str | None
    ) -> Iterator[Run]:
        """Yield the metric's values in the range, in parts like ``query``; with ``job`` only from frames that name it.

        Gauges have float32 precision, whichever part they come from.
        """
        ...

    def ranks(self, nodes: Sequence[str], start_s: float, end_s: float) -> Iterator[RankReport]:
        """Yield the ranks that the nodes' frames in the range report, in parts like ``query`` but at lower cost."""
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
        """Open a query of the metric's values in the range, as fine as ``step_s`` needs and as is still kept.

        Buckets are included only if they are entirely in the range. Frame counting stops soon after ``limit``.
        """
        ...

    def count(self, nodes: Sequence[str], start_s: float, end_s: float, limit: int) -> int:
        """Return how many frames ``query`` would read; stops counting soon after ``limit``."""
        ...

    def gaps(self, nodes: Sequence[str], start_s: float, end_s: float, levels: bool) -> list[UnreadableRange]:
        """Return the parts of the range in which data of the nodes (all if empty) is unreadable, in order and disjoint.

        ``levels``: for a query with a step, which minutes and hours can answer as well as frames. Call after reading,
        so that damage found while reading is included.
        """
        ...

    def begins_s(self) -> float | None:
        """Return the time since which all on-time frames are here; None if there are none. Late frames may be older."""
        ...

    def streams(self) -> list[StreamInfo]:
        """Return every stream that the history knows."""
        ...

    def problem(self) -> str | None:
        """Return why frames cannot be made durable at present, or None."""
        ...

    def close(self) -> None:
        """Make durable what was submitted, then release the files."""
        ...


def speaks_of(frame: Frame, job: str) -> bool:
    """Return whether the frame's node or a rank on it belongs to the job."""
    return frame.job == job or any(rank.job == job for rank in frame.ranks)


def runs_of(frames: Iterable[tuple[Frame, float]], metric: MetricSpec) -> Iterator[Run]:
    """Yield the metric's values in the frames at their corrected times; adjacent frames of a node share runs."""
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
