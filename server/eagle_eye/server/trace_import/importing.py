"""Imports a trace from an existing Prometheus: finds its nodes, queries their samples in pieces, and writes rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from eagle_eye.schema.recording import VERSION
from eagle_eye.server.backtest.recorder import Recorder
from eagle_eye.server.backtest.writer import TraceWriter
from eagle_eye.server.history.history import Opening
from eagle_eye.server.history.remote_history import MOST_SLICE_S, Labels, PromQl, RemoteSeries, slices
from eagle_eye.server.ingest.remote_write import mapping
from eagle_eye.server.model.errors import ServerError
from eagle_eye.server.trace_import.catalogued import ImportRequest, census, nodes_of, nothing_found, questions
from eagle_eye.server.trace_import.samples import Importer, interval_of

NODES_AT_ONCE = 16  # nodes whose samples are processed at a time
POINTS_MAX = 10_000  # of one series in one answer; Prometheus returns up to 11,000
INTERVAL_UNKNOWN_S = 15.0
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
                for frame in importer.frames(piece.courses, interval_s or INTERVAL_UNKNOWN_S):
                    recorder.take(frame)
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
