"""``eagle-eye backtest``: judges recorded traces, and draws what was found."""

from __future__ import annotations

import argparse
from pathlib import Path

from eagle_eye.cli.reports.files import needs_extra, write
from eagle_eye.server.backtest import command


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    command.configure(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with pictures, one file")


def run(args: argparse.Namespace) -> int:
    """Run all traces; return 0 even if faults were found. Raises BadTrace, OSError, ConfigurationError."""
    if args.html is not None:
        with needs_extra("--html"):
            from eagle_eye.cli.reports import html
    judged = command.judge(args)
    command.report(args, judged)
    if args.html is not None:
        from eagle_eye.cli.reports import backtest

        write(args.html, html.backtest_page(backtest.traces(args.traces, judged), judged, html.origin()).encode())
    return 0
