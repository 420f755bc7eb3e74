"""Names replaced for readers outside the site: the same name by the same substitute, wherever it stands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from eagle_eye.cli.reports.incident import IncidentReport


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
