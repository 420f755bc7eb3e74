"""An incident's report as one HTML file that loads nothing, for light and dark screens and for paper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from eagle_eye.cli.reports import figures
from eagle_eye.cli.reports.incident import IncidentReport
from eagle_eye.cli.tables import printable
from eagle_eye.server.charts.notation import number

_TEMPLATE = Path(__file__).with_name("incident.html")


def page(report: IncidentReport, *, made: str, version: str, redacted: bool) -> str:
    """Return the file's text; ``made`` is the time of the report. Texts of the fleet are escaped."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters |= {"words": _words, "moment": _time}
    record = report.record
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        record=record,
        dossier=report.dossier,
        fault=_words(record["fault"]).capitalize(),
        where=_where(record),
        facts=[(name, value) for name, value in _facts(report) if value],
        took=report.took,
        evidence=[_observation(item) for item in record["evidence"]],
        charts=[(chart, markupsafe.Markup(figures.svg(chart, report.marks))) for chart in report.charts],  # noqa: S704
        unknown=report.unknown,
        actions=[{**one, "asked": f"{_words(one['kind'])} {', '.join(one['exclude'])}"} for one in _actions(report)],
        made=made,
        version=version,
        redacted=redacted,
    )


def _facts(report: IncidentReport) -> Iterator[tuple[str, str]]:
    record, dossier = report.record, report.dossier
    yield "job", f"{record['job']}, attempt {record['attempt']}"
    yield "owner", dossier["owner"]
    for place in dossier["where"]:
        yield "node", ", ".join(filter(None, (place["node"], _words(place["phase"] or place["state"] or "unknown"))))
        yield "rack, switch", ", ".join(filter(None, (place["rack"], place["switch"])))
        for gpu in place["gpus"]:
            said = (gpu.get("model"), f"serial {gpu['serial']}" if gpu.get("serial") else "", gpu.get("uuid"))
            yield "GPU", ", ".join(filter(None, said))
    yield "device", "" if record["device"] is None else str(record["device"])
    yield "began", _time(record["onset"])
    yield "found", _time(record["detected"])
    yield "over", _time(record["ended"]) if record["ended"] else "not yet"
    yield "kinds of evidence", ", ".join(map(_words, record["kinds"]))
    yield "found by", ", ".join(map(_words, record["detectors"]))
    yield "usual repair", dossier["repair"]


def _observation(item: Mapping[str, Any]) -> dict[str, str]:
    device = "" if item["device"] is None else f" device {item['device']}"
    figures_ = {name: _figure(item[name], item["unit"]) for name in ("value", "peers_median", "threshold")}
    return {
        "metric": _words(item["metric"]),
        "on": f"{item['node']}{device}" if item["node"] else "the job",
        **figures_,
    }


def _figure(value: Any, unit: str) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return hex(int(value)) if unit == "bitmask" else number(value, unit)
    return printable(value)


def _actions(report: IncidentReport) -> list[Mapping[str, Any]]:
    return sorted(report.dossier["actions"], key=lambda action: str(action["created"]))


def _time(moment: str) -> str:
    """Return one of the API's times without its fractions."""
    return moment[:19].replace("T", " ")


def _where(record: Mapping[str, Any]) -> str:
    return ", ".join(record["nodes"]) or "no single node"


def _words(name: str) -> str:
    return printable(name).replace("_", " ")
