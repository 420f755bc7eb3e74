"""Reports as HTML files that load nothing, for light and dark screens and for paper, with the evidence drawn as SVG."""

from __future__ import annotations

import datetime as dt
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import markupsafe
import matplotlib as mpl
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from eagle_eye.cli.main import version
from eagle_eye.cli.reports import CAUSES, HOUR_S, AccountsReport, IncidentReport, Mark, hours, job_row, share, total_row
from eagle_eye.cli.show import figure, observation, words
from eagle_eye.detectors.faults import BY_NAME as FAULTS
from eagle_eye.schema.labels import number
from eagle_eye.schema.metrics import MetricSpec, Scope
from eagle_eye.schema.record_types import prepare_record_types
from eagle_eye.schema.times import unix_seconds
from eagle_eye.server.backtest.command import SCORE_COLUMNS, score_line
from eagle_eye.server.backtest.run import JudgedTraces, VerdictLine
from eagle_eye.server.backtest.trace import LINKS_FILE, SAMPLES_FILE, Label, Trace
from eagle_eye.server.charts import plots
from eagle_eye.server.charts.plots import AFTER_S, BEFORE_S, Cast, Panel, Stretch, cast, panels, stretch
from eagle_eye.server.history.history import Run, in_steps
from eagle_eye.server.model.clock import rfc3339

ACCUSED, PEERS, THRESHOLD = "#c8324b", "#7d8ba1", "#b3730a"  # legible on white and on dark
INK = "#010203"  # replaced by the page's own text colour, light or dark
SIZE_INCHES = (8.4, 2.9)
NAME_SHARE = 0.01  # of the width, that a character of a moment's name takes
# Texts stay texts, "$" is no formula, and the same numbers make the same file.
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "eagle-eye",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}


def svg(chart: Mapping[str, Any], marks: Sequence[Mark]) -> str:
    """Return the chart as an SVG element; what was not observed is a gap, what was not finite is left out of it."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.subplots()
        _draw(axes, chart)
        _mark(axes, chart, marks)
        return _svg(figure)


def bars(names: Sequence[str], amounts: Sequence[float], unit: str) -> str:
    """Return a horizontal bar for each amount, the first on top, as an SVG element."""
    figure = Figure(figsize=(SIZE_INCHES[0], 0.6 + 0.28 * len(names)), layout="constrained")
    with mpl.rc_context(_STYLE):
        axes = figure.subplots()
        places = range(len(names))
        drawn = axes.barh(places, amounts, color=ACCUSED, height=0.7)
        axes.bar_label(drawn, [f"{amount:,.2f}" for amount in amounts], padding=3)
        axes.set_yticks(places, names)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel(unit)
        axes.spines[["top", "right"]].set_visible(False)
        return _svg(figure)


def _svg(figure: Figure) -> str:
    sink = io.StringIO()
    figure.savefig(sink, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = sink.getvalue().replace(INK, "currentColor")
    return text[text.index("<svg") :]


def _draw(axes: Axes, chart: Mapping[str, Any]) -> None:
    columns, unit = chart["columns"], chart["unit"]
    moments = [_moment(time_s) for time_s in columns["time"]]
    low, median, high, accused = (_finite(columns[name]) for name in ("low", "median", "high", "accused"))
    if any(map(math.isfinite, median)):
        label = f"{chart['peers']['nodes']} peers: median, range"
        axes.fill_between(moments, low, high, color=PEERS, alpha=0.25, linewidth=0)  # type: ignore[arg-type]
        axes.plot(moments, median, color=PEERS, linewidth=1.2, label=label)  # type: ignore[arg-type]
    axes.plot(moments, accused, color=ACCUSED, linewidth=2.2, label=chart["name"])  # type: ignore[arg-type]
    if chart["threshold"] is not None:
        label = f"threshold {number(chart['threshold'], unit)}"
        axes.axhline(chart["threshold"], color=THRESHOLD, linewidth=1.2, linestyle=(0, (5, 3)), label=label)
    locator = AutoDateLocator(minticks=3)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=dt.timezone.utc))  # type: ignore[no-untyped-call]
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, unit)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(_moment(unix_seconds(chart["start"])), _moment(unix_seconds(chart["end"])))  # type: ignore[arg-type]
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.14), ncols=3, frameon=False, borderaxespad=0)


def _mark(axes: Axes, chart: Mapping[str, Any], marks: Sequence[Mark]) -> None:
    """Draw the moments within the chart as lines, named above it; names that would overlap take another row."""
    start_s = unix_seconds(chart["start"])
    length_s = max(unix_seconds(chart["end"]) - start_s, 1e-9)
    ends: list[float] = []  # of the last name in each row, in shares of the width
    for mark in sorted(marks):
        share = (mark.time_s - start_s) / length_s
        if not 0 <= share <= 1:
            continue
        width = NAME_SHARE * (len(mark.name) + 3)
        begin = min(share, 1 - width)
        row = next((at for at, end in enumerate(ends) if begin > end), len(ends))
        ends[row : row + 1] = [begin + width]
        axes.axvline(_moment(mark.time_s), color=INK, linewidth=0.8, linestyle=":")  # type: ignore[arg-type]
        axes.annotate(
            mark.name, (begin, 1), xycoords="axes fraction", xytext=(2, 2 + 11 * row), textcoords="offset points",
            fontsize=8, annotation_clip=False,
        )  # fmt: skip


def _finite(values: Sequence[float | str | None]) -> list[float]:
    return [value if isinstance(value, int | float) else math.nan for value in values]


def _moment(time_s: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(time_s, dt.timezone.utc)


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


def judged_traces(folders: Sequence[Path], judged: JudgedTraces) -> Iterator[JudgedTrace]:
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


_TEMPLATES = Path(__file__).parent / "templates"
_BARS_MAX = 15


class ReportOrigin(NamedTuple):
    """When a report was made, by which version, and whether names are replaced in it."""

    made: str
    version: str
    redacted: bool = False


def origin(*, redacted: bool = False) -> ReportOrigin:
    """Return that of a report that is made now, by this version."""
    made = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
    return ReportOrigin(made, version(), redacted)


def incident_page(report: IncidentReport, origin: ReportOrigin) -> str:
    """Return the file's text. Texts of the fleet are escaped."""
    record = report.record
    return _render(
        "incident.html",
        origin,
        record=record,
        dossier=report.dossier,
        fault=words(record["fault"]).capitalize(),
        where=_where(record),
        facts=[(name, value) for name, value in _facts(report) if value],
        took=report.took,
        evidence=[observation(item) for item in record["evidence"]],
        charts=[(chart, markupsafe.Markup(svg(chart, report.marks))) for chart in report.charts],  # noqa: S704
        unknown=report.unknown,
        actions=[{**one, "asked": f"{words(one['kind'])} {', '.join(one['exclude'])}"} for one in _actions(report)],
    )


def accounts_page(report: AccountsReport, origin: ReportOrigin) -> str:
    """Return the file's text. Texts of the fleet are escaped."""
    total = report.jobs["total"]
    lost, ratio = hours(total["lost_gpu_seconds"]), total["goodput_ratio"]
    goodput = "the goodput is not known" if ratio is None else f"the goodput was {ratio:.1%}"
    return _render(
        "accounts.html",
        origin,
        since=report.jobs["since"],
        until=report.jobs["until"],
        summary=f"{lost} GPU-hours were lost; {goodput}.",
        facts=[
            ("jobs", f"{len(report.jobs['items']) + report.jobs['left_out']:,}"),
            ("hours of jobs", hours(total["wall"]["seconds"])),
            ("GPU-hours", hours(total["wall"]["gpu_seconds"])),
            ("training, of the time", share(total["ettr_ratio"])),
            *((words(part), f"{hours(of['gpu_seconds'])} GPU-hours") for part, of in total["lost"].items()),
        ],
        causes=[_cause(report.causes[by]["items"], by) for by in CAUSES],
        jobs=[job_row(item) for item in report.jobs["items"]],
        ledger=_ledger(report.ledger),
        ledger_since=report.ledger["since"],
        unknown=report.unknown,
    )


def backtest_page(traces: Iterable[JudgedTrace], judged: JudgedTraces, origin: ReportOrigin) -> str:
    """Return the file's text. Texts of the traces are escaped."""
    score, totals = judged.card.report(), judged.totals
    scores = [*score["faults"].items(), ("all", score["overall"])] if score["node_days"] else []
    unknown = [
        f"{words(name)} could not tell in {ratio:.0%} of {totals.judgements:,} judgements"
        for name, ratio in totals.ratios().items()
    ]
    return _render(
        "backtest.html",
        origin,
        traces=[(one, [_drawn(verdict) for verdict in one.verdicts]) for one in traces],
        columns=SCORE_COLUMNS,
        scores=[{"fault": words(fault), **{k: figure(of[k], "1") for k in SCORE_COLUMNS}} for fault, of in scores],
        score_line=score_line(score) if scores else "",
        unknown=[*unknown, *totals.remarks()],
    )


def _drawn(verdict: DrawnVerdict) -> dict[str, Any]:
    line = verdict.line
    return {
        "since": number(verdict.since_s, "seconds"),
        "fault": words(line.fault),
        "who": ", ".join(line.nodes) or "no single node",
        "action": words(line.action),
        "summary": line.summary,
        "confidence": f"{line.confidence:.0%}",
        "charts": [(one, markupsafe.Markup(svg(one, verdict.marks))) for one in verdict.charts],  # noqa: S704
    }


def _render(template: str, origin: ReportOrigin, **values: Any) -> str:
    loader = jinja2.FileSystemLoader(_TEMPLATES)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    environment.filters |= {"words": words, "moment": _time}
    return environment.get_template(template).render(**origin._asdict(), **values)


def _cause(items: Sequence[Mapping[str, Any]], by: str) -> tuple[str, markupsafe.Markup, list[dict[str, str]], str]:
    rows = [
        {
            "name": words(item[by]) if by == "fault" and item[by] else item[by] or f"no single {by}",
            "gpu_hours": hours(item["gpu_seconds"]),
            "hours": hours(item["seconds"]),
            "parts": ", ".join(f"{part} {hours(amount['gpu_seconds'])}" for part, amount in item["lost"].items()),
        }
        for item in items
    ]
    most = rows[:_BARS_MAX]
    amounts = [item["gpu_seconds"] / HOUR_S for item in items[:_BARS_MAX]]
    drawn = bars([row["name"] for row in most], amounts, "GPU-hours") if most else ""
    title = f"GPU-hours, the {_BARS_MAX} most" if len(rows) > _BARS_MAX else "GPU-hours"
    return title, markupsafe.Markup(drawn), rows, by  # noqa: S704


def _ledger(ledger: Mapping[str, Any]) -> list[dict[str, Any]]:
    counted = [("all", ledger["total"]), *ledger["by_fault"].items()]
    rows = [total_row(name, of) for name, of in counted]
    return rows if any(rows[0][name] for name in ("right", "wrong", "pending", "cannot_tell")) else []


def _facts(report: IncidentReport) -> Iterator[tuple[str, str]]:
    record, dossier = report.record, report.dossier
    yield "job", f"{record['job']}, attempt {record['attempt']}"
    yield "owner", dossier["owner"]
    for place in dossier["where"]:
        yield "node", ", ".join(filter(None, (place["node"], words(place["phase"] or place["state"] or "unknown"))))
        yield "rack, switch", ", ".join(filter(None, (place["rack"], place["switch"])))
        for gpu in place["gpus"]:
            said = (gpu.get("model"), f"serial {gpu['serial']}" if gpu.get("serial") else "", gpu.get("uuid"))
            yield "GPU", ", ".join(filter(None, said))
    yield "device", "" if record["device"] is None else str(record["device"])
    yield "began", _time(record["onset"])
    yield "found", _time(record["detected"])
    yield "over", _time(record["ended"]) if record["ended"] else "not yet"
    yield "kinds of evidence", ", ".join(map(words, record["kinds"]))
    yield "found by", ", ".join(map(words, record["detectors"]))
    yield "usual repair", dossier["repair"]


def _actions(report: IncidentReport) -> list[Mapping[str, Any]]:
    return sorted(report.dossier["actions"], key=lambda action: str(action["created"]))


def _time(moment: str) -> str:
    """Return one of the API's times without its fractions."""
    return moment[:19].replace("T", " ")


def _where(record: Mapping[str, Any]) -> str:
    return ", ".join(record["nodes"]) or "no single node"


prepare_record_types()  # for those who import this module late
