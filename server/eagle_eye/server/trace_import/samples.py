"""Converts a Prometheus' samples to frames: exporters' series as remote write does, our own directly. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from eagle_eye.schema.frame import WIRE_VERSION, Frame
from eagle_eye.schema.metrics import PROMETHEUS_PREFIX
from eagle_eye.server.history.remote_history import RemoteSeries, frames_of
from eagle_eye.server.history.remote_series import NAME
from eagle_eye.server.ingest.remote_write.intake import RemoteWriteIntake, Taken
from eagle_eye.server.ingest.remote_write.mapping import Table
from eagle_eye.server.ingest.remote_write.rows import INTERVAL_UNKNOWN_S, NodeSample
from eagle_eye.server.ingest.remote_write.wire import Sample, WireSeries
from eagle_eye.server.model.identity import NameClaims
from eagle_eye.server.trace_import.catalogued import ImportRequest

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
            self._intake.take(by_time[time_ms], time_ms / 1000.0, lambda _node: None, taken)
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
