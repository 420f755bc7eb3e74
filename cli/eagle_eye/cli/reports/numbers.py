"""The numbers behind an incident's charts as one tidy table: a row for each chart, series and time."""

from __future__ import annotations

import csv
import datetime as dt
import io
from collections.abc import Iterator
from typing import NamedTuple

from eagle_eye.cli.reports.incident import IncidentReport

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


def rows(report: IncidentReport) -> Iterator[ChartValue]:
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
    for row in rows(report):
        moment = dt.datetime.fromtimestamp(row.time_s, dt.timezone.utc).isoformat(timespec="milliseconds")
        writer.writerow(_safe(value) for value in row._replace(time_s=moment))  # type: ignore[arg-type]
    return text.getvalue().encode()


def as_parquet(report: IncidentReport) -> bytes:
    """Return the table as Parquet; ``time`` is a timestamp in UTC, null values were not observed."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = list(rows(report))
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
