"""``eagle-eye backtest``: judges recorded traces, and draws what was found."""

from __future__ import annotations

import argparse
from pathlib import Path

from eagle_eye.cli.reports import needs_extra, write_file
from eagle_eye.server.backtest import command


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    command.configure(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with pictures, one file")


def run(args: argparse.Namespace) -> int:
    """Run all traces; return 0 even if faults were found. Raises BadTrace, OSError, ConfigurationError."""
    if args.html is not None:
        with needs_extra("--html"):
            from eagle_eye.cli import html_reports
    judged = command.judge(args)
    command.report(args, judged)
    if args.html is not None:
        from eagle_eye.cli import html_reports

        write_file(
            args.html,
            html_reports.backtest_page(
                html_reports.judged_traces(args.traces, judged), judged, html_reports.origin()
            ).encode(),
        )
    return 0
