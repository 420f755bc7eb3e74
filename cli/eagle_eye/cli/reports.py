"""Reports for people who were not there: one self-contained HTML file with its evidence drawn, or the numbers alone.

In: answers of the server's API. Out: text or a file's bytes; of what is here only ``gather_*`` ask the server.
HTML (``html_reports.py``) needs the extra ``reports`` (Jinja2, matplotlib), numbers need what the server has.
"""

from __future__ import annotations

import contextlib
import csv
import datetime as dt
import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from eagle_eye.client import Client, ClientError
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.labels import metric_label, number
from eagle_eye.schema.times import unix_seconds
from eagle_eye.server.store.store import PAGE_LIMIT_MAX


@contextlib.contextmanager
def needs_extra(flag: str) -> Iterator[None]:
    """Import what a page needs inside this. Raises ConfigurationError that names the extra where it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        needs = f'{flag} needs: pip install "eagle-eye[reports]" (no module {error.name})'
        raise ConfigurationError(needs) from None


def write_file(file: Path, content: bytes) -> None:
    """Write the file and print its name and size. Raises OSError."""
    file.write_bytes(content)
    sys.stdout.write(f"{file}: {len(content) / 1e3:.0f} kB\n")


CHARTS_MAX = 6
LATER_S = 1_800.0  # after the incident's last change in which training is expected to have gone on
TRAINS = ("training", "slow")
EXECUTED = ("running", "done", "failed")  # reports by which an action had begun


class Mark(NamedTuple):
    """A moment that the charts show; Unix seconds."""

    time_s: float
    name: str


class IncidentReport(NamedTuple):
    """The answers that a report is made of. ``undrawn`` maps metrics that were to be drawn to why they are not."""

    dossier: Mapping[str, Any]
    charts: tuple[Mapping[str, Any], ...]
    undrawn: Mapping[str, str]
    trains_again_s: float | None

    @property
    def record(self) -> Mapping[str, Any]:
        """The incident."""
        record: Mapping[str, Any] = self.dossier["incident"]
        return record

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Onset, verdict, actions, the end and the first step after it, in this order."""
        record = self.record
        found = [Mark(unix_seconds(record["onset"]), "onset"), Mark(unix_seconds(record["detected"]), "verdict")]
        found += [Mark(unix_seconds(one["created"]), one["kind"].replace("_", " ")) for one in self.dossier["actions"]]
        if record["ended"]:
            found.append(Mark(unix_seconds(record["ended"]), "end"))
        if self.trains_again_s is not None:
            found.append(Mark(self.trains_again_s, "trains again"))
        return tuple(found)

    @property
    def took(self) -> tuple[tuple[str, str], ...]:
        """How long each stage took since the onset, as text; what did not happen, or is not known, is left out."""
        first: dict[str, float] = {}
        for mark in self.marks:
            first.setdefault(mark.name, mark.time_s)
        onset_s = first.pop("onset")
        return tuple((name, number(max(0.0, time_s - onset_s), "seconds")) for name, time_s in first.items())

    @property
    def unknown(self) -> tuple[str, ...]:
        """What this report cannot tell, in sentences."""
        sentences = [f"{metric_label(metric)} could not be drawn: {why}" for metric, why in self.undrawn.items()]
        for chart in self.charts:
            seen = any(value is not None for value in chart["columns"]["accused"])
            if not seen:
                sentences.append(f"{metric_label(chart['metric'])}: nothing was observed of {chart['name']}")
            elif chart["silences"]:
                times = "once" if len(chart["silences"]) == 1 else f"{len(chart['silences'])} times"
                label = metric_label(chart["metric"])
                sentences.append(f"{label}: {chart['name']} was silent {times} while its peers were observed")
        if not self.dossier["actions"]:
            sentences.append("no action was asked for, so that nobody reported what became of it")
        elif self.trains_again_s is None:
            sentences.append("when training went on is not known")
        if self.dossier["story_left_out"] or self.dossier["cut"]:
            sentences.append("older entries of what happened are left out; eagle-eye audit has them")
        if self.dossier["where_left_out"]:
            sentences.append(f"{self.dossier['where_left_out']} more nodes are concerned")
        return tuple(sentences)


def gather_incident(client: Client, incident: str, progress: Callable[[str], None] = lambda _: None) -> IncidentReport:
    """Ask the server for all of it; ``progress`` is told what is asked for. Raises ClientError."""
    path = f"/api/v1/incidents/{quote(incident, safe='')}"
    progress("the incident")
    dossier = client.call("GET", f"{path}/dossier")
    charts, undrawn = [], {}
    for panel in dossier["panels"][:CHARTS_MAX]:
        progress(f"the course of {metric_label(panel['metric'])}")
        query = {"metric": panel["evidence"] or panel["metric"], "node": panel["node"], "device": panel["device"]}
        try:
            charts.append(client.call("GET", f"{path}/picture", query))
        except ClientError as error:
            undrawn[panel["metric"]] = str(error)
    progress("what the job did afterwards")
    return IncidentReport(dossier, tuple(charts), undrawn, _trains_again_s(client, dossier))


def _trains_again_s(client: Client, dossier: Mapping[str, Any]) -> float | None:
    """Return when the job's first step after the first executed action began to count; None: not known."""
    acted = [
        unix_seconds(report["time"])
        for action in dossier["actions"]
        for report in action["reports"]
        if report["state"] in EXECUTED and report.get("time")
    ]
    if not acted:
        return None
    since_s = min(acted)
    query = {"since": since_s, "until": since_s + LATER_S, "points": 10}
    try:
        course = client.call("GET", f"/api/v1/jobs/{quote(dossier['incident']['job'], safe='')}/course", query)
    except ClientError:
        return None
    return next((start_s for start_s, part in _parts(course) if part in TRAINS and start_s > since_s), None)


def _parts(course: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
    for part in course["parts"]:
        yield unix_seconds(part["start"]), part["part"]


SERIES = {"accused": "accused", "low": "peers_low", "median": "peers_median", "high": "peers_high"}


class ChartValue(NamedTuple):
    """One value; None: not observed. ``value`` is +inf or -inf where the value itself was not finite."""

    incident: str
    metric: str
    unit: str
    form: str
    series: str
    name: str
    time_s: float
    value: float | None
    peers_seen: int
    threshold: float | None


def chart_rows(report: IncidentReport) -> Iterator[ChartValue]:
    """Yield the rows, by chart, then series, then time."""
    for chart in report.charts:
        columns = chart["columns"]
        for column, series in SERIES.items():
            name = chart["name"] if column == "accused" else ""
            of = (report.record["id"], chart["metric"], chart["unit"], chart["form"], series, name)
            for time_s, value, seen in zip(columns["time"], columns[column], columns["peers_seen"], strict=True):
                yield ChartValue(*of, time_s, None if value is None else float(value), seen, chart["threshold"])


def as_csv(report: IncidentReport) -> bytes:
    """Return the table as CSV with a header; times in RFC 3339, UTC; an empty value was not observed."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow("time" if name == "time_s" else name for name in ChartValue._fields)
    for row in chart_rows(report):
        moment = dt.datetime.fromtimestamp(row.time_s, dt.timezone.utc).isoformat(timespec="milliseconds")
        writer.writerow(_safe(value) for value in row._replace(time_s=moment))  # type: ignore[arg-type]
    return text.getvalue().encode()


def as_parquet(report: IncidentReport) -> bytes:
    """Return the table as Parquet; ``time`` is a timestamp in UTC, null values were not observed."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = list(chart_rows(report))
    columns = {name: [getattr(row, name) for row in found] for name in ChartValue._fields}
    moments = [round(time_s * 1e6) for time_s in columns.pop("time_s")]
    texts = {name: pa.array(columns[name], pa.string()) for name in ("incident", "metric", "unit", "form")}
    more = {name: pa.array(columns[name], pa.string()) for name in ("series", "name")}
    table = pa.table(
        {
            **texts,
            **more,
            "time": pa.array(moments, pa.timestamp("us", tz="UTC")),
            "value": pa.array(columns["value"], pa.float64()),
            "peers_seen": pa.array(columns["peers_seen"], pa.int64()),
            "threshold": pa.array(columns["threshold"], pa.float64()),
        }
    )
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def _safe(value: object) -> object:
    """Return the value; a name that a spreadsheet would take for a formula begins with an apostrophe (OWASP)."""
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r" and value else value


def redacted(report: IncidentReport) -> IncidentReport:
    """Return the report without names of nodes, jobs, people, switches and racks, serial numbers and addresses."""
    names = _names(report)
    substitutes: dict[str, str] = {}
    for kind, found in names.items():
        for at, name in enumerate(sorted({name for name in found if name}), 1):
            substitutes.setdefault(name, f"{kind}-{at}")
    if not substitutes:
        return report
    longest_first = sorted(substitutes, key=len, reverse=True)
    pattern = re.compile(r"(?<![\w.-])(" + "|".join(map(re.escape, longest_first)) + r")(?![\w-])")

    def replaced(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: substitutes[match[1]], value)
        if isinstance(value, Mapping):
            return {name: replaced(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [replaced(inner) for inner in value]
        return value

    return IncidentReport(
        replaced(report.dossier), tuple(replaced(report.charts)), replaced(report.undrawn), report.trains_again_s
    )


def _names(report: IncidentReport) -> dict[str, Iterable[str]]:
    dossier, record = report.dossier, report.record
    places, actions = dossier["where"], dossier["actions"]
    nodes = {*record["nodes"], record["node"] or "", *(place["node"] for place in places)}
    nodes |= {item["node"] or "" for item in record["evidence"]}
    nodes |= {node for action in actions for node in action["exclude"]}
    nodes |= {rank["node"] for action in actions for rank in action["ranks"]}
    nodes |= {node for chart in report.charts for node in chart["accused"]}
    gpus = [gpu for place in places for gpu in place["gpus"]]
    people = {dossier["owner"], record["acknowledged_by"] or "", *(entry["who"] for entry in dossier["story"])}
    people |= {reported.get("by") or "" for action in actions for reported in action["reports"]}
    return {
        "node": nodes,
        "job": {record["job"], *(job for place in places for job in place["other_jobs"])},
        "person": people - {"server", "local"},
        "rack": {place["rack"] or "" for place in places},
        "switch": {place["switch"] or "" for place in places},
        "gpu": {str(gpu[key]) for gpu in gpus for key in ("uuid", "serial") if gpu.get(key)},
    }


HOUR_S = 3_600.0
CAUSES = ("fault", "node")


class AccountsReport(NamedTuple):
    """The answers that a report is made of; ``causes`` are the losses by fault and by node."""

    jobs: Mapping[str, Any]
    causes: Mapping[str, Mapping[str, Any]]
    ledger: Mapping[str, Any]

    @property
    def unknown(self) -> tuple[str, ...]:
        """What this report cannot tell, in sentences."""
        total = self.jobs["total"]
        sentences = [f"{hours(one['seconds'])} hours: {one['reason']}" for one in total["unknown"]]
        uncounted_s = sum(amount["seconds_without_gpu_count"] for amount in total["lost"].values())
        if uncounted_s:
            sentences.append(f"{hours(uncounted_s)} lost hours are of jobs whose number of GPUs is not known")
        for answer, what in ((self.jobs, "jobs"), *((self.causes[by], f"{by}s") for by in CAUSES)):
            if answer["left_out"]:
                sentences.append(f"{answer['left_out']} more {what} are left out of the tables, not of the sums")
        if self.jobs["cut"]:
            sentences.append("there are more attempts on record than are read; the oldest ones are left out")
        if self.ledger["cut"]:
            sentences.append("there are more held-back actions on record than are read; the oldest are left out")
        return tuple(sentences)


def gather_accounts(
    client: Client,
    since_s: float | None,
    until_s: float | None,
    cell: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> AccountsReport:
    """Ask the server for all of it, or of one cell's; ``progress`` is told what is asked for. Raises ClientError."""
    query = {"since": since_s, "until": until_s, "cell": cell, "limit": PAGE_LIMIT_MAX}
    progress("the jobs' goodput")
    jobs = client.call("GET", "/api/v1/goodput", {**query, "by": "job"})
    causes = {}
    for by in CAUSES:
        progress(f"the losses by {by}")
        causes[by] = client.call("GET", "/api/v1/goodput", {**query, "by": by})
    progress("the ledger")
    ledger = client.call("GET", "/api/v1/ledger", {"since": since_s, "cell": cell, "limit": 1})
    return AccountsReport(jobs, causes, ledger)


def hours(seconds: float) -> str:
    """Return the hours, as people write them."""
    return f"{seconds / HOUR_S:,.2f}"


def job_row(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's account as cells of a table, by column."""
    unknown_s = sum(amount["seconds"] for amount in item["unknown"])
    return {
        "job": item["job"],
        "cell": item.get("cell", ""),
        "attempts": item["attempts"],
        "hours": hours(item["wall"]["seconds"]),
        "ettr": share(item["ettr_ratio"]),
        "goodput": share(item["goodput_ratio"]),
        "lost": hours(item["lost_gpu_seconds"]),
        "unknown": hours(unknown_s) if unknown_s else "",
    }


def total_row(name: str, counted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ledger's count of claims as cells of a table, by column."""
    interval: Sequence[float] | None = counted["interval_95"]
    words = "" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"
    ratio = counted["precision"]
    return {**counted, "name": name, "precision": "" if ratio is None else f"{ratio:.2f}", "interval": words}


def share(ratio: float | None) -> str:
    """Return the ratio, or that it is not known."""
    return "cannot tell" if ratio is None else f"{ratio:.3f}"
