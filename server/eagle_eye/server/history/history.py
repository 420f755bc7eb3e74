"""The History protocol: everything the server asks of sample storage, so that another store can implement it. Pure.

Before it: how values are summarized in buckets. After it: what is made of a store's answers, one value for each step of
a query, and the recording of a job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from eagle_eye.schema.action import MemberRank
from eagle_eye.schema.frame import Block, Frame, Rank
from eagle_eye.schema.metrics import MetricKind, MetricSpec, Scope
from eagle_eye.server.engine.roster import Topology
from eagle_eye.server.model.batch import Batch
from eagle_eye.server.model.clock import corrected

# A metric's values per bucket: minimum, maximum, mean, first, last, count, and a counter's increase. All of these
# combine: the summary of an hour follows from those of its minutes exactly as from the values themselves. NaN values
# count as not observed and are ignored everywhere.

BITS_MAX = 2.0**53  # integers up to here are exact; larger values are no bit masks

Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]


class Summary(NamedTuple):
    """Summaries of buckets, in arrays of equal length; NaN means that there is no such number.

    ``counts`` are numbers of observations; where it is 0 the others are NaN. For a bit mask, ``low`` holds the bits
    that were always set and ``high`` those ever set; invalid masks (negative, fractional, beyond 2**53) count in
    neither. ``mean`` is that of a gauge or a mask. ``increase`` is a counter's growth between first and last value;
    where it fell it was reset, and its new value is the growth since then. The mean of values with infinities is +inf,
    and their increase is NaN.
    """

    counts: Integers
    low: Floats
    high: Floats
    mean: Floats
    first: Floats
    last: Floats
    increase: Floats


class BucketSeries(NamedTuple):
    """Part of one series: a metric of a device, a link or (-1) a node, in buckets that begin at ``times_s``.

    ``began_s`` is the time of each bucket's first value, to the second; it orders parts of the same bucket.
    """

    node: str
    key: int | str
    times_s: Floats
    summary: Summary
    began_s: Floats


def summarize(values: np.ndarray[Any, Any], starts: Integers, kind: MetricKind, missing: int | None = None) -> Summary:
    """Return the summary of each bucket: values ``starts[i]`` to before ``starts[i + 1]``, in order of time.

    No bucket is empty. ``missing`` is the number of NaN values, if known.
    """
    if missing is None:
        missing = int(np.count_nonzero(np.isnan(values)))
    if missing == 0:
        return _summarize(values, starts, np.diff(starts, append=len(values)), kind)
    seen = np.flatnonzero(~np.isnan(values))
    bounds = np.searchsorted(seen, np.append(starts, len(values)))
    counts = np.diff(bounds)
    some = counts > 0
    found = _no_numbers(len(starts))
    if some.any():
        for whole, part in zip(found, _summarize(values[seen], bounds[:-1][some], counts[some], kind), strict=True):
            whole[some] = part
    return found


def combine(parts: Summary, starts: Integers, kind: MetricKind) -> Summary:
    """Return one summary for each group of parts, ``starts[i]`` to before ``starts[i + 1]``, in order of time.

    Every part has observations. The parts of a group do not overlap in time.
    """
    count = np.add.reduceat(parts.counts, starts)
    ends = np.append(starts[1:], len(parts.counts)) - 1
    first, last = parts.first[starts], parts.last[ends]
    if kind is MetricKind.MASK:
        low, high = _bits(parts.low, np.bitwise_and, starts), _bits(parts.high, np.bitwise_or, starts)
    else:
        low, high = np.minimum.reduceat(parts.low, starts), np.maximum.reduceat(parts.high, starts)
    mean = increase = np.full(len(starts), np.nan)
    with np.errstate(invalid="ignore", over="ignore"):
        if kind in (MetricKind.GAUGE, MetricKind.MASK):
            mean = _mean(np.add.reduceat(parts.mean * parts.counts, starts), count)
        if kind is MetricKind.COUNTER:
            between = _growth(parts.last[:-1], parts.first[1:])
            increase = np.add.reduceat(parts.increase, starts) + _within(between, starts, len(parts.counts))
            increase = _finite(increase, low, high)
    return Summary(count, low, high, mean, first, last, increase)


def taken(summary: Summary, rows: np.ndarray[Any, Any] | slice) -> Summary:
    """Return the buckets selected by ``rows`` (indexes, a mask or a slice)."""
    columns: list[Any] = [column[rows] for column in summary]
    return Summary(*columns)


def joined(summaries: Iterable[Summary]) -> Summary:
    """Return all buckets of the summaries, concatenated."""
    return Summary(*(np.concatenate(columns) for columns in zip(*summaries, strict=True)))


def _no_numbers(length: int) -> Summary:
    return Summary(np.zeros(length, dtype=np.int64), *(np.full(length, np.nan) for _ in range(6)))


def _summarize(values: np.ndarray[Any, Any], starts: Integers, counts: Integers, kind: MetricKind) -> Summary:
    """Return the summaries of values without NaN, ``counts`` of them in each bucket."""
    ends = np.append(starts[1:], len(values)) - 1
    first, last = values[starts].astype(np.float64), values[ends].astype(np.float64)
    mean = increase = np.full(len(starts), np.nan)
    with np.errstate(invalid="ignore", over="ignore"):
        if kind is MetricKind.MASK:
            low, high = _bits(values, np.bitwise_and, starts), _bits(values, np.bitwise_or, starts)
        else:
            low = np.minimum.reduceat(values, starts).astype(np.float64)
            high = np.maximum.reduceat(values, starts).astype(np.float64)
        if kind in (MetricKind.GAUGE, MetricKind.MASK):
            mean = _mean(np.add.reduceat(values, starts, dtype=np.float64), counts)
        elif kind is MetricKind.COUNTER:
            falls = np.flatnonzero(values[1:] < values[:-1]) + 1
            if np.isin(falls, starts).all():
                increase = last - first
            else:
                increase = _within(_growth(values[:-1], values[1:]), starts, len(values))
            increase = _finite(increase, low, high)
    return Summary(counts, low, high, mean, first, last, increase)


def _mean(sums: Floats, counts: Integers) -> Floats:
    """Return the means with a gauge's precision; +inf where infinities of both signs met, like all non-finite means."""
    means: Floats = (sums / counts).astype(np.float32).astype(np.float64)
    means[np.isnan(means)] = np.inf
    return means


def _finite(increase: Floats, low: Floats, high: Floats) -> Floats:
    """Return the increase; NaN where not all values were finite."""
    return np.where(np.isfinite(low) & np.isfinite(high), increase, np.nan)


def _growth(before: np.ndarray[Any, Any], after: np.ndarray[Any, Any]) -> Floats:
    return np.where(after < before, after, after - before)


def _within(steps: Floats, starts: Integers, length: int) -> Floats:
    """Return the sum of the steps within each group; step i leads from value i to value i + 1."""
    own = np.zeros(length)
    own[1:] = steps
    own[starts] = 0.0
    sums: Floats = np.add.reduceat(own, starts)
    return sums


def _bits(values: np.ndarray[Any, Any], fold: Any, starts: Integers) -> Floats:
    """Return the bits of each group's values folded; NaN where none of them is a bit mask."""
    good = (values >= 0) & (values < BITS_MAX) & (values == np.floor(values))
    neutral = -1 if fold is np.bitwise_and else 0
    bits = np.full(len(values), neutral, dtype=np.int64)
    bits[good] = values[good].astype(np.int64)
    folded: Floats = fold.reduceat(bits, starts).astype(np.float64)
    folded[~np.logical_or.reduceat(good, starts)] = np.nan
    return folded


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


# One value of a metric for each step of a query, from values and from buckets.

Statistic = Literal["last", "min", "max", "mean", "increase"]
SeriesKey = tuple[str, int | str]  # a node, and a device, a link or (-1) itself

_KINDS_OF = {
    "mean": (MetricKind.GAUGE, MetricKind.MASK),
    "increase": (MetricKind.COUNTER,),
}

PARTS_MAX = 4_096  # buckets of a series in memory: beyond this, those of a step are combined


class TooManySeries(Exception):
    """There are more series than allowed."""


class SeriesSteps(NamedTuple):
    """One series: the steps that have a value, counted from 0, and the values."""

    steps: list[int]
    values: list[float]


class _SeriesParts(NamedTuple):
    """What is known of one series: for each part its time, its step and its summary."""

    times_s: list[Floats]
    steps: list[Floats]
    summaries: list[Summary]

    def add(self, times_s: Floats, steps: Floats, summary: Summary) -> None:
        """Add some parts."""
        self.times_s.append(times_s)
        self.steps.append(steps)
        self.summaries.append(summary)

    def length(self) -> int:
        """Return how many parts there are."""
        return sum(map(len, self.steps))

    def together(self, kind: MetricKind) -> tuple[Floats, Floats, Summary]:
        """Return one combined part for each step, in order."""
        steps, times_s = np.concatenate(self.steps), np.concatenate(self.times_s)
        order = np.lexsort((times_s, steps))
        steps, times_s = steps[order], times_s[order]
        starts = np.flatnonzero(np.append(True, steps[1:] != steps[:-1]))
        return times_s[starts], steps[starts], combine(taken(joined(self.summaries), order), starts, kind)


def applies_to(statistic: Statistic, metric: MetricSpec) -> bool:
    """Return whether the statistic applies to the metric: no mean of a counter, no increase of a gauge."""
    return metric.kind in _KINDS_OF.get(statistic, tuple(MetricKind))


def in_steps(
    courses: Iterable[Run | BucketSeries],
    metric: MetricSpec,
    statistic: Statistic,
    start_s: float,
    step_s: float,
    series_max: int,
) -> dict[SeriesKey, SeriesSteps]:
    """Return the statistic of each series in each step (counted from ``start_s``) that has an observation.

    A bucket belongs to the step in which it begins. A counter's increase in a step is relative to the last value before
    it. Raises TooManySeries.
    """
    found: dict[SeriesKey, _SeriesParts] = {}
    for course in courses:
        parts = found.setdefault((course.node, course.key), _SeriesParts([], [], []))
        if len(found) > series_max:
            raise TooManySeries
        steps = np.floor((course.times_s - start_s) / step_s)
        if isinstance(course, BucketSeries):
            parts.add(course.began_s, steps, course.summary)
            if parts.length() > PARTS_MAX:
                began_s, of_steps, summary = parts.together(metric.kind)
                found[course.node, course.key] = _SeriesParts([began_s], [of_steps], [summary])
        else:
            starts = np.flatnonzero(np.append(True, steps[1:] != steps[:-1]))
            parts.add(course.times_s[starts], steps[starts], summarize(course.values, starts, metric.kind, 0))
    return {key: _of_series(parts, metric.kind, statistic) for key, parts in found.items()}


def _of_series(parts: _SeriesParts, kind: MetricKind, statistic: Statistic) -> SeriesSteps:
    _, steps, summary = parts.together(kind)
    values = {"min": summary.low, "max": summary.high}.get(statistic)
    if values is None:
        values = getattr(summary, statistic)
    if statistic == "increase":
        with np.errstate(invalid="ignore"):
            before, first = summary.last[:-1], summary.first[1:]
            values = values + np.append(0.0, np.where(first < before, first, first - before))
    seen = ~np.isnan(values)
    return SeriesSteps(steps[seen].astype(np.int64).tolist(), values[seen].tolist())


# What a job's recording holds (the stream is ``schema/recording.py``'s): an opening, then frames of that job alone.


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


def job_frames(recorded: Iterable[Recorded], job: str, members: set[str]) -> Iterator[Frame]:
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
