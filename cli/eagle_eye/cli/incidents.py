"""``eagle-eye incidents``: what is wrong, and a report on one incident as a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args

from eagle_eye.cli import show
from eagle_eye.cli.client import connect
from eagle_eye.cli.operator import ANY, Noun, Verb
from eagle_eye.cli.reports import incident, numbers
from eagle_eye.cli.reports.files import needs_extra, write
from eagle_eye.cli.reports.redaction import redacted
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.api.filter_values import FAULT_NAMES, ListedIncidentState

FORMATS = ("html", "csv", "parquet")


class IncidentCommands(Noun):
    """Incidents, with a verb that makes more than one request: a report."""

    def _add_verbs(self, verbs: Any, common: argparse.ArgumentParser) -> None:
        report = verbs.add_parser("report", parents=[common], help="write a report on it, or the numbers of its charts")
        report.add_argument("id", metavar="INCIDENT", help="its id, as listed")
        report.add_argument("--html", type=Path, metavar="FILE", help="one file with everything in it, pictures too")
        report.add_argument("--csv", type=Path, metavar="FILE", help="the numbers behind the pictures")
        report.add_argument("--parquet", type=Path, metavar="FILE", help="the same, with types")
        report.add_argument("--redact", action="store_true", help="replace the names of nodes, jobs and people")

    def run(self, args: argparse.Namespace) -> int:
        """Ask the server and print its answer, or write the files. Raises ClientError, ConfigurationError, OSError."""
        return _report(args) if args.verb == "report" else super().run(args)


def _report(args: argparse.Namespace) -> int:
    files = {form: file for form in FORMATS if (file := getattr(args, form)) is not None}
    if not files:
        raise ConfigurationError("report: expected --html FILE, --csv FILE or --parquet FILE")
    from rich.console import Console

    with Console(stderr=True).status("asking for the incident") as status:
        found = incident.gather(
            connect(args.server, args.token_file), args.id, lambda what: status.update(f"asking for {what}")
        )
    if args.redact:
        found = redacted(found)
    for form, file in files.items():
        if form == "html":
            with needs_extra("--html"):
                from eagle_eye.cli.reports import html
            content = html.incident_page(found, html.origin(redacted=args.redact)).encode()
        else:
            content = numbers.as_csv(found) if form == "csv" else numbers.as_parquet(found)
        write(file, content)
    return 0


INCIDENTS = IncidentCommands(
    "incidents",
    "incident",
    show.INCIDENT_COLUMNS,
    filters={"state": get_args(ListedIncidentState), "job": ANY, "node": ANY, "fault": FAULT_NAMES, "cell": ANY},
    verbs=(
        Verb("acknowledge", "note that a person has seen it"),
        Verb("resolve", "close it"),
        Verb("false", "mark it as a false alarm"),
    ),
    page=show.incident,
)
