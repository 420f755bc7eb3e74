"""Imports a trace from an existing Prometheus: finds its nodes, asks for their samples in pieces, and writes rows."""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from eagle_eye.schema.frame import WIRE_VERSION, Frame
from eagle_eye.schema.metrics import METRICS, PROMETHEUS_PREFIX
from eagle_eye.schema.names import is_name
from eagle_eye.schema.recording import VERSION
from eagle_eye.server.backtest.recorder import Recorder, TraceWriter
from eagle_eye.server.history.history import Opening
from eagle_eye.server.history.remote_history import (
    MOST_SLICE_S,
    Labels,
    PromQl,
    RemoteSeries,
    any_of,
    frames_of,
    selector,
    slices,
)
from eagle_eye.server.history.remote_series import JOB, NAME, NODE, SCRAPED_JOB
from eagle_eye.server.ingest.remote_write import mapping
from eagle_eye.server.ingest.remote_write.intake import INTERVAL_UNKNOWN_S, NodeSample, RemoteWriteIntake, Taken
from eagle_eye.server.ingest.remote_write.mapping import TARGET_UP, Table
from eagle_eye.server.ingest.remote_write.wire import Sample, WireSeries
from eagle_eye.server.model.errors import ServerError
from eagle_eye.server.model.identity import POD_LABELS, NameClaims, Naming, NoName

OWN_NAMES = tuple(PROMETHEUS_PREFIX + spec.name for spec in METRICS)
NODES_SHOWN = 20


@dataclass(frozen=True)
class ImportRequest:
    """What to import.

    ``matchers`` as between the braces of PromQL; ``nodes`` are globs, (): those that the job label assigns to the job.
    ``naming`` names the nodes, and learns their names in the order of the census.
    """

    job: str
    nodes: tuple[str, ...]
    matchers: str
    naming: Naming
    job_labels: tuple[str, ...]

    @property
    def by_label(self) -> bool:
        """Whether the nodes are selected by the job label."""
        return not self.nodes and not self.matchers


@dataclass
class ImportedNodes:
    """The nodes to import: for each label that names nodes, its values by node; ``own`` for series with our names.

    The label comes with the values that all others must have which say who is meant. ``seen`` are all nodes, wanted or
    not; ``nameless`` counts label sets that name no node, ``complaint`` says what is wrong with the first.
    """

    by_label: dict[tuple[str, tuple[tuple[str, str], ...]], dict[str, set[str]]] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)
    nameless: int = 0
    complaint: str = ""


def foreign_names(table: Table) -> tuple[str, ...]:
    """Return the names of the exporters' series that become metrics or events."""
    return tuple(sorted(name.decode() for name in table.wanted if name != TARGET_UP.encode()))


def census(table: Table, wanted: ImportRequest, window_s: float) -> tuple[str, str]:
    """Return the queries for nodes and their jobs: in exporters' series, and in our own.

    The store groups by the labels that name nodes and jobs: a fleet has a hundred thousand series, but some thousand
    nodes.
    """
    window = f"{round(window_s * 1000.0)}ms"
    of_exporters = with_matchers(selector("", {}, {NAME: any_of(foreign_names(table))}), wanted)
    of_ours = with_matchers(selector("", {}, {NAME: any_of(OWN_NAMES)}), wanted)
    naming = wanted.naming
    labels = ",".join(dict.fromkeys((*naming.node_labels, *POD_LABELS, *naming.cluster_labels, *wanted.job_labels)))
    return (
        f"group by ({labels}) (last_over_time({of_exporters}[{window}]))",
        f"group by ({NODE},{JOB},{SCRAPED_JOB}) (last_over_time({of_ours}[{window}]))",
    )


def with_matchers(of: str, wanted: ImportRequest) -> str:
    """Return the selector with the user's matchers added."""
    return f"{of[:-1]},{wanted.matchers}}}" if wanted.matchers else of


def nodes_of(of_exporters: Iterable[Labels], of_ours: Iterable[Labels], wanted: ImportRequest) -> ImportedNodes:
    """Return the wanted nodes among those in the census."""
    found = ImportedNodes()
    named = [*_by_exporters(of_exporters, wanted, found), *_by_us(of_ours)]
    of_job = {one.node for one in named if one.job == wanted.job}
    for node, label, value, _, fixed in named:
        found.seen.add(node)
        if not (node in of_job if wanted.by_label else _fits(node, wanted.nodes)):
            continue
        found.names.add(node)
        if label:
            found.by_label.setdefault((label, fixed), {}).setdefault(node, set()).add(value)
        else:
            found.own.add(node)
    return found


class _Named(NamedTuple):
    """A node, the label that names it ("": our own series), the label's value, and the job in the series.

    ``fixed`` are the other labels that say who is meant, with their values.
    """

    node: str
    label: str
    value: str
    job: str | None
    fixed: tuple[tuple[str, str], ...] = ()


def _by_exporters(series: Iterable[Labels], wanted: ImportRequest, found: ImportedNodes) -> Iterator[_Named]:
    for labels in sorted(series, key=lambda labels: sorted(labels.items())):
        try:
            node, label = wanted.naming.node(labels)
        except NoName as error:
            found.nameless += 1
            found.complaint = found.complaint or str(error)
            continue
        wanted.naming.add(node)
        job = next((labels[one] for one in wanted.job_labels if labels.get(one)), None)
        others = (*_before(wanted.naming.node_labels, label), *wanted.naming.cluster_labels)
        fixed = tuple((one, labels.get(one, "")) for one in others)
        yield _Named(node, label, labels[label], job, fixed)


def _before(labels: Sequence[str], label: str) -> Sequence[str]:
    return labels[: labels.index(label)]


def _by_us(series: Iterable[Labels]) -> Iterator[_Named]:
    for labels in series:
        node = labels.get(NODE, "")
        if is_name(node):
            yield _Named(node, "", node, labels.get(SCRAPED_JOB) or labels.get(JOB))


def _fits(node: str, globs: Sequence[str]) -> bool:
    return not globs or any(fnmatch.fnmatchcase(node, glob) for glob in globs)


def questions(nodes: ImportedNodes, batch: Sequence[str], table: Table, wanted: ImportRequest) -> list[str]:
    """Return selectors for all series of a batch of nodes, without overlap.

    A series with several labels that name nodes belongs to the first that has a machine's name.
    """
    found = []
    for (label, fixed), by_node in nodes.by_label.items():
        values = sorted({value for node in batch for value in by_node.get(node, ())})
        if values:
            of = selector("", dict(fixed), {NAME: any_of(foreign_names(table)), label: any_of(values)})
            found.append(with_matchers(of, wanted))
    own = sorted(nodes.own.intersection(batch))
    if own:
        of = selector("", {}, {NAME: any_of(OWN_NAMES), NODE: any_of(own)})
        found.append(with_matchers(of, wanted))
    return found


def nothing_found(nodes: ImportedNodes, wanted: ImportRequest) -> str:
    """Return why there is no node to import, and the remedy."""
    if not nodes.seen and not nodes.nameless:
        return (
            "the Prometheus has no series of dcgm-exporter, node_exporter or Eagle Eye in that time"
            + (f" with {wanted.matchers}" if wanted.matchers else "")
            + "; see docs/how-to/prometheus.md for those that are read"
        )
    if not nodes.seen:
        return (
            f"there are series, and their nodes are not known; name the label that has them with --node-label"
            f" ({nodes.complaint})"
        )
    shown = ", ".join(sorted(nodes.seen)[:NODES_SHOWN])
    more = ", ..." if len(nodes.seen) > NODES_SHOWN else ""
    if wanted.nodes:
        return f"no node fits --nodes {' '.join(wanted.nodes)}; there are {shown}{more}"
    return (
        f"no series says by a label ({', '.join(wanted.job_labels)}) that its node works for job {wanted.job!r}; name"
        f" the nodes with --nodes, or the label with --job-label; there are {shown}{more}"
    )


SENDER = "import"
SERIES_MAX = 5_000_000


class Importer:
    """Takes the samples of some nodes, range after range; ``left_out`` counts those that became no value."""

    def __init__(self, table: Table, wanted: ImportRequest) -> None:
        # Timestamps are processed one by one and are complete, so nothing has to wait.
        self._intake = RemoteWriteIntake(
            *(table, wanted.naming.knowing(), NameClaims(), wanted.job_labels, SERIES_MAX, SERIES_MAX),
            lambda _node: None,
            lambda _node: {},
        )
        self._job = wanted.job
        self._only_job = wanted.by_label
        self._sequence = 0
        self.left_out: Counter[str] = Counter()
        self.complaint = ""

    def frames(self, courses: Iterable[RemoteSeries], interval_s: float) -> Iterator[Frame]:
        """Yield the series' samples as frames of the job; ``interval_s`` is that of rows with our own names."""
        foreign: list[RemoteSeries] = []
        own: list[RemoteSeries] = []
        for course in courses:
            (own if course.labels.get(NAME, "").startswith(PROMETHEUS_PREFIX) else foreign).append(course)
        for frame in frames_of(own, interval_s, self._sequence):
            self._sequence = frame.sequence
            if self._only_job and frame.job is not None and frame.job != self._job:
                self.left_out["other_job"] += sum(len(block.values) // 8 for block in frame.blocks)
                continue
            yield msgspec.structs.replace(frame, job=self._job)
        yield from self._of_exporters(foreign)

    def _of_exporters(self, courses: Sequence[RemoteSeries]) -> Iterator[Frame]:
        keys = [_key(course) for course in courses]
        names = [course.labels[NAME] for course in courses]
        by_time: dict[int, list[WireSeries]] = {}
        for course, key, name in zip(courses, keys, names, strict=True):
            for time_s, value in zip(course.times_s.tolist(), course.values.tolist(), strict=True):
                time_ms = round(time_s * 1000.0)
                by_time.setdefault(time_ms, []).append(WireSeries(key, name, [Sample(time_ms, value)]))
        for time_ms in sorted(by_time):
            taken = Taken()
            self._intake.add_series(by_time[time_ms], time_ms / 1000.0, lambda _node: None, taken)
            self.left_out.update(taken.left_out)
            self.left_out.update(taken.refused)
            self.complaint = self.complaint or taken.complaint
            for moment in taken.moments:
                yield self._frame(moment)

    def _frame(self, moment: NodeSample) -> Frame:
        self._sequence += 1
        node = moment.node
        frame = Frame(
            version=WIRE_VERSION,
            node=node.name,
            boot_id="unknown",
            stream=SENDER,
            sequence=self._sequence,
            time_s=moment.time_s,
            interval_s=node.interval_s or INTERVAL_UNKNOWN_S,
            agent_version=SENDER,
            job=self._job,
            blocks=list(moment.blocks()),
            events=list(moment.events),
        )
        moment.kept = moment.version
        moment.events.clear()
        return frame


def _key(course: RemoteSeries) -> bytes:
    """Return the key for a series' labels, in the form of a version 2 request."""
    texts = [text.encode() for pair in sorted(course.labels.items()) for text in pair]
    return b"\xff" + b"\xff".join(texts)


def interval_of(courses: Iterable[RemoteSeries]) -> float | None:
    """Return the most common distance of two samples; None if there are no two."""
    gaps: Counter[float] = Counter()
    for course in courses:
        times = course.times_s
        gaps.update(round(gap_s, 1) for gap_s in (times[1:] - times[:-1]).tolist() if math.isfinite(gap_s))
    return max(gaps.most_common(1)[0][0], 0.1) if gaps else None


NODES_AT_ONCE = 16  # nodes whose samples are processed at a time
POINTS_MAX = 10_000  # of one series in one answer; Prometheus returns up to 11,000
STEP_UNKNOWN_S = 15.0
WINDOW_S = 300.0  # length of the windows in each of which nodes are searched


class NothingToImport(ServerError):
    """The Prometheus has no data of the job in that range; the message says what it has."""


class TooMuch(ServerError):
    """There are more samples than may be imported at once."""


class Imported(msgspec.Struct):
    """What was written. ``left_out`` counts samples that became no value, by reason; times are Unix seconds."""

    trace: str
    job: str
    start: float
    end: float
    seconds: float
    interval_s: float
    nodes: int
    samples: int
    rows: int
    events: int
    left_out: dict[str, int]


Reported = Callable[[str, float], None]  # the current activity, and the completed fraction


def import_trace(
    promql: PromQl,
    out: Path,
    wanted: ImportRequest,
    start_s: float,
    end_s: float,
    step_s: float | None,
    samples_max: int,
    reported: Reported,
) -> Imported:
    """Write the trace. Raises NothingToImport, TooMuch, RemoteStoreSilent, BadTrace.

    With ``step_s`` only the last sample in each step is queried, else all of them.
    """
    table = mapping.load()
    reported("asking for its nodes", 0.0)
    of_exporters, of_ours = (_labels(promql, query, start_s, end_s) for query in census(table, wanted, WINDOW_S))
    nodes = nodes_of(of_exporters, of_ours, wanted)
    if not nodes.names:
        raise NothingToImport(nothing_found(nodes, wanted))
    names = sorted(nodes.names)
    batches = [names[low : low + NODES_AT_ONCE] for low in range(0, len(names), NODES_AT_ONCE)]
    left_out: Counter[str] = Counter()
    samples = 0
    with TraceWriter(out) as writer:
        recorder = Recorder(writer, Opening(version=VERSION, job=wanted.job, now_s=end_s, known=True))
        for number, batch in enumerate(batches):
            importer = Importer(table, wanted)
            interval_s = step_s
            asked = questions(nodes, batch, table, wanted)
            for piece in slices(start_s, end_s, _asker(promql, asked, step_s), _longest_s(step_s)):
                samples += sum(len(course.times_s) for course in piece.courses)
                if samples > samples_max:
                    raise TooMuch(
                        f"more than {samples_max} samples lie in that time (--samples-max); take a shorter time, fewer"
                        " nodes (--nodes), or one sample in so many seconds (--step)"
                    )
                interval_s = interval_s or interval_of(piece.courses)
                for frame in importer.frames(piece.courses, interval_s or STEP_UNKNOWN_S):
                    recorder.add_frame(frame)
                done = (number + (piece.end_s - start_s) / (end_s - start_s)) / len(batches)
                reported(f"{samples} samples of {recorder.nodes} of {len(names)} nodes", done)
            left_out.update(importer.left_out)
        if recorder.frames == 0:
            raise NothingToImport(
                f"{len(names)} nodes are known, and none of their {samples} samples in that time became a value"
                + (f" ({importer.complaint})" if importer.complaint else "")
            )
        header = recorder.finish(start_s, end_s)
    return Imported(
        trace=str(out),
        job=wanted.job,
        start=header.start,
        end=header.end,
        seconds=header.end - header.start,
        interval_s=header.interval_s,
        nodes=recorder.nodes,
        samples=samples,
        rows=recorder.rows,
        events=recorder.events,
        left_out=dict(left_out),
    )


def _labels(promql: PromQl, query: str, start_s: float, end_s: float) -> list[Labels]:
    """Return the labels of all series of the query anywhere in the range."""

    def ask(begin_s: float, until_s: float) -> list[RemoteSeries]:
        return promql.steps(query, until_s - (until_s - begin_s) // WINDOW_S * WINDOW_S, until_s, WINDOW_S)

    found: dict[tuple[tuple[str, str], ...], Labels] = {}
    for piece in slices(start_s, end_s, ask, POINTS_MAX * WINDOW_S):
        found.update({tuple(sorted(course.labels.items())): course.labels for course in piece.courses})
    return list(found.values())


def _longest_s(step_s: float | None) -> float:
    return MOST_SLICE_S if step_s is None else min(MOST_SLICE_S, POINTS_MAX * step_s)


def _asker(
    promql: PromQl, selected: Sequence[str], step_s: float | None
) -> Callable[[float, float], list[RemoteSeries]]:
    def ask(start_s: float, end_s: float) -> list[RemoteSeries]:
        if step_s is None:
            return [course for of in selected for course in promql.raw(of, start_s, end_s)]
        return [course for of in selected for course in promql.thinned(of, start_s, end_s, step_s)]

    return ask
