"""Reports as HTML files that load nothing, for light and dark screens and for paper."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import markupsafe

from eagle_eye.cli.main import version
from eagle_eye.cli.reports import figures
from eagle_eye.cli.reports.accounts import CAUSES, HOUR_S, AccountsReport, hours, job_row, share, total_row
from eagle_eye.cli.reports.backtest import DrawnVerdict, JudgedTrace
from eagle_eye.cli.reports.incident import IncidentReport
from eagle_eye.cli.show import figure, observation, words
from eagle_eye.schema.notation import number
from eagle_eye.schema.record_types import prepare_record_types
from eagle_eye.server.backtest.command import SCORE_COLUMNS, score_line
from eagle_eye.server.backtest.judging import JudgedTraces

_TEMPLATES = Path(__file__).parent
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
        charts=[(chart, markupsafe.Markup(figures.svg(chart, report.marks))) for chart in report.charts],  # noqa: S704
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
        "charts": [(one, markupsafe.Markup(figures.svg(one, verdict.marks))) for one in verdict.charts],  # noqa: S704
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
    drawn = figures.bars([row["name"] for row in most], amounts, "GPU-hours") if most else ""
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
