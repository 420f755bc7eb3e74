"""Reports on an incident as files: whole, safe, loading nothing, with what could not be told."""

from __future__ import annotations

import csv
import io
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pyarrow.parquet as pq
import pytest

from eagle_eye.cli import html_reports, reports
from eagle_eye.cli.main import main
from eagle_eye.cli.reports import IncidentReport, Mark, gather_incident, redacted
from eagle_eye.client import Client
from eagle_eye.schema.labels import throttled_by
from tests.server.builders import NOW, FakeClock, Running
from tests.server.slow_node import ONSET_S, slow_node_server

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'eagle-eye[reports]'")
pytest.importorskip("jinja2", reason="jinja2 is not installed: pip install 'eagle-eye[reports]'")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with slow_node_server(tmp_path_factory.mktemp("data"), FakeClock()) as started:
        yield started


@pytest.fixture(scope="module")
def report(server: Running) -> IncidentReport:
    return gather_incident(Client(server.url), "inc_1")


def page(report: IncidentReport, *, redacted: bool = False) -> str:
    return html_reports.incident_page(report, html_reports.ReportOrigin("2026-01-01T00:00:00+00:00", "1", redacted))


class Elements(HTMLParser):
    """The elements of a page, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_shows_who_what_evidence_and_pictures(report: IncidentReport) -> None:
    text = page(report)
    assert "<h1>Straggler on n1</h1>" in text
    assert "95% sure" in text
    assert re.search(r"Compute time in a step</td><td>n1 device 0</td>.*2 s.*1 s.*1\.5 s", text)
    assert text.count("<svg") == len(report.charts) > 0
    assert "serial 16520" in text


def test_the_page_loads_nothing_and_runs_nothing(report: IncidentReport) -> None:
    found = Elements(page(report)).found
    assert not {tag for tag, _ in found} & {"script", "link", "iframe", "img", "object", "embed"}
    addresses = [value for _, attributes in found for name, value in attributes.items() if name in ("src", "href")]
    assert [one for one in addresses if not (one or "").startswith("#")] == []


def test_the_page_follows_the_readers_colours_and_prints_black_on_white(report: IncidentReport) -> None:
    text = page(report)
    assert "color-scheme: light dark" in text
    (dark,) = re.findall(r"@media \(prefers-color-scheme: dark\) \{ :root \{([^}]*)\}", text)
    (printed,) = re.findall(r"@media print \{.*?:root \{([^}]*)\}", text)
    names = {part.partition(":")[0].strip() for part in dark.split(";") if part.strip()}
    assert names <= {part.partition(":")[0].strip() for part in printed.split(";")}  # else night would be printed
    assert "--paper: #fff" in printed


def test_what_a_node_calls_itself_is_text(report: IncidentReport) -> None:
    hostile = "<script>alert(1)</script>$\\frac{x}$"
    record = {**report.record, "summary": hostile, "nodes": [hostile]}
    charts = tuple({**chart, "name": hostile} for chart in report.charts)
    text = page(report._replace(dossier={**report.dossier, "incident": record}, charts=charts))
    assert "<script" not in text
    assert "alert(1)" in text


def test_throttle_bits_are_named(report: IncidentReport) -> None:
    observed = {**report.record["evidence"][0], "value": 0x48, "unit": "bitmask"}
    record = {**report.record, "evidence": [observed]}
    assert f">{throttled_by(0x48)}</td>" in page(report._replace(dossier={**report.dossier, "incident": record}))


def test_a_picture_is_an_svg_with_the_accused_peers_threshold_and_moments(report: IncidentReport) -> None:
    drawn = html_reports.svg(report.charts[0], report.marks)
    texts = [element.text for element in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    said = " ".join(filter(None, texts))
    for part in ("n1 device 0", "peers: median, range", "threshold 1.5 s", "onset", "verdict", "exclude node"):
        assert part in said
    assert html_reports.INK not in drawn  # light or dark, as the page is


def test_the_same_incident_makes_the_same_file(report: IncidentReport) -> None:
    assert page(report) == page(report)


def test_a_picture_of_which_nothing_was_observed_is_drawn_empty_and_said(report: IncidentReport) -> None:
    columns = report.charts[0]["columns"]
    nothing = {name: [None] * len(values) for name, values in columns.items() if name not in ("time", "peers_seen")}
    empty = {**report.charts[0], "columns": {**columns, **nothing}, "threshold": None}
    assert "<svg" in html_reports.svg(empty, ())
    assert "nothing was observed of n1 device 0" in " ".join(report._replace(charts=(empty,)).unknown)


def test_values_that_are_not_finite_are_left_out_of_the_line(report: IncidentReport) -> None:
    columns = report.charts[0]["columns"]
    infinite = {**columns, "accused": ["+Inf"] * len(columns["time"])}
    assert "<svg" in html_reports.svg({**report.charts[0], "columns": infinite}, ())


def test_silence_of_the_accused_is_among_what_could_not_be_told(report: IncidentReport) -> None:
    assert "Compute time in a step: n1 device 0 was silent once while its peers were observed" in report.unknown


def test_a_metric_that_cannot_be_drawn_is_named_with_the_reason(report: IncidentReport) -> None:
    unknown = report._replace(undrawn={"gpu_power_watts": "HTTP 503: busy"}).unknown
    assert "GPU power could not be drawn: HTTP 503: busy" in unknown


def test_stages_are_counted_from_the_onset(report: IncidentReport) -> None:
    assert dict(report.took)["verdict"] == "15 s"
    assert report.marks[0] == Mark(ONSET_S, "onset")


def test_training_goes_on_with_the_first_training_after_the_first_executed_action(
    report: IncidentReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = [{"time": moment(0), "state": "accepted"}, {"time": moment(2), "state": "running"}]
    action = {**report.dossier["actions"][0], "reports": reported}
    parts = [(0, "training"), (2, "down"), (5, "startup"), (9, "training"), (20, "training")]
    course = {"parts": [{"start": moment(at), "part": part} for at, part in parts]}
    asked: list[dict[str, Any]] = []

    class Answers:
        def call(self, _method: str, _path: str, query: dict[str, Any]) -> Any:
            asked.append(query)
            return course

    again_s = reports._trains_again_s(Answers(), {**report.dossier, "actions": [action]})  # type: ignore[arg-type]
    assert again_s == NOW + 9
    assert asked[0]["since"] == NOW + 2
    assert "when training went on is not known" not in report._replace(trains_again_s=again_s).unknown


def moment(at_s: float) -> str:
    from eagle_eye.server.model.clock import rfc3339

    return rfc3339(NOW + at_s)


def test_csv_has_a_row_for_each_value_and_none_for_nothing(report: IncidentReport) -> None:
    found = list(csv.DictReader(io.StringIO(reports.as_csv(report).decode())))
    assert len(found) == sum(len(chart["columns"]["time"]) * len(reports.SERIES) for chart in report.charts)
    accused = [row for row in found if (row["metric"], row["series"]) == ("train_compute_seconds", "accused")]
    assert {row["value"] for row in accused} >= {"1.0", "2.0", ""}  # the silence of three seconds is no number
    assert accused[0]["time"].endswith("+00:00")


def test_a_name_that_a_spreadsheet_would_compute_is_made_text(report: IncidentReport) -> None:
    charts = ({**report.charts[0], "name": "=HYPERLINK(1)"},)
    assert b",'=HYPERLINK(1)," in reports.as_csv(report._replace(charts=charts))


def test_parquet_has_the_same_numbers_with_types(report: IncidentReport) -> None:
    table = pq.read_table(io.BytesIO(reports.as_parquet(report)))
    assert str(table.schema.field("time").type) == "timestamp[us, tz=UTC]"
    values = table["value"].to_pylist()
    assert len(values) == len(list(reports.chart_rows(report)))
    assert None in values
    assert not any(value is not None and math.isnan(value) for value in values)


def test_names_are_replaced_everywhere_and_alike(report: IncidentReport) -> None:
    text = page(redacted(report), redacted=True)
    assert re.search(r"\bn1\b", text) is None
    assert "GPU-1" not in text
    assert "16520" not in text
    assert "notebook" not in text
    assert "Straggler on node-1" in text
    assert "names are replaced" in text


@pytest.mark.parametrize("form", ["html", "csv", "parquet"])
def test_the_command_writes_the_file(
    form: str, server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EAGLE_EYE_SERVER", server.url)
    file = tmp_path / f"report.{form}"
    assert main(["incidents", "report", "inc_1", f"--{form}", str(file)]) == 0
    assert file.stat().st_size > 100
    assert str(file) in capsys.readouterr().out


def test_without_a_format_the_flags_are_named(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["incidents", "report", "inc_1", "--server", server.url]) == 2
    assert "--html FILE, --csv FILE or --parquet FILE" in capsys.readouterr().err


def test_without_the_extra_the_remedy_is_named(server: Running, tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from eagle_eye.cli.main import main\n"
        f"sys.exit(main(['incidents', 'report', 'inc_1', '--html', {str(tmp_path / 'x')!r}]))"
    )
    env = {**os.environ, "EAGLE_EYE_SERVER": server.url}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 2
    assert 'pip install "eagle-eye[reports]"' in done.stderr
