"""What a report on judged traces contains: the scores, and each verdict with the evidence drawn from its trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eagle_eye.cli.reports.incident import Mark
from eagle_eye.detectors.faults import BY_NAME as FAULTS
from eagle_eye.schema.metrics import MetricSpec, Scope
from eagle_eye.server.backtest.judging import JudgedTraces
from eagle_eye.server.backtest.run import VerdictLine
from eagle_eye.server.backtest.trace import Trace
from eagle_eye.server.backtest.trace_format import LINKS_FILE, SAMPLES_FILE, Label
from eagle_eye.server.charts import plots
from eagle_eye.server.charts.plots import AFTER_S, BEFORE_S, Cast, Panel, Stretch, cast, panels, stretch
from eagle_eye.server.history.history import Run, in_steps
from eagle_eye.server.model.timestamps import rfc3339

VERDICTS_MAX = 50  # with pictures; the table has all
CHARTS_MAX = 3  # of one verdict
SERIES_MAX = 4_096


class DrawnVerdict(NamedTuple):
    """A verdict, ``since_s`` after its trace's start, with its charts and the moments that they show."""

    line: VerdictLine
    since_s: float
    charts: tuple[Mapping[str, Any], ...]
    marks: tuple[Mark, ...]


class JudgedTrace(NamedTuple):
    """One trace: its labels, None where it has none, and its verdicts; ``start`` is Unix seconds."""

    name: str
    start: float
    nodes: int
    seconds: float
    labels: Sequence[Label] | None
    verdicts: tuple[DrawnVerdict, ...]


def traces(folders: Sequence[Path], judged: JudgedTraces) -> Iterator[JudgedTrace]:
    """Yield the traces with their charts, which are read from the traces' files. Raises BadTrace, OSError."""
    left = VERDICTS_MAX
    for folder in folders:
        trace = Trace(folder)
        header, labels = trace.header, trace.labels()
        drawn = []
        for line in (one for one in judged.lines if one.trace == str(folder)):
            charts = tuple(_charts(trace, line)) if left > 0 else ()
            left -= 1
            marks = [Mark(line.onset, "onset"), Mark(line.time, line.action.replace("_", " "))]
            marks += [Mark(label.start, f"label: {label.fault.replace('_', ' ')}") for label in labels or ()]
            drawn.append(DrawnVerdict(line, line.time - header.start, charts, tuple(marks)))
        yield JudgedTrace(folder.name, header.start, len(header.nodes), header.end - header.start, labels, tuple(drawn))


def _charts(trace: Trace, line: VerdictLine) -> Iterator[Mapping[str, Any]]:
    fault = FAULTS.get(line.fault)
    header = trace.header
    lasted_s = line.time - line.onset
    start_s = max(header.start, line.onset - max(BEFORE_S, lasted_s))
    shown = stretch(start_s, min(header.end, line.time + AFTER_S), least_s=header.interval_s)
    for panel in panels(line.evidence, "" if fault is None else fault.trouble)[:CHARTS_MAX]:
        accused = [panel.node] if panel.node is not None else [line.node] if line.node is not None else line.nodes
        members = trace.members_at(line.onset)
        nodes = [node.node for node in header.nodes]
        who = cast((), None, (), nodes) if 2 * len(accused) > max(len(nodes), 2) else None
        who = who or cast(accused, panel.device, members, nodes)
        chart = _chart(trace.folder, panel, who, shown, line.time)
        if chart is not None:
            yield chart


def _chart(folder: Path, panel: Panel, who: Cast, shown: Stretch, reported_s: float) -> Mapping[str, Any] | None:
    """Return the chart with the keys of the API's picture; None if the trace does not have the metric."""
    drawing = panel.drawing
    runs = _runs(folder, drawing.metric, {*who.accused, *who.peers}, shown)
    if not runs:
        return None
    metric, statistic = drawing.metric, plots.statistic_of(drawing)
    series = in_steps(runs, metric, statistic, shown.start_s, shown.step_s, SERIES_MAX)
    found = plots.band(series, shown.steps, drawing, who)
    name = ", ".join(who.accused) or "the job"
    name = name if who.device is None else f"{name} device {who.device}"
    columns = {"accused": found.accused, "low": found.low, "median": found.median, "high": found.high}
    return {
        "metric": metric.name,
        "unit": {"behind": "collectives", "bits": "bool"}.get(drawing.form, metric.unit),
        "threshold": drawing.threshold,
        "name": name,
        "shows": plots.axis_label(metric, drawing),
        "said": plots.described(found, shown, drawing, who, name, reported_s),
        "start": rfc3339(shown.start_s),
        "end": rfc3339(shown.end_s),
        "peers": {"nodes": len(who.peers)},
        "columns": {"time": shown.times_s, **{key: values.tolist() for key, values in columns.items()}},
    }


def _runs(folder: Path, metric: MetricSpec, nodes: set[str], shown: Stretch) -> list[Run]:
    """Return the metric's observations of these nodes, one run a series."""
    file, key = (LINKS_FILE, "link") if metric.scope is Scope.LINK else (SAMPLES_FILE, "device")
    path = folder / file
    if not path.exists() or metric.name not in pq.read_schema(path).names:
        return []
    within = (pc.field("time") >= shown.start_s) & (pc.field("time") < shown.end_s)
    table = pq.read_table(path, columns=["time", "node", key, metric.name], filters=within)
    table = table.filter(pc.is_in(table["node"].cast(pa.string()), pa.array(sorted(nodes), pa.string())))
    values = table[metric.name].cast(pa.float64()).to_numpy(zero_copy_only=False)
    times_s, names, keys = table["time"].to_numpy(), table["node"].to_pylist(), table[key].to_pylist()
    places: dict[tuple[str, int | str], list[int]] = {}
    for at in np.flatnonzero(~np.isnan(values)).tolist():
        places.setdefault((names[at], keys[at]), []).append(at)
    found = []
    for (node, of), rows in places.items():
        order = np.array(rows)[np.argsort(times_s[rows], kind="stable")]
        found.append(Run(node, of, times_s[order], values[order]))
    return found
